"""The plain-Triton backend of the operator, for every GPU that Triton runs on; `scan.py` has shapes and meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..common.precision import dtype_name
from ..common.torch_blocks import needs_backward
from ..common.triton_blocks import Blocks, make_blocks
from ..common.triton_launch import on_device_of, uses_assembly
from . import torch_chunk, triton_backward, triton_forward, triton_states, triton_step
from .kept import kept
from .triton_shared import SharedScan
from .types import ScanInputs, ScanOutput, ScanProblem, ScanState

CHUNK = 128
MAX_STATE_SIZE = 256
SHARED_CHANNELS = 8  # from so many channels per beta on, a vector of importances beats one per channel


def unsupported(problem: ScanProblem) -> str | None:
    """Why these sizes cannot run, or None."""
    if problem.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it takes fp32, bf16 and fp16, not {dtype_name(problem.dtype)}"
    if problem.state_size > MAX_STATE_SIZE:
        return f"it takes state sizes up to {MAX_STATE_SIZE}, not {problem.state_size}"
    return None


def scan(x: ScanInputs) -> ScanOutput:
    """`scan.metaplastic_scan` in plain Triton."""
    return run_scan(x, Passes(_forward, lambda k, v: triton_backward.plain_inside(k, v, uses_assembly(v.device))))


class Passes(NamedTuple):
    """How the scan with a beta of every channel's own runs.

    Attributes:
        forward: (inputs) -> output, M, J, variance or None.
        inside: (k [tokens, G, N], v [tokens, H, P]) -> what works inside blocks backwards.
    """

    forward: Callable[[ScanInputs], tuple]
    inside: Callable[[Tensor, Tensor], triton_backward.Inside]


def run_scan(x: ScanInputs, passes: Passes) -> ScanOutput:
    """Run the scan in the form that suits how many channels share a beta."""
    P, g = x.v.shape[3], x.beta.shape[3]
    if x.initial_state is not None:
        x = x._replace(initial_state=ScanState(*(y.float().contiguous() for y in x.initial_state)))
    differentiable = x.variance and needs_backward(x.q, x.k, x.beta, x.log_decay, x.prior)
    now = x._replace(variance=x.variance and not differentiable)
    if P // g >= SHARED_CHANNELS:
        output, M, J, var = _shared_scan(now)
    elif g < P:
        state = x.initial_state and ScanState(x.initial_state.M, x.initial_state.J.repeat_interleave(P // g, 2))
        now = now._replace(beta=x.beta.repeat_interleave(P // g, 3), initial_state=state)
        output, M, J, var = ChannelScan.run(now, passes)
        J, var = J[:, :, :: P // g], None if var is None else var[..., :: P // g]
    else:
        output, M, J, var = ChannelScan.run(now, passes)
    if differentiable:
        # Rare (a training loss on the variance), so it takes the slow way: the torch backend differentiates it.
        state = x.initial_state and ScanState(x.initial_state.M.detach(), x.initial_state.J)
        var = torch_chunk.scan(x._replace(v=x.v.detach(), initial_state=state)).variance
    return ScanOutput(output, ScanState(M, J), var)


def _shared_scan(x: ScanInputs):
    """Channels that share a beta: every beta group of a head is a head of its own, and its importance a vector."""
    B, T, H, P = x.v.shape
    g, N = x.beta.shape[3], x.k.shape[3]
    heads = H * g
    flat = [flat_tokens(y) for y in (x.q, x.k, x.v.reshape(B, T, heads, P // g), x.beta.reshape(B, T, heads))]
    wide = flat_tokens(x.log_decay.repeat_interleave(g, 2) if g > 1 else x.log_decay)
    prior = x.prior.repeat_interleave(g) if g > 1 else x.prior
    state = (None, None)
    if x.initial_state is not None:
        state = x.initial_state.M.reshape(-1, heads, P // g, N), x.initial_state.J.reshape(-1, heads, N)
    with on_device_of(x.v):
        out, M, J, var = SharedScan.apply(*flat, wide, prior, *state, B, x.cu_seqlens, x.variance)
    var = None if var is None else var.view(B, T, H, g)
    return out.view(B, T, H, P), M.view(-1, H, P, N), J.view(-1, H, g, N), var


class ChannelScan(torch.autograd.Function):
    """The scan with one beta per channel. Saves its inputs only: the states are derived again."""

    @staticmethod
    def run(x: ScanInputs, passes: Passes):
        return ChannelScan.apply(*x.differentiable, x.cu_seqlens, x.chunk_size, x.variance, passes)

    @staticmethod
    def forward(ctx, q, k, v, beta, log_decay, prior, M0, J0, cu_seqlens, chunk_size, variance, passes: Passes):
        ctx.save_for_backward(q, k, v, beta, log_decay, prior, M0, J0, cu_seqlens)
        ctx.inside = passes.inside
        ctx.set_materialize_grads(False)
        state = None if M0 is None else ScanState(M0, J0)
        x = ScanInputs(q, k, v, beta, log_decay, prior, state, cu_seqlens, chunk_size, variance)
        with on_device_of(v):
            found = kept(lambda: passes.forward(x))
        if variance:
            ctx.mark_non_differentiable(found[3])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dM, dJ, _):
        *inputs, M0, J0, cu_seqlens = ctx.saved_tensors
        v, flat = inputs[2], [flat_tokens(x) for x in inputs[:5]]
        do = torch.zeros_like(v) if do is None else do
        with on_device_of(v):
            grads = triton_backward.backward(
                *flat,
                inputs[5],
                None if M0 is None else (M0, J0),
                flat_tokens(do),
                _last_gradients(dM, dJ),
                ctx.inside(*flat[1:3]),
                batch=v.shape[0],
                length=v.shape[1],
                cu_seqlens=cu_seqlens,
            )
        shaped = (g.view(x.shape).to(x.dtype) for g, x in zip(grads, inputs, strict=False))
        return *shaped, *grads[6:], None, None, None, None


def _forward(x: ScanInputs):
    batch, length, H, P = x.v.shape
    chunk = max(16, triton.next_power_of_2(x.chunk_size or CHUNK))
    blocks = make_blocks(batch, length, chunk, x.v.device, x.cu_seqlens)
    flat = [flat_tokens(y) for y in x[:5]]
    out = torch.empty_like(flat[2])
    var = torch.empty(out.shape, dtype=torch.float32, device=out.device) if x.variance else None
    # An empty document keeps what is put here.
    if x.initial_state is None:
        final = [torch.zeros(blocks.rows, H, P, x.k.shape[3], dtype=torch.float32, device=out.device) for _ in "MJ"]
    else:
        final = [y.clone() for y in x.initial_state]
    starts = x.initial_state
    if x.cu_seqlens is not None or length > chunk:
        starts = block_starts(x, flat, blocks)
    triton_forward.forward(*flat, x.prior, starts, blocks, out, var, final)
    return out.view(x.v.shape), *final, None if var is None else var.view(x.v.shape)


def block_starts(x: ScanInputs, flat: list[Tensor], blocks: Blocks) -> tuple[Tensor, ...]:
    """M and J [blocks.count + rows, H, P, N] at the start of every block, and behind them the final ones."""
    sizes = (blocks.count + blocks.rows, *x.v.shape[2:], x.k.shape[3])
    starts = tuple(torch.empty(sizes, dtype=torch.float32, device=x.v.device) for _ in "MJ")
    triton_states.block_states(*flat[1:], blocks, x.initial_state, starts)
    return starts


def flat_tokens(x: Tensor) -> Tensor:
    """[B, T, ...] -> [B * T, ...], contiguous."""
    return x.contiguous().flatten(0, 1)


def _last_gradients(dM: Tensor | None, dJ: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The gradients of the final states as fp32 tensors, None when there are none."""
    if dM is None and dJ is None:
        return None
    dM = torch.zeros_like(dJ) if dM is None else dM
    dJ = torch.zeros_like(dM) if dJ is None else dJ
    return dM.float().contiguous(), dJ.float().contiguous()


@torch.no_grad()
def step(x: ScanInputs) -> tuple[Tensor, Tensor | None]:
    """`scan.metaplastic_step` in one kernel."""
    out = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device)
    var = torch.empty(x.beta.shape, dtype=torch.float32, device=x.v.device) if x.variance else None
    with on_device_of(x.v):
        triton_step.step(*(y.contiguous() for y in x[:6]), *x.initial_state, out, var)
    return out, var
