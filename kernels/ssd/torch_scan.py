"""The plain Mamba2 scan in torch: matrix products over blocks of tokens, with the backward pass by hand."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..common.precision import compute_dtype
from ..common.torch_blocks import (
    BlockPlan,
    before_here,
    block_decays,
    crossing,
    from_here_on,
    make_plan,
    needs_backward,
    row_lengths,
)

DEFAULT_CHUNK = 64


def scan(x, dt, A, B, C, initial_state, cu_seqlens, chunk_size) -> tuple[Tensor, Tensor]:
    """`mamba2_scan.mamba2_scan` in plain torch."""
    dtype = compute_dtype(x, B, C)
    dt = dt.to(dtype)
    return linear_scan(C, B, x * dt.unsqueeze(-1), dt * A.to(dtype), initial_state, cu_seqlens, chunk_size)


@torch.no_grad()
def step(x, dt, A, B, C, state):
    """`mamba2_scan.mamba2_step` in plain torch."""
    dtype, per_group = state.dtype, x.shape[1] // B.shape[1]
    k, q = (y.to(dtype).repeat_interleave(per_group, 1).unsqueeze(2) for y in (B, C))
    dt = dt.to(dtype)
    state.mul_((dt * A.to(dtype)).exp()[..., None, None])
    state.addcmul_((x.to(dtype) * dt.unsqueeze(-1)).unsqueeze(-1), k)
    return torch.matmul(state, q.transpose(2, 3)).squeeze(-1).to(x.dtype)


def linear_scan(q, k, v, log_decay, initial_state=None, cu_seqlens=None, chunk_size=None) -> tuple[Tensor, Tensor]:
    """o_t = M_t q_t, M_t = exp(log_decay_t) M_{t-1} + v_t (x) k_t, in blocks with the backward pass by hand.

    q, k [B, T, G, N], v [B, T, H, P], log_decay [B, T, H] <= 0, initial_state [rows, H, P, N]; o [B, T, H, P] and the
    final state are in fp32 (fp64 for fp64 inputs). Saved for backward: inputs, and the state at each block's start.
    """
    lengths = row_lengths(v.shape[0], v.shape[1], cu_seqlens)
    plan = make_plan(lengths, min(chunk_size or DEFAULT_CHUNK, DEFAULT_CHUNK, max(lengths)), len(lengths), v.device)
    keep = needs_backward(q, k, v, log_decay, initial_state)
    return _LinearScan.apply(q, k, v, log_decay, initial_state, plan, compute_dtype(q, k, v), keep)


class _Step(NamedTuple):
    """Blocks of one step's rows: q, k [n, G, S, N]; v [n, G, Hg, S, P]; decays L [..., S, S], e [n, G, Hg, S]."""

    q: Tensor
    k: Tensor
    v: Tensor
    L: Tensor
    e: Tensor


def _steps(plan: BlockPlan, dtype, q, k, v, log_decay):
    """A function from (offset, count) to `_Step`."""
    groups = k.shape[2]
    q, k, v, log_decay = (plan.to_blocks(x.flatten(0, 1)) for x in (q, k, v, log_decay))

    def take(step: tuple[int, int]) -> _Step:
        s = slice(step[0], step[0] + step[1])
        L, e = block_decays(log_decay[s].to(dtype).permute(0, 2, 1).unflatten(1, (groups, -1)))
        return _Step(_heads(q[s], dtype), _heads(k[s], dtype), by_group(v[s], groups, dtype), L, e)

    return take


def _heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, S, G, N] -> [n, G, S, N]."""
    return x.to(dtype).transpose(1, 2)


def by_group(x: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[n, S, H, P] -> [n, G, Hg, S, P]."""
    return x.to(dtype).transpose(1, 2).unflatten(1, (groups, -1))


class _LinearScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, log_decay, initial, plan: BlockPlan, dtype: torch.dtype, keep: bool):
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.dtype = plan, dtype
        with torch.autocast(v.device.type, enabled=False):
            out, state, saved = _linear_forward(q, k, v, log_decay, initial, plan, dtype, keep)
        ctx.save_for_backward(q, k, v, log_decay, initial, saved)
        return out, state

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_state):
        saved = ctx.saved_tensors  # once: activation checkpointing lets no tensor be unpacked twice
        with torch.autocast(saved[0].device.type, enabled=False):
            return *_linear_backward(*saved, d_out, d_state, ctx.plan, ctx.dtype), None, None, None


def _sorted_rows(x: Tensor | None, plan: BlockPlan, v: Tensor, k: Tensor, dtype) -> Tensor:
    """A state by group, [rows, G, Hg, P, N] in sorted order; a fresh copy, zeros for None."""
    shape = (plan.order.numel(), v.shape[2], v.shape[3], k.shape[3])
    x = v.new_zeros(shape, dtype=dtype) if x is None else x.to(dtype).index_select(0, plan.order)
    return x.unflatten(1, (k.shape[2], -1))


