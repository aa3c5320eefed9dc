"""`scaling.scale_rows` in Triton, forward and backward one kernel each; nothing but its inputs is kept between them."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .triton_launch import on_device_of, power_of_two

TILE = 2048


@triton.jit
def _row(rows, H, x_stride, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    # Rows of this program, where they lie in x (tokens x_stride apart) and in what is contiguous, and which are real.
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.arange(0, BC)
    m = (r < rows)[:, None] & (c < C)[None, :]
    px = ((r // H).to(tl.int64) * x_stride + (r % H) * C)[:, None] + c[None, :]
    return r, r < rows, px, r.to(tl.int64)[:, None] * C + c[None, :], m


@triton.jit
def scale_kernel(
    x, scale, out, rows, H, x_stride, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, SIGMOID: tl.constexpr
):
    r, mr, px, p, m = _row(rows, H, x_stride, C, BR, BC)
    y = tl.load(x + px, mask=m, other=0.0).to(tl.float32)
    if SIGMOID:
        y = tl.sigmoid(y)
    s = tl.load(scale + r, mask=mr, other=0.0)
    tl.store(out + p, (y * s[:, None]).to(out.dtype.element_ty), mask=m)


@triton.jit
def scale_backward_kernel(
    x, scale, d_out, dx, d_scale, rows, H, x_stride,
    C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    r, mr, px, p, m = _row(rows, H, x_stride, C, BR, BC)
    y = tl.load(x + px, mask=m, other=0.0).to(tl.float32)
    s = tl.load(scale + r, mask=mr, other=0.0)
    d = tl.load(d_out + p, mask=m, other=0.0).to(tl.float32)
    slope = s[:, None]
    if SIGMOID:
        y = tl.sigmoid(y)
        slope *= y * (1.0 - y)
    tl.store(dx + p, (d * slope).to(dx.dtype.element_ty), mask=m)
    tl.store(d_scale + r, tl.sum(d * y, 1), mask=mr)


def _launch(kernel, tensors, x: Tensor, sigmoid: bool) -> None:
    B, T, H, C = x.shape
    rows, BC = B * T * H, power_of_two(C)
    BR = max(1, TILE // BC)
    with on_device_of(x):
        kernel[(triton.cdiv(rows, BR),)](*tensors, rows, H, x.stride(1), C, BR, BC, sigmoid, num_warps=4)


def _in_rows(x: Tensor) -> Tensor:
    """x with each token's heads together and tokens evenly apart: a slice of a projection stays as it is."""
    B, T, _, C = x.shape
    together = x.stride(3) == 1 and x.stride(2) == C and (B == 1 or x.stride(0) == T * x.stride(1))
    return x if together else x.contiguous()


def scale_rows(x: Tensor, scale: Tensor, dtype: torch.dtype, sigmoid: bool) -> Tensor:
    """See `scaling.scale_rows`."""
    return _ScaleRows.apply(x, scale, dtype, sigmoid)


class _ScaleRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, dtype, sigmoid):
        rows, factors = _in_rows(x), scale.contiguous()
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        if out.numel():
            _launch(scale_kernel, (rows, factors, out), rows, sigmoid)
        ctx.save_for_backward(x, scale)
        ctx.sigmoid = sigmoid
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        x, scale = ctx.saved_tensors
        rows, factors = _in_rows(x), scale.contiguous()
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        d_scale = torch.empty(scale.shape, dtype=scale.dtype, device=x.device)
        if dx.numel():
            _launch(scale_backward_kernel, (rows, factors, d_out.contiguous(), dx, d_scale), rows, ctx.sigmoid)
        return dx, d_scale, None, None
