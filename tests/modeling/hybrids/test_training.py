"""What training does to a hybrid: losses, gradients, gradient checkpointing and adapters."""

import copy

import pytest
import torch
from palimpsa_surgery.kernels.common.kept import kept
from palimpsa_surgery.kernels.metaplastic.scan import ScanOutput, ScanState, metaplastic_scan
from palimpsa_surgery.mixers import mixer
from palimpsa_surgery.mixers.geometry import GATE, GateSpec
from palimpsa_surgery.modeling.hybrids.hosts import mixer_path, mixer_paths
from palimpsa_surgery.modeling.hybrids.modeling_palimpsa_hybrid import model_class
from tiny_hybrids import PROJECTIONS, SWAPPED, token_ids
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

peft = pytest.importorskip("peft")

FP32 = 1e-5  # relative L2


def gradients(model, **options):
    model.zero_grad()
    loss = model(token_ids(), labels=token_ids(), **options).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def mixers(model):
    return [mixer_path(model.config, layer) for layer in SWAPPED[model.config.model_type.removeprefix("palimpsa_")]]


def test_the_loss_is_that_of_the_logits(kind, hybrid):
    model = hybrid(kind)
    with torch.no_grad():
        out = model(token_ids(), labels=token_ids())
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), token_ids()[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_gradient_checkpointing_changes_no_gradient(kind, reentrant, hybrid):
    plain, recomputed = (copy.deepcopy(hybrid(kind)).train() for _ in range(2))
    recomputed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    (loss, expected), (same, found) = gradients(plain), gradients(recomputed)
    torch.testing.assert_close(same, loss)
    assert expected.keys() == found.keys()
    new = [f"{path}.{GATE}.{name}" for path in mixers(plain) for name in GateSpec.TENSORS]
    assert all(expected[name].any() for name in new)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= FP32 * gradient.norm(), name


class OnceScan(torch.autograd.Function):
    """A scan like those on GPUs: its backward needs its inputs only. Counts how often its forward runs."""

    runs = 0

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return kept(lambda: OnceScan._run(*inputs))

    @staticmethod
    def _run(*inputs):
        OnceScan.runs += 1
        result = metaplastic_scan(*inputs)
        return result.output, *result.state

    @staticmethod
    def backward(ctx, *gradients):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            result = metaplastic_scan(*leaves)
            return torch.autograd.grad((result.output, *result.state), leaves, gradients)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_gradient_checkpointing_keeps_what_the_scans_of_swapped_mixers_gave(mamba_kind, reentrant, hybrid, monkeypatch):
    def scan(*inputs, backend, **nothing):
        assert not any(x is not None for x in nothing.values())
        return ScanOutput((found := OnceScan.apply(*inputs))[0], ScanState(*found[1:]), None)

    expected = gradients(copy.deepcopy(hybrid(mamba_kind)).train())[1]
    monkeypatch.setattr(OnceScan, "runs", 0)
    monkeypatch.setattr(mixer, "metaplastic_scan", scan)
    model = copy.deepcopy(hybrid(mamba_kind)).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = gradients(copy.deepcopy(model))[1]
    # In a hybrid layer of zamba2 a layer that is run again is inside another one, which may cost one more run.
    nested = sum("mamba_decoder" in path for path in mixers(model))
    assert 0 <= OnceScan.runs - len(mixers(model)) <= nested
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= FP32 * gradient.norm(), name


def test_training_and_evaluation_give_the_same_logits(kind, hybrid):
    model = copy.deepcopy(hybrid(kind))
    with torch.no_grad():
        expected = model(token_ids()).logits
        torch.testing.assert_close(model.train()(token_ids(), use_cache=False).logits, expected)


def test_an_adapter_trains_what_it_names_and_is_saved_and_merged(kind, hybrid, tmp_path):
    """By full paths, in one mixer that is swapped and one that is not."""
    hybrid(kind).save_pretrained(tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    places = sorted({*mixers(base), *list(mixer_paths(base.config).values())[-1:]})
    targets = [f"{path}.{name}" for path in places for name in PROJECTIONS[kind]]
    config = peft.LoraConfig(
        r=2, target_modules=targets, modules_to_save=[f"{path}.{GATE}" for path in mixers(base)], lora_alpha=4
    )
    model = peft.get_peft_model(base, config).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):  # the first step leaves the A of an adapter where it was, for its B is zero
        model(input_ids=token_ids(), labels=token_ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(moved) == len(places) * 2 * 2 + len(mixers(base)) * len(GateSpec.TENSORS)
    with torch.no_grad():
        expected = model.eval()(input_ids=token_ids()).logits
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"), tmp_path / "adapter"
    )
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(input_ids=token_ids()).logits, expected)
        merged = again.merge_and_unload()(token_ids()).logits
    assert (merged - expected).norm() < FP32 * expected.norm()


def test_the_trainer_knows_the_classes_as_causal_models(kind):
    """Else it would not shift the labels for label smoothing."""
    assert model_class(kind).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
