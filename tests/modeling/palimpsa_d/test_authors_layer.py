"""A layer in the authors' names: read whole, or refused with the name that is wrong."""

import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError
from palimpsa_surgery.mixers.geometry import GateSpec
from palimpsa_surgery.mixers.palimpsa_d import PalimpsaDGeometry, PalimpsaDMixer
from palimpsa_surgery.modeling.palimpsa_d.authors_layer import load_authors_layer

D, H, P, N, R = 12, 4, 5, 3, 2


def make_mixer(groups=H, form="softplus"):
    return PalimpsaDMixer(PalimpsaDGeometry(D, H, P, groups, N, 4, 1e-5), GateSpec(R, P, form, False))


@pytest.fixture
def tensors():
    """As the authors' layer saves them, for as many key heads as value heads."""
    shapes = {
        **{f"{name}_proj.weight": (H * N, D) for name in "qk"},
        **{f"{name}_proj.weight": (H * P, D) for name in "vg"},
        **{f"{name}_conv1d.weight": (H * N, 1, 4) for name in "qk"},
        "v_conv1d.weight": (H * P, 1, 4),
        **{"bs_proj.weight": (H, D), "dt_proj.weight": (H, D)},
        **dict.fromkeys(("A_log", "dt_bias", "b_scale", "Ip_log", "D"), (H,)),
        **{"b_rank_proj.weight": (R, D), "b_proj.weight": (H * P, R)},
        **{"o_norm.weight": (P,), "o_proj.weight": (D, H * P)},
    }
    r = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=r) for name, shape in shapes.items()}


def test_every_tensor_is_read_and_the_layer_runs_as_the_loop_does(tensors, layer_loop, rel):
    mixer, h = make_mixer(), torch.randn(1, 9, D, generator=torch.Generator().manual_seed(1))
    load_authors_layer(mixer, tensors)
    assert mixer.state_dict().keys() == mixer.geometry.shapes(mixer.metaplasticity.spec).keys()
    assert {n: tuple(x.shape) for n, x in mixer.state_dict().items()} == mixer.geometry.shapes(
        mixer.metaplasticity.spec
    )

    class Config:
        num_heads, head_dim, n_groups, state_size, conv_kernel = H, P, H, N, 4
        beta_scale_form, layer_norm_epsilon = "softplus", 1e-5

    # The loop takes our names: the authors' here are turned by hand, as `docs/palimpsa_d.md` says them.
    ours = {
        "b_rank_proj.weight": "metaplasticity.beta_down.weight",
        "b_proj.weight": "metaplasticity.beta_up.weight",
        "b_scale": "metaplasticity.beta_scale",
        "Ip_log": "metaplasticity.log_prior",
    }
    p = {ours.get(name, name): x.double() for name, x in tensors.items()}
    with torch.no_grad():
        assert rel(mixer(h)[0], layer_loop(Config, p, h[0].double())) < 1e-5


def test_a_gated_delta_net_is_refused_with_the_reason(tensors):
    """Its write gate is called b_proj, and would pass for W_up by name."""
    delta = {n: x for n, x in tensors.items() if n not in ("b_rank_proj.weight", "b_scale", "Ip_log", "D")}
    delta |= {"b_proj.weight": tensors["bs_proj.weight"], "a_proj.weight": delta.pop("dt_proj.weight")}
    with pytest.raises(CheckpointError, match=r"of a Gated DeltaNet, whose b_proj is its write gate.*no exact start"):
        load_authors_layer(make_mixer(), delta)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("Ip_log"), "Ip_log is missing in the authors' layer; expected .*b_scale, Ip_log"),
        (lambda t: t.update(q_bias=torch.ones(1)), "q_bias is not known in the authors' layer; expected"),
        (lambda t: t.update(b_scale=torch.ones(H + 1)), r"b_scale has shape \[5\]; expected \[4\]"),
        (
            lambda t: t.update({"dt_proj.weight": torch.ones(2, D)}),
            r"dt_proj.weight has shape \[2, 12\]; expected \[4, 12\] \(one row a value head\)",
        ),
    ],
)
def test_a_layer_that_does_not_fit_is_refused_and_nothing_is_copied(tensors, change, message):
    mixer = make_mixer()
    before = {name: x.clone() for name, x in mixer.state_dict().items()}
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        load_authors_layer(mixer, tensors)
    assert all(torch.equal(x, before[name]) for name, x in mixer.state_dict().items())


def test_the_scale_is_stored_in_the_softplus_form(tensors):
    with pytest.raises(CheckpointError, match="beta_scale_form is 'abs'; expected 'softplus'"):
        load_authors_layer(make_mixer(form="abs"), tensors)
