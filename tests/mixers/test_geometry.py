import dataclasses

import pytest
import torch
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.mixers.geometry import GateSpec, MixerGeometry, checked_gate, keeps_fp32
from palimpsa_surgery.modeling import Mamba2Mixer, PalimpsaMixer

VALID = {
    "hidden_size": 24,
    "num_heads": 6,
    "head_dim": 8,
    "n_groups": 2,
    "state_size": 10,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "norm_eps": 1e-5,
    "time_step_limit": (0.0, float("inf")),
    "chunk_size": 16,
}


def test_sizes_follow_the_layout_of_the_projection():
    geometry = MixerGeometry(**VALID)
    assert geometry.inner_size == 48
    assert geometry.conv_channels == 48 + 2 * 2 * 10
    assert geometry.projection_sizes == (48, 88, 6)
    assert geometry.projection_size == 142


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MixerGeometry(**VALID).num_heads = 3


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"num_heads": 0}, "num_heads is 0; it must be at least 1"),
        ({"conv_kernel": 1}, "conv_kernel is 1; it must be at least 2"),
        ({"n_groups": 4}, r"n_groups \(4\) must divide num_heads \(6\)"),
        ({"time_step_limit": (0.2, 0.1)}, r"time_step_limit is \[0.2, 0.1\]"),
        ({"time_step_limit": (-1.0, 0.1)}, "two numbers from 0 on, the lower first"),
    ],
)
def test_refuses_what_cannot_be_built(over, message):
    with pytest.raises(UsageError, match=message):
        MixerGeometry(**{**VALID, **over})


def gate(**over) -> GateSpec:
    return GateSpec(**{"rank": 5, "groups": 4, "scale_form": "abs", "train_prior": True, **over})


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"rank": 0}, "beta_rank: 0 is less than 1"),
        ({"rank": 25}, "beta_rank: 25 is more than hidden_size 24"),
        ({"groups": 3}, "beta_groups: 3 does not divide head_dim 8"),
        ({"groups": 0}, "beta_groups: 0 does not divide head_dim 8"),
        ({"scale_form": "linear"}, "beta_scale_form: 'linear' is none of abs, softplus"),
    ],
)
def test_a_gate_that_does_not_fit_is_refused_by_its_key(over, message):
    with pytest.raises(UsageError, match=f"^config: {message}"):
        PalimpsaMixer(MixerGeometry(**VALID), gate(**over))


@pytest.mark.parametrize(
    ("said", "rank", "groups"),
    [({}, 4, 8), ({"beta_rank": 3}, 3, 8), ({"beta_groups": 1}, 4, 1)],
)
def test_a_gate_of_which_little_is_said_has_the_usual_rest(said, rank, groups):
    found = GateSpec.complete(64, 8, **said)
    assert found == GateSpec(rank, groups, "abs", True)
    assert tuple(found.keys()) == GateSpec.KEYS
    assert GateSpec.complete(64, 8, **found.keys()) == found
    assert GateSpec.complete(7, 8).rank == 1


@pytest.mark.parametrize("swapped", [True, False])
@pytest.mark.parametrize("biases", [(False, True), (True, False), (True, True)])
def test_what_is_said_of_the_tensors_is_what_the_modules_have(swapped, biases):
    geometry = MixerGeometry(**{**VALID, "use_bias": biases[0], "use_conv_bias": biases[1]})
    spec = checked_gate(gate(), geometry) if swapped else None
    with torch.device("meta"):
        mixer = PalimpsaMixer(geometry, spec) if swapped else Mamba2Mixer(geometry)
    assert geometry.shapes(spec) == {name: tuple(tensor.shape) for name, tensor in mixer.named_parameters()}
    short = mixer.to(torch.bfloat16)
    kept = {name for name, parameter in short.named_parameters() if parameter.dtype == torch.float32}
    assert kept == {name for name in geometry.shapes(spec) if keeps_fp32(f"layers.0.mixer.{name}")}


@pytest.mark.parametrize("name", ["layers.0.norm.weight", "layers.0.mixer.D2", "remixer.D", "a.mixer.A_log.weight"])
def test_only_whole_names_are_kept_in_fp32(name):
    assert not keeps_fp32(name)
