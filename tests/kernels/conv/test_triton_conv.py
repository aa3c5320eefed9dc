"""The Triton convolution against the torch one; run like the cases of the scan, see `test_triton_cases.py`."""

import os

import pytest
import torch
from palimpsa_surgery.kernels.conv.causal_conv import causal_conv

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or TRITON_INTERPRET=1"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
DEVICE = "cpu" if INTERPRETED else "cuda"


def run(backend, x, weight, bias, state, activation, cu):
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias, state)]
    view = leaves[0][..., 3:]  # a strided slice, as the mixer's projection gives
    y, last = causal_conv(
        view, *leaves[1:3], activation=activation, initial_state=leaves[3], cu_seqlens=cu, backend=backend
    )
    generator = torch.Generator().manual_seed(3)
    loss = sum((t * torch.randn(t.shape, generator=generator).to(t)).sum() for t in (y, last))
    return [y, last, *torch.autograd.grad(loss, [t for t in leaves if t is not None], allow_unused=True)]


@pytest.mark.parametrize(
    ("length", "width", "activation", "bias", "cu"),
    [
        (5, 4, "silu", True, None),
        (37, 4, None, True, None),
        (2, 3, "silu", False, None),
        (34, 2, "silu", True, None),
        (9, 4, "silu", True, [0, 2, 2, 9]),
    ],
)
def test_equals_the_torch_convolution(length, width, activation, bias, cu):
    torch.manual_seed(0)
    rows, channels = (2, 7) if cu is None else (1, 7)
    x = torch.randn(rows, length, channels + 3, device=DEVICE)
    weight = torch.randn(channels, width, device=DEVICE)
    b = torch.randn(channels, device=DEVICE) if bias else None
    state = torch.randn(rows if cu is None else len(cu) - 1, channels, width - 1, device=DEVICE)
    cu = None if cu is None else torch.tensor(cu, device=DEVICE)
    args = (x, weight, b, state, activation, cu)
    for actual, expected in zip(run("triton", *args), run("torch", *args), strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)
