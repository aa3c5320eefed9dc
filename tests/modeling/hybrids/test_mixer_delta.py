"""Gated DeltaNet hosts with the rule swapped: the host with importance off, one rule in every way of running."""

import copy

import pytest
import torch
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.mixers.importance import ImportanceRecorder, record_importance
from palimpsa_surgery.mixers.metaplasticity import metaplasticity_off
from palimpsa_surgery.mixers.states import LayerStates
from palimpsa_surgery.modeling.hybrids import mixer_delta
from palimpsa_surgery.modeling.hybrids.configuration_palimpsa_hybrid import config_class, known_hosts
from palimpsa_surgery.modeling.hybrids.hosts import mixer_paths
from palimpsa_surgery.modeling.hybrids.mixer_delta import DeltaMixin, delta_geometry, run_with_rules, swap_rule
from palimpsa_surgery.recipes.evaluation.suites.streaming import read_piece
from tiny_hybrids import DELTAS, SWAPPED, VARIANTS, make_host, make_hybrid, token_ids
from torch import nn

KINDS = [kind for kind in DELTAS if kind in known_hosts()]
EQUAL = 1e-5
"""Relative L2 in fp32, the limit of every conversion."""


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def host(kind):
    return make_host(kind)


@pytest.fixture(scope="module")
def model(kind):
    return make_hybrid(kind)


def layers_of(model):
    return {layer: model.get_submodule(path) for layer, path in mixer_paths(model.config).items()}


def padded():
    mask = torch.ones_like(token_ids())
    mask[1, :6] = 0
    return token_ids() * mask, mask


@torch.no_grad()
def generated(model, **options):
    ids, mask = padded()
    options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    } | options
    return model.generate(ids, attention_mask=mask, **options)


@torch.no_grad()
def test_without_importance_it_is_the_host(host, model, rel):
    ids, mask = padded()
    with metaplasticity_off(model):
        assert rel(model(token_ids()).logits, host(token_ids()).logits) < EQUAL
        found, expected = (one(ids, attention_mask=mask).logits[mask.bool()] for one in (model, host))
        assert rel(found, expected) < EQUAL
        found, expected = generated(model), generated(host)
        assert torch.equal(found.sequences, expected.sequences)
        assert rel(torch.stack(found.logits), torch.stack(expected.logits)) < EQUAL
    assert rel(model(token_ids()).logits, host(token_ids()).logits) > 1e-2


@torch.no_grad()
def test_pieces_through_a_cache_equal_one_pass(model, rel):
    whole, cache, parts, start = model(token_ids()).logits, None, [], 0
    for piece in token_ids().split([9, 1, 4, 1, 6], 1):
        output, cache = read_piece(model, piece, cache, start)
        parts.append(output.logits)
        start += piece.shape[1]
    assert rel(torch.cat(parts, 1), whole) < EQUAL


def test_generation_equals_the_whole_text_anew_and_rows_do_not_touch(model, rel):
    found = generated(model)
    ids, mask = padded()
    whole = torch.cat([mask, torch.ones(3, 8, dtype=mask.dtype)], 1)
    with torch.no_grad():
        logits = model(found.sequences, attention_mask=whole).logits[:, ids.shape[1] - 1 : -1]
        assert rel(torch.stack(found.logits, 1), logits) < EQUAL
        alone = model(ids[1:2, 6:]).logits
        assert rel(model(ids, attention_mask=mask).logits[1:2, 6:], alone) < EQUAL
    assert generated(model, num_beams=3, output_logits=False).sequences.shape == (3, 29)


def test_every_parameter_of_the_gate_has_a_gradient(kind):
    model = make_hybrid(kind).train()
    model.gradient_checkpointing_enable()
    model(input_ids=token_ids(), labels=token_ids()).loss.backward()
    for layer in SWAPPED[kind]:
        for name, parameter in layers_of(model)[layer].metaplasticity.named_parameters():
            assert parameter.grad.abs().max() > 0, (layer, name)


def test_only_the_swapped_layers_run_another_rule(kind, model, host):
    kinds = {layer: type(mixer) for layer, mixer in layers_of(model).items()}
    assert [layer for layer, made in kinds.items() if issubclass(made, DeltaMixin)] == SWAPPED[kind]
    assert kinds[1] is type(layers_of(host)[1])
    assert issubclass(kinds[0], kinds[1])
    assert set(model.state_dict()) - set(host.state_dict()) == {
        f"model.layers.{layer}.linear_attn.metaplasticity.{name}"
        for layer in SWAPPED[kind]
        for name in ("beta_down.weight", "beta_up.weight", "beta_scale", "log_prior")
    }


