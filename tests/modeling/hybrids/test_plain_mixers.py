"""The mixers of a hybrid that are not swapped are ours too: against those of the host's own class."""

import copy

import pytest
import torch
from palimpsa_surgery.modeling.hybrids.hosts import mixer_paths
from palimpsa_surgery.modeling.hybrids.mixer_hybrid import HybridMixer, PlainHybridMixer
from palimpsa_surgery.modeling.hybrids.modeling_palimpsa_hybrid import model_class
from tiny_hybrids import DELTAS, SWAPPED, make_host, make_hybrid, token_ids

FP32, BF16 = 1e-5, 0.02  # relative L2
MASK = torch.ones(3, 21, dtype=torch.long)
MASK[1, :6], MASK[2, :15] = 0, 0
PADDED = token_ids() * MASK


def distance(one, two):
    return ((one - two).norm() / two.norm()).item()


def logits_and_gradients(model, ids, mask):
    """Of real tokens; the gradients as one vector, in the order of the names."""
    model.zero_grad()
    logits = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    torch.nn.functional.cross_entropy(logits, ids[mask.bool()].roll(1)).backward()
    gradients = {name: p.grad.flatten() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), torch.cat([gradients[name] for name in sorted(gradients)])


def test_which_class_stands_where(variant, hybrid, host):
    kind, model = variant.partition("/")[0], hybrid(variant)
    for layer, path in mixer_paths(model.config).items():
        found, own = type(model.get_submodule(path)), type(host(variant).get_submodule(path))
        if kind in DELTAS:
            assert issubclass(found, own)
            assert (found is own) == (layer not in SWAPPED[kind])
        else:
            assert found is (HybridMixer if layer in SWAPPED[kind] else PlainHybridMixer)


def test_a_model_of_plain_mixers_is_the_host_in_logits_and_gradients(mamba_variant, host):
    """Names, shapes and types of the tensors, too."""
    expected, model = copy.deepcopy(host(mamba_variant)).train(), make_hybrid(mamba_variant, layers=[]).train()
    tensors = [{name: (x.shape, x.dtype) for name, x in one.state_dict().items()} for one in (model, expected)]
    assert tensors[0] == tensors[1]
    for ids, mask in ((token_ids(), torch.ones_like(MASK)), (PADDED, MASK)):
        found, wanted = (logits_and_gradients(one, ids, mask) for one in (model, expected))
        for ours, theirs in zip(found, wanted, strict=True):
            assert distance(ours, theirs) < FP32


@pytest.mark.parametrize("length", [1, 7, 8, 9, 70])
def test_one_plain_mixer_is_the_hosts_in_output_and_gradients(mamba_variant, host, length):
    """Around the host's chunks of 8 and our blocks of 64; the host's chunks round as ours do, in another order."""
    model = copy.deepcopy(host(mamba_variant))
    theirs = model.get_submodule(next(iter(mixer_paths(model.config).values())))
    ours = PlainHybridMixer(copy.deepcopy(theirs), model.config)
    assert dict(ours.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
    generator = torch.Generator().manual_seed(length)
    hidden = torch.randn(2, length, 32, generator=generator)
    weights = torch.randn(2, length, 32, generator=generator)
    gradients = []
    for mixer in (ours, theirs):
        given = hidden.clone().requires_grad_()
        out = mixer(given)
        (out * weights).sum().backward()
        gradients.append({"": given.grad, **{name: p.grad for name, p in mixer.named_parameters()}, "out": out})
    for name, expected in gradients[1].items():
        assert (gradients[0][name] - expected).norm() <= FP32 * expected.norm(), name


@torch.no_grad()
def test_in_a_short_type_the_tensors_and_the_outputs_are_the_hosts(mamba_kind, host):
    model = make_host(mamba_kind).bfloat16()
    theirs = model.get_submodule(next(iter(mixer_paths(model.config).values())))
    ours = PlainHybridMixer(theirs, model.config)
    tensors = dict(theirs.named_parameters())
    assert all(tensors[name] is parameter for name, parameter in ours.named_parameters())
    assert {p.dtype for p in ours.to(torch.bfloat16).parameters()} == {torch.bfloat16}
    hidden = torch.randn(2, 11, 32, generator=torch.Generator().manual_seed(5)).bfloat16()
    exact = host(mamba_kind).get_submodule(next(iter(mixer_paths(model.config).values())))(hidden.float())
    assert distance(ours(hidden).float(), exact) < max(BF16, 1.2 * distance(theirs(hidden).float(), exact))


def test_the_step_size_is_bounded_as_in_training():
    """The classes of these hosts bound it from below, in prefill alone, by a number that is for initialization."""
    for kind in ("zamba2", "nemotron_h"):
        shipped = {m.time_step_limit for m in make_host(kind).modules() if hasattr(m, "time_step_limit")}
        model = model_class(kind)(make_hybrid(kind, layers=[]).config)
        ours = {m.geometry.time_step_limit for m in model.modules() if isinstance(m, PlainHybridMixer)}
        assert (shipped, ours) == ({(0.001, float("inf"))}, {(0.0, float("inf"))})
