"""The causal depthwise convolution with its SiLU in Triton, for GPUs without the causal-conv1d package.

`causal_conv.py` has shapes and meaning. The backward pass computes the sums before the activation again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..common.triton_launch import UNFUSED_SUMS, on_device_of
from .types import ConvProblem


def unsupported(problem: ConvProblem) -> str | None:
    """Why this problem cannot run, or None."""
    return "it has no fp64" if problem.dtype == torch.float64 else None


@triton.jit
def _inputs(x, history, i_b, t, c, m, T, C, sxb, sxt, W: tl.constexpr):
    """x at tokens t [BT] and channels c [BC]; before the first token, the history; zeros past the last."""
    inside = (t >= 0) & (t < T)
    now = tl.load(
        x + i_b.to(tl.int64) * sxb + t.to(tl.int64)[:, None] * sxt + c[None, :], mask=m & inside[:, None], other=0.0
    )
    old = (t < 0) & (t >= 1 - W)
    p = history + (i_b.to(tl.int64) * C + c[None, :]) * (W - 1) + (t + W - 1)[:, None]
    return now.to(tl.float32) + tl.load(p, mask=m & old[:, None], other=0.0).to(tl.float32)


@triton.jit
def conv_kernel(
    x, weight, bias, history, y,
    T, C, sxb, sxt,  # sizes, and strides of x
    W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    NT = tl.cdiv(T, BT)
    NC = tl.cdiv(C, BC)
    pid = tl.program_id(0)
    i_b = pid // (NT * NC)
    t = (pid // NC % NT) * BT + tl.arange(0, BT)
    c = (pid % NC) * BC + tl.arange(0, BC)
    m = (c < C)[None, :]
    total = tl.zeros([BT, BC], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(W):
        w = tl.load(weight + c * W + (W - 1 - j), mask=c < C, other=0.0).to(tl.float32)
        total += w[None, :] * _inputs(x, history, i_b, t - j, c, m, T, C, sxb, sxt, W)
    if SILU:
        total = total * tl.sigmoid(total)
    out = y + (i_b.to(tl.int64) * T + t.to(tl.int64)[:, None]) * C + c[None, :]
    tl.store(out, total.to(y.dtype.element_ty), mask=m & (t < T)[:, None])


@triton.jit
def conv_backward_kernel(
    x, weight, bias, history, dy,
    dx, d_history, d_weight,  # written
    T, C, sxb, sxt,  # sizes, and strides of x
    W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    # Tokens start at 1 - W, so that the history gets its gradient too.
    # d_weight is [programs over tokens, W + 1, C]: the last row is the bias's.
    NT = tl.cdiv(T + W - 1, BT)
    NC = tl.cdiv(C, BC)
    pid = tl.program_id(0)
    i_b = pid // (NT * NC)
    i_t = pid // NC
    t = (i_t % NT) * BT + tl.arange(0, BT) - (W - 1)
    c = (pid % NC) * BC + tl.arange(0, BC)
    mc = c < C
    m = mc[None, :]
    b = tl.zeros([BC], tl.float32)
    if HAS_BIAS:
        b += tl.load(bias + c, mask=mc, other=0.0).to(tl.float32)
    grad = tl.zeros([BT, BC], tl.float32)
    for j in tl.static_range(W):
        # The output at t + j reads the input at t with weight W - 1 - j.
        s = t + j
        inside = m & ((s >= 0) & (s < T))[:, None]
        d = tl.load(dy + (i_b.to(tl.int64) * T + s.to(tl.int64)[:, None]) * C + c[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        if SILU:
            total = tl.zeros([BT, BC], tl.float32) + b[None, :]
            for i in tl.static_range(W):
                w = tl.load(weight + c * W + (W - 1 - i), mask=mc, other=0.0).to(tl.float32)
                total += w[None, :] * _inputs(x, history, i_b, s - i, c, m, T, C, sxb, sxt, W)
            sig = tl.sigmoid(total)
            d = d * sig * (1.0 + total * (1.0 - sig))
        if j == 0:
            for i in tl.static_range(W):
                dw = tl.sum(d * _inputs(x, history, i_b, s - i, c, m, T, C, sxb, sxt, W), 0)
                tl.store(d_weight + (i_t.to(tl.int64) * (W + 1) + (W - 1 - i)) * C + c, dw, mask=mc)
            tl.store(d_weight + (i_t.to(tl.int64) * (W + 1) + W) * C + c, tl.sum(d, 0), mask=mc)
        w = tl.load(weight + c * W + (W - 1 - j), mask=mc, other=0.0).to(tl.float32)
        grad += w[None, :] * d
    out = dx + (i_b.to(tl.int64) * T + t.to(tl.int64)[:, None]) * C + c[None, :]
    tl.store(out, grad.to(dx.dtype.element_ty), mask=m & ((t >= 0) & (t < T))[:, None])
    old = d_history + (i_b.to(tl.int64) * C + c[None, :]) * (W - 1) + (t + W - 1)[:, None]
    tl.store(old, grad.to(d_history.dtype.element_ty), mask=m & (t < 0)[:, None])


class Conv(torch.autograd.Function):
    """Saves its inputs only."""

    @staticmethod
    def forward(ctx, x, weight, bias, silu, history):
        B, T, C = x.shape
        W = weight.shape[1]
        x = x if x.stride(2) == 1 else x.contiguous()
        weight, history = weight.contiguous(), history.contiguous()
        y = torch.empty(B, T, C, dtype=x.dtype, device=x.device)
        BT, BC = 32, min(64, triton.next_power_of_2(C))
        with on_device_of(x):
            conv_kernel[(B * triton.cdiv(T, BT) * triton.cdiv(C, BC),)](
                x, weight, bias, history, y, T, C, *x.stride()[:2], W, BT, BC, silu, bias is not None, num_warps=4
            )
        ctx.save_for_backward(x, weight, bias, history)
        ctx.silu = silu
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, bias, history = ctx.saved_tensors
        B, T, C = x.shape
        W = weight.shape[1]
        dx = torch.empty(B, T, C, dtype=x.dtype, device=x.device)
        d_history = torch.empty_like(history)
        BT, BC = 32, min(64, triton.next_power_of_2(C))
        rows = B * triton.cdiv(T + W - 1, BT)
        d_weight = torch.empty(rows, W + 1, C, dtype=torch.float32, device=x.device)
        with on_device_of(x):
            conv_backward_kernel[(rows * triton.cdiv(C, BC),)](
                x, weight, bias, history, dy.contiguous(), dx, d_history, d_weight,
                T, C, *x.stride()[:2], W, BT, BC, ctx.silu, bias is not None, **UNFUSED_SUMS,
            )  # fmt: skip
        total = d_weight.sum(0)
        d_bias = None if bias is None else total[W].to(bias.dtype)
        return dx, total[:W].t().to(weight.dtype), d_bias, None, d_history


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, history: Tensor) -> Tensor:
    """See `causal_conv.py`."""
    return Conv.apply(x, weight, bias, activation == "silu", history)