def test_a_copy_runs_on_its_own_tensors(model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        before = model(token_ids()).logits
        layers_of(other)[0].metaplasticity.beta_scale.fill_(9.0)
        assert not torch.equal(other(token_ids()).logits, before)
        assert torch.equal(model(token_ids()).logits, before)


@torch.no_grad()
def test_importance_is_recorded_as_it_stands_in_the_cache(kind, model):
    with record_importance(model) as recorder:
        _, cache = read_piece(model, token_ids())
    expected = ImportanceRecorder()
    for layer in SWAPPED[kind]:
        mixer = layers_of(model)[layer]
        state = mixer.split_state(LayerStates(cache, layer).recurrent)
        assert [tuple(part.shape) for part in state] == [(3, 4, 6, 8), (3, 4, 8)]
        expected.observe(layer, state.J, mixer.metaplasticity.prior())
    assert recorder.layers() == expected.layers()
    assert all(figures.ratio > 1 for figures in recorder.layers().values())


def test_short_types_leave_decays_and_gates_in_fp32(kind):
    model = make_hybrid(kind).to(torch.bfloat16)
    wide = {
        name.rpartition("linear_attn.")[2]
        for name, tensor in model.named_parameters()
        if tensor.dtype != torch.bfloat16
    }
    assert wide == {"A_log", "dt_bias", "metaplasticity.beta_scale", "metaplasticity.log_prior"}
    with torch.no_grad():
        assert torch.isfinite(model(token_ids()).logits).all()


def test_the_prior_stays_at_one_or_above_and_can_come_back(model):
    gate = copy.deepcopy(layers_of(model)[0].metaplasticity)
    with torch.no_grad():
        gate.log_prior.copy_(torch.tensor([-2.0, 0.0, 0.5, 40.0]))
    prior = gate.prior()
    assert torch.allclose(prior, torch.tensor([0.0, 0.0, 0.5, 20.0]).exp())
    prior[:3].sum().backward()
    assert (gate.log_prior.grad[:3] > 0).all()


def test_the_hosts_own_rule_can_be_watched(host):
    layer, seen = layers_of(host)[0], []
    hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(4))
    rules = mixer_delta.rules_of(layer, hidden)

    def watched(*args, **kwargs):
        seen.append(kwargs["g"])
        return rules[mixer_delta.RULES[0]](*args, **kwargs)

    with torch.no_grad():
        found = run_with_rules(layer, dict.fromkeys(rules, watched), hidden)
        assert torch.equal(found, layer(hidden))
    assert [tuple(g.shape) for g in seen] == [(2, 5, 4)]


def test_a_release_with_another_rule_is_refused(model):
    class Layer(nn.Module):
        def forward(self, hidden_states):
            return hidden_states

    layer = copy.deepcopy(layers_of(model)[1])
    layer.__class__ = Layer
    with pytest.raises(UsageError, match=r"Layer of transformers .* does not call torch_chunk_gated_delta_rule or"):
        swap_rule(layer, model.config.gate)


def test_sizes_are_those_of_the_layer(model):
    plain, swapped = layers_of(model)[1], layers_of(model)[0]
    geometry = delta_geometry(plain)
    assert (geometry.num_heads, geometry.head_dim, geometry.state_size, geometry.inner_size) == (4, 6, 8, 24)
    assert geometry.conv_channels == plain.conv1d.weight.shape[0]
    shapes = {name: tuple(tensor.shape) for name, tensor in swapped.named_parameters()}
    assert geometry.shapes(model.config.gate) == shapes == swapped.geometry.shapes(model.config.gate)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"palimpsa_layers": [3]}, "palimpsa_layers names 3; this model has mixers in the layers 0, 1, 2$"),
        ({"palimpsa_layers": [0], "beta_groups": 2}, "beta_groups: 2 is not 1, but all values of a head share one"),
    ],
)
def test_configs_that_cannot_be(kind, keys, message):
    with pytest.raises(UsageError, match=message):
        config_class(kind)(**VARIANTS[kind], **keys)
