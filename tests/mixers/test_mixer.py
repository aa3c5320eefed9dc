import math
from pathlib import Path

import pytest
import torch
from palimpsa_surgery.mixers.mixer import GatedRMSNorm
from palimpsa_surgery.modeling import GateSpec, Mamba2Mixer, MixerGeometry, PalimpsaMixer, metaplasticity_off
from safetensors import safe_open
from torch import nn

GOLDEN = Path(__file__).parents[1] / "data" / "palimpsa-m-layer-g1.safetensors"
THEIR_NAMES = {
    "b_rank_proj.weight": "metaplasticity.beta_down.weight",
    "b_proj.weight": "metaplasticity.beta_up.weight",
    "b_scale": "metaplasticity.beta_scale",
    "Ip_log": "metaplasticity.log_prior",
}


@pytest.fixture
def golden():
    """Our mixer with the weights of the authors' layer, its input and the output they computed."""
    with safe_open(GOLDEN, "pt") as file:
        meta = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    stored = ("hidden_size", "num_heads", "head_dim", "n_groups", "state_size")
    geometry = MixerGeometry(
        **{key: int(meta[key]) for key in stored},
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        norm_eps=1e-5,
        time_step_limit=(0.0, math.inf),
        chunk_size=64,
    )
    mixer = PalimpsaMixer(geometry, GateSpec(int(meta["beta_rank"]), geometry.head_dim, "softplus", False))
    prefix = "state_dict."
    weights = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    mixer.load_state_dict({THEIR_NAMES.get(name, name): tensor for name, tensor in weights.items()})
    return mixer, tensors["x"], tensors["y"]


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_golden_layer_of_the_authors(golden, rel, backend):
    mixer, x, y = golden
    mixer.backend = backend
    with torch.no_grad():
        assert rel(mixer(x), y) < 1e-5
        with metaplasticity_off(mixer):
            assert rel(mixer(x), y) > 0.1, "the golden layer must be one where metaplasticity shows"


