import pytest
import torch
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.mixers.geometry import GateSpec
from palimpsa_surgery.mixers.importance import record_importance
from palimpsa_surgery.mixers.metaplasticity import metaplasticity_off
from palimpsa_surgery.modeling.hybrids.hosts import mixer_path, mixer_paths
from palimpsa_surgery.modeling.hybrids.mixer_hybrid import HybridMixer, host_geometry
from palimpsa_surgery.modeling.hybrids.modeling_palimpsa_hybrid import host_class
from tiny_hybrids import SWAPPED, VARIANTS, make_host, make_hybrid, token_ids, with_true_bounds
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FP32, BF16 = 1e-5, 0.02  # relative L2
GATE = GateSpec(rank=2, groups=4, scale_form="abs", train_prior=True)
HIDDEN = torch.randn(2, 11, 32, generator=torch.Generator().manual_seed(5))


def first_mixer(model):
    return model.get_submodule(next(iter(mixer_paths(model.config).values())))


def distance(one, two):
    return ((one - two).norm() / two.norm()).item()


@torch.no_grad()
def test_a_view_of_a_hosts_mixer_computes_the_same_on_the_same_tensors(mamba_variant, host):
    """What measuring and verifying do."""
    model = host(mamba_variant)
    mixer = first_mixer(model)
    view = HybridMixer(mixer, model.config, GATE)
    ours = dict(view.named_parameters())
    assert all(ours.pop(name) is parameter for name, parameter in mixer.named_parameters())
    assert set(ours) == {f"metaplasticity.{name}" for name in GATE.shapes(32, 8)}
    with metaplasticity_off(view):
        assert distance(view(HIDDEN), mixer(HIDDEN)) < FP32


def test_a_mixer_has_the_tensors_that_its_geometry_says(variant, hybrid):
    model = hybrid(variant)
    for layer in SWAPPED[variant.partition("/")[0]]:
        mixer = model.get_submodule(mixer_path(model.config, layer))
        said = mixer.geometry.shapes(model.config.gate)
        found = {name: tuple(parameter.shape) for name, parameter in mixer.named_parameters()}
        absent = {"norm.weight"} if variant == "falcon_h1" else set()
        assert found == {name: shape for name, shape in said.items() if name not in absent}


def test_the_geometry_is_read_from_a_mixer_without_memory(mamba_kind):
    with torch.device("meta"):
        model = host_class(mamba_kind)(CONFIG_MAPPING[mamba_kind](**VARIANTS[mamba_kind]))
    assert host_geometry(first_mixer(model), model.config) == host_geometry(
        first_mixer(make_host(mamba_kind)), model.config
    )


@torch.no_grad()
def test_in_a_short_type_it_is_as_near_as_the_hosts_own(mamba_variant, host):
    model = make_host(mamba_variant).bfloat16()
    mixer, exact = first_mixer(with_true_bounds(model)), first_mixer(host(mamba_variant))(HIDDEN)
    view = HybridMixer(mixer, model.config, GATE)
    assert view.A_log.dtype == view.dt_bias.dtype == view.D.dtype == torch.float32
    with metaplasticity_off(view):
        out = view(HIDDEN.bfloat16())
    assert out.dtype == torch.bfloat16
    assert distance(out.float(), exact) < max(BF16, 1.2 * distance(mixer(HIDDEN.bfloat16()).float(), exact))


@torch.no_grad()
def test_the_importance_gate_reads_the_input_without_the_multiplier():
    model = make_hybrid("falcon_h1")
    mixer, seen = model.get_submodule("model.layers.1.mamba"), []
    assert mixer.input_multiplier == 0.6
    mixer.metaplasticity.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0]))
    mixer.in_proj.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0]))
    mixer(HIDDEN)
    projected, gate = seen
    torch.testing.assert_close(gate, HIDDEN)
    torch.testing.assert_close(projected, 0.6 * HIDDEN)


@torch.no_grad()
def test_the_parts_that_a_hook_on_the_projection_splits_are_those_used():
    model = make_hybrid("falcon_h1")
    mixer = model.get_submodule("model.layers.1.mamba")
    z, channels, dt = mixer.split_projection(mixer.project(HIDDEN))
    raw = torch.cat(
        [z / 0.7, channels[..., :32] / 1.3, channels[..., 32:64] / 0.9, channels[..., 64:] / 1.1, dt / 0.8], -1
    )
    torch.testing.assert_close(raw, mixer.in_proj(0.6 * HIDDEN))


@torch.no_grad()
def test_importance_is_recorded_by_layer(kind, hybrid):
    with record_importance(hybrid(kind)) as recorder:
        hybrid(kind)(token_ids(), use_cache=False)
    layers = recorder.layers()
    assert list(layers) == SWAPPED[kind]
    assert all(layer.ratio > 1.0 and layer.sequences == 3 for layer in layers.values())


def test_an_activation_that_is_not_silu_is_refused():
    model = make_host("bamba")
    first_mixer(model).activation = "gelu"
    with pytest.raises(UsageError, match="layer 0: the convolution's activation is 'gelu'; Mamba2 has silu"):
        host_geometry(first_mixer(model), model.config)


def test_a_mixer_of_another_kind_is_refused():
    model = make_host("bamba")
    first_mixer(model).D = torch.nn.Parameter(torch.ones(64))
    with pytest.raises(UsageError, match=r"layer 0: D has shape \[64\]; a Mamba2 mixer of these sizes has \[8\]"):
        host_geometry(first_mixer(model), model.config)