def _linear_forward(q, k, v, log_decay, initial, plan, dtype, keep):
    M = _sorted_rows(initial, plan, v, k, dtype)
    take = _steps(plan, dtype, q, k, v, log_decay)
    steps = plan.tiles[0].steps
    blocks = steps[-1][0] + steps[-1][1]
    out = v.new_empty(blocks, plan.size, *v.shape[2:], dtype=dtype)
    kept = blocks - steps[0][1] if keep else 0  # the first block starts from the initial state
    saved = M.new_empty(kept, *M.shape[1:])
    for i, step in enumerate(steps):
        offset, n = step
        x, m = take(step), M[:n]
        if i and keep:
            saved[offset - steps[0][1] : offset - steps[0][1] + n] = m
        scores = torch.matmul(x.q, x.k.transpose(2, 3)).unsqueeze(2)  # [n, G, 1, S, S]
        o = torch.matmul(scores * x.L, x.v)
        o += torch.matmul(x.q.unsqueeze(2), m.transpose(3, 4)) * x.e.unsqueeze(-1)
        out[offset : offset + n] = o.flatten(1, 2).transpose(1, 2)
        weighted = x.v * x.L[..., -1, :].unsqueeze(-1)
        m.mul_(x.e[..., -1, None, None]).add_(torch.matmul(weighted.transpose(3, 4), x.k.unsqueeze(2)))
    return plan.from_blocks(out).view_as(v), M.flatten(1, 2).index_select(0, plan.rank), saved


def _linear_backward(q, k, v, log_decay, initial, saved, d_out, d_state, plan, dtype):
    first = _sorted_rows(initial, plan, v, k, dtype)
    dM = _sorted_rows(d_state, plan, v, k, dtype)
    d_out = torch.zeros_like(v) if d_out is None else d_out
    take = _steps(plan, dtype, q, k, v, log_decay)
    d_out = plan.to_blocks(d_out.flatten(0, 1))
    steps = plan.tiles[0].steps
    shape = (steps[-1][0] + steps[-1][1], plan.size)
    dq, dk, dv, dla = (x.new_empty(*shape, *x.shape[2:], dtype=dtype) for x in (q, k, v, log_decay))
    for i, step in reversed(list(enumerate(steps))):
        s = slice(step[0], step[0] + step[1])
        at = step[0] - steps[0][1]
        m = saved[at : at + step[1]] if i else first[: step[1]]
        x = take(step)
        do = by_group(d_out[s], k.shape[2], dtype)
        grads = _linear_block_backward(x, do, m, dM[: step[1]])
        dq[s], dk[s] = (g.transpose(1, 2) for g in grads[:2])
        dv[s], dla[s] = (g.flatten(1, 2).transpose(1, 2) for g in grads[2:])
    named = ((dq, q), (dk, k), (dv, v), (dla, log_decay))
    back = [plan.from_blocks(g).view_as(x).to(x.dtype) for g, x in named]
    d_initial = None if initial is None else dM.flatten(1, 2).index_select(0, plan.rank).to(initial.dtype)
    return *back, d_initial


def _linear_block_backward(x: _Step, do: Tensor, M: Tensor, dM: Tensor):
    """Gradients of one block; dM goes from the block's end to its start in place. What crosses a token gives dla."""
    q, k, w = x.q.unsqueeze(2), x.k.unsqueeze(2), x.L[..., -1, :]
    A = x.e[..., -1]
    do_e = do * x.e.unsqueeze(-1)
    a = torch.matmul(do, x.v.transpose(3, 4)) * x.L  # [n, G, Hg, S, S]
    scores = torch.matmul(x.q, x.k.transpose(2, 3)).unsqueeze(2)
    pairs = a * scores
    a = a.sum(2)
    from_start = torch.matmul(do_e, M)  # [n, G, Hg, S, N]
    to_end = torch.matmul(x.v * w.unsqueeze(-1), dM)
    dq = torch.matmul(a, x.k) + from_start.sum(2)
    dk = torch.matmul(a.transpose(2, 3), x.q) + to_end.sum(2)
    dv = torch.matmul((scores * x.L).transpose(3, 4), do)
    dv += torch.matmul(k, dM.transpose(3, 4)) * w.unsqueeze(-1)
    carried, leaving = (from_start * q).sum(-1), (to_end * k).sum(-1)
    through = A * (dM * M).sum((3, 4))
    dla = crossing(pairs) + from_here_on(carried) + before_here(leaving) + through.unsqueeze(-1)
    dM.mul_(A[..., None, None]).add_(torch.matmul(do_e.transpose(3, 4), q))
    return dq, dk, dv, dla