def test_names_of_the_tensors(tiny_config):
    geometry, gate = tiny_config().mixer_geometry(), tiny_config().gate
    plain = {
        "A_log": (6,),
        "D": (6,),
        "dt_bias": (6,),
        "conv1d.bias": (88,),
        "conv1d.weight": (88, 1, 4),
        "in_proj.weight": (142, 24),
        "norm.weight": (48,),
        "out_proj.weight": (24, 48),
    }
    assert {name: tuple(t.shape) for name, t in Mamba2Mixer(geometry).state_dict().items()} == plain
    new = set(PalimpsaMixer(geometry, gate).state_dict()) - set(plain)
    assert new == {f"metaplasticity.{n}" for n in ("beta_down.weight", "beta_up.weight", "beta_scale", "log_prior")}


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_gated_norm_runs_over_each_group_separately(groups, rel):
    norm = GatedRMSNorm(12, 12 // groups, 1e-5)
    nn.init.uniform_(norm.weight)
    y, z = torch.randn(2, 5, 12), torch.randn(2, 5, 12)
    gated = y * torch.sigmoid(z) * z
    parts = [part / (part.square().mean(-1, keepdim=True) + 1e-5).sqrt() for part in gated.chunk(groups, -1)]
    assert rel(norm(y, z), torch.cat(parts, -1) * norm.weight) < 1e-6


def test_first_heads_use_the_first_group(lively_model):
    mixer = lively_model(n_groups=2).backbone.layers[0].mixer
    hidden = torch.randn(1, 9, 24)
    _, channels, _ = mixer.split_projection(mixer.in_proj(hidden))
    x, B, C = mixer.split_channels(channels)
    assert x.shape == (1, 9, 6, 8)
    assert B.shape == C.shape == (1, 9, 2, 10)
    step, ones = torch.rand(1, 9, 6), torch.ones(1, 9, 6, 8)
    gate = (torch.rand(1, 9, 6, 8), torch.ones(6))
    before, _ = mixer._scan(ones, B, C, step, gate, None, None)
    B = B.clone()
    B[:, :, 1] += 1.0
    after, _ = mixer._scan(ones, B, C, step, gate, None, None)
    changed = (after - before).abs().amax((0, 1, 3)) > 0
    assert changed.tolist() == [False, False, False, True, True, True]


@pytest.mark.parametrize("limit", [(0.0, math.inf), (0.01, 0.2)])
def test_step_size_is_softplus_within_its_limits(tiny_config, limit, rel):
    mixer = Mamba2Mixer(tiny_config(time_step_limit=limit).mixer_geometry()).double()
    nn.init.normal_(mixer.dt_bias)
    raw = torch.linspace(-9, 9, 60, dtype=torch.float64).view(1, 10, 6)
    expected = torch.log(1 + torch.exp(raw + mixer.dt_bias)).clamp(*limit)
    assert rel(mixer.step_size(raw), expected) < 1e-12


def test_initialization_bounds_of_the_step_do_not_limit_it(tiny_config):
    mixer = Mamba2Mixer(tiny_config(time_step_min=0.001, time_step_max=0.1).mixer_geometry())
    assert mixer.step_size(torch.full((1, 1, 6), 5.0)).min() > 1.0


@pytest.mark.parametrize("swapped", [True, False])
def test_decays_from_1e_8_to_50_nats_stay_finite_and_ordered(tiny_config, swapped):
    """Six heads that differ only in their decay: the more a head forgets, the less of an old value it gives back."""
    torch.manual_seed(0)
    config = tiny_config(n_groups=1)
    geometry = config.mixer_geometry()
    mixer = PalimpsaMixer(geometry, config.gate) if swapped else Mamba2Mixer(geometry)
    length = 40
    x = torch.zeros(1, length, 6, 8)
    x[:, 0] = 1.0
    keys = torch.ones(1, length, 1, 10)
    step = torch.full((1, length, 6), 0.1).requires_grad_()
    with torch.no_grad():
        mixer.A_log.copy_(torch.tensor([1e-8, 1e-4, 1e-2, 1.0, 5.0, 50.0]).mul(10).log())
    gate = (torch.full((1, length, 6, 8), 0.01), torch.ones(6))
    y, state = mixer._scan(x, keys, keys, step, gate, None, None)
    last = y[0, -1, :, 0]
    assert torch.isfinite(y).all()
    assert torch.isfinite(state).all()
    assert (last[:-1] >= last[1:]).all()
    assert last[0] > 0.5
    assert last[-1] < 1e-6
    y.sum().backward()
    assert torch.isfinite(step.grad).all()
    assert torch.isfinite(mixer.A_log.grad).all()


def test_pads_do_not_reach_the_last_inputs_of_the_convolution(tiny_config):
    from palimpsa_surgery.mixers.layout import sequence_layout

    conv = Mamba2Mixer(tiny_config().mixer_geometry()).conv1d
    x = torch.arange(1.0, 7.0).view(1, 6, 1).expand(1, 6, 88)
    layout = sequence_layout((1, 6), attention_mask=torch.tensor([[1, 0, 1, 0, 0, 1]]))
    before = torch.tensor([-3.0, -2.0, -1.0]).expand(1, 88, 3)
    _, state = conv(x, layout, before)
    assert state[0, 0].tolist() == [1.0, 3.0, 6.0]
    _, state = conv(x[:, 1:5], sequence_layout((1, 4), attention_mask=torch.tensor([[0, 1, 0, 0]])), before)
    assert state[0, 0].tolist() == [-2.0, -1.0, 3.0]


def test_state_is_split_into_views(tiny_config):
    config = tiny_config(beta_groups=2)
    mixer = PalimpsaMixer(config.mixer_geometry(), config.gate)
    state = torch.zeros(3, 6, 8 + 2, 10)
    M, J = mixer.split_state(state)
    assert M.shape == (3, 6, 8, 10)
    assert J.shape == (3, 6, 2, 10)
    J.add_(1.0)
    assert state[:, :, 8:].min() == 1.0
    assert state[:, :, :8].max() == 0.0
