"""Rows times a number: the fused form against the plain one."""

import os

import pytest
import torch
from palimpsa_surgery.kernels.common import scaling

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNS = INTERPRETED or torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"


def problem(C, dtype, *, T=5, H=3, strided=False):
    torch.manual_seed(C)
    x = torch.randn(2, T, H * C + 7, device=DEVICE).to(dtype)
    x = x[..., 3 : 3 + H * C].unflatten(-1, (H, C)) if strided else x[..., : H * C].reshape(2, T, H, C)
    return x.detach().requires_grad_(), torch.rand(2, T, H, device=DEVICE).requires_grad_()


def run(x, scale, dtype, sigmoid):
    out = scaling.scale_rows(x, scale, dtype, sigmoid=sigmoid)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64).view(out.shape)
    return out.detach(), *torch.autograd.grad((out.double() * weight).sum(), (x, scale))


@pytest.mark.skipif(not RUNS, reason="needs a GPU or TRITON_INTERPRET=1")
@pytest.mark.skipif(INTERPRETED and torch.cuda.is_available(), reason="the GPU runs the cases itself")
class TestFused:
    pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

    @pytest.mark.parametrize("sigmoid", [False, True])
    @pytest.mark.parametrize("strided", [False, True])
    @pytest.mark.parametrize(("C", "dtype"), [(64, torch.bfloat16), (20, torch.float32), (8, torch.float16)], ids=str)
    def test_equals_the_plain_form(self, C, dtype, strided, sigmoid, monkeypatch):
        x, scale = problem(C, dtype, T=70, strided=strided)
        assert scaling.FUSED.reason("triton", x.device) is None
        target = torch.float32 if sigmoid else dtype
        found = run(x, scale, target, sigmoid)
        monkeypatch.setattr(scaling.FUSED, "reason", lambda *a: "not now")
        for a, b in zip(found, run(x, scale, target, sigmoid), strict=True):
            assert a.dtype == b.dtype
            # fp32 inside: they part where the last bit is rounded.
            torch.testing.assert_close(a, b, rtol=2 * torch.finfo(a.dtype).eps, atol=1e-5)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_what_the_kernels_do_not_take_is_plain_torch(sigmoid):
    for x, scale in (problem(1, torch.bfloat16), [t[:, 0] for t in problem(16, torch.float32)]):
        expected = (x.float().sigmoid() if sigmoid else x.float()) * scale[..., None]
        assert torch.equal(scaling.scale_rows(x, scale, torch.float32, sigmoid=sigmoid), expected)
    x, scale = (t.detach().double().requires_grad_() for t in problem(16, torch.float32))
    assert torch.autograd.gradcheck(lambda *t: scaling.scale_rows(*t, torch.float64, sigmoid=sigmoid), (x, scale))
