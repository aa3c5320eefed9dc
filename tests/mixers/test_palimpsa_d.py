"""The mixer of Palimpsa-D alone: sizes and precision. `tests/modeling/palimpsa_d` holds it to a time loop."""

import pytest
import torch
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.mixers.geometry import GateSpec
from palimpsa_surgery.mixers.palimpsa_d import HeadNorm, PalimpsaDGeometry, PalimpsaDMixer

GEOMETRY = PalimpsaDGeometry(12, 4, 5, 2, 3, 4, 1e-5)


def make(groups=5):
    torch.manual_seed(0)
    mixer = PalimpsaDMixer(GEOMETRY, GateSpec(2, groups, "softplus", True))
    torch.nn.init.normal_(mixer.metaplasticity.beta_scale)
    return mixer


@pytest.mark.parametrize("groups", [1, 5])
def test_parameters_have_the_shapes_that_the_geometry_says(groups):
    mixer = make(groups)
    found = {name: tuple(x.shape) for name, x in mixer.named_parameters()}
    assert found == GEOMETRY.shapes(mixer.metaplasticity.spec)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_groups": 3}, r"n_groups \(3\) must divide num_heads \(4\)"),
        ({"state_size": 0}, "state_size is 0; it must be at least 1"),
        ({"conv_kernel": 1}, "conv_kernel is 1; it must be at least 2"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        PalimpsaDGeometry(**{**vars(GEOMETRY), **changes})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_rates_stay_in_fp32_and_the_output_has_the_type_of_the_input(dtype):
    mixer = make().to(dtype)
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    assert {getattr(mixer, name).dtype for name in ("A_log", "dt_bias", "D")} == {kept}
    assert mixer.metaplasticity.beta_scale.dtype == kept
    assert mixer(torch.randn(1, 7, 12, dtype=dtype)).dtype == dtype


def test_queries_and_keys_are_normed_whatever_their_length():
    mixer, h = make().double(), torch.randn(1, 9, 12, dtype=torch.float64)
    q, k, x = mixer._split(torch.randn(1, 9, 6), 5 * torch.randn(1, 9, 6), torch.randn(1, 9, 20))
    assert torch.allclose(q.norm(dim=-1), torch.full((1, 9, 2), 3**-0.5), rtol=1e-4)
    assert torch.allclose(k.norm(dim=-1), torch.ones(1, 9, 2), rtol=1e-4)
    assert x.shape == (1, 9, 4, 5)
    assert torch.isfinite(mixer(torch.zeros_like(h))).all(), "a key of zero has no direction"


def test_the_head_norm_comes_before_the_gate():
    norm, y, z = HeadNorm(5, 1e-5), torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        out = norm(3 * y, z)
    plain = y / y.square().mean(-1, keepdim=True).sqrt() * norm.weight * z * torch.sigmoid(z)
    assert torch.allclose(out, plain, atol=1e-4)


def test_autocast_leaves_the_scan_in_fp32():
    mixer, h = make(), torch.randn(1, 40, 12)
    with torch.no_grad():
        plain = mixer(h)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = mixer(h)
    assert (cast - plain).norm() / plain.norm() < 3e-2
