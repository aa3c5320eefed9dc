"""The operator in plain torch: blocks of a few tokens by matrix products, each with one triangular system.

Importance does not depend on the memory, so a block has it first, at every token, and from it what is kept of each
key (w) and the gain (K). With W[t, s] the product of w over s < j <= t and c[t] that from the block's start, per key:
    (1 + A) U = v - (k c) S^T      A[t, s] = sum_n k_t W[t, s] K_s   for s < t       U: what each token writes
    o = (q c) S^T + R U            R[t, s] = sum_n q_t W[t, s] K_s   for s <= t
    S <- S c_end + U^T (W[end] K)
No decay is ever divided by, so decays may underflow.

Saved for backward are the inputs and the two states every `KEPT_EVERY` tokens. Backward derives the states at the
starts of a chunk's blocks again, then runs each block a second time under autograd.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..common.precision import compute_dtype
from ..common.torch_blocks import NEVER, BlockPlan, block_decays, make_plan, needs_backward, row_lengths
from .types import DeltaInputs, DeltaOutput, DeltaState

BLOCK, KEPT_EVERY = 16, 256
# Elements of one temporary [rows, H, N, S, S]: 16 MB of fp32.
_TILE_ELEMENTS = 2**22


def scan(x: DeltaInputs) -> DeltaOutput:
    """`scan.metaplastic_delta_scan` in plain torch."""
    batch, length, heads, _ = x.v.shape
    lengths = row_lengths(batch, length, x.cu_seqlens)
    size = max(1, min(BLOCK, max(lengths)))
    rows = max(1, _TILE_ELEMENTS // (heads * x.k.shape[3] * size * size))
    keep = KEPT_EVERY // size if needs_backward(*x.differentiable) else NEVER
    layout = _Layout(make_plan(lengths, size, rows, x.v.device), keep, compute_dtype(*x[:5]))
    output, S, J = _Scan.apply(*x.differentiable, layout)
    return DeltaOutput(output, DeltaState(S, J))


@dataclass(frozen=True)
class _Layout:
    """How one call walks its tiles; states are kept every `keep` blocks."""

    plan: BlockPlan
    keep: int
    dtype: torch.dtype

    def chunks(self, steps: tuple[tuple[int, int], ...]) -> list[tuple[tuple[int, int], ...]]:
        """The steps of a tile between kept states."""
        return [steps[i : i + self.keep] for i in range(0, len(steps), self.keep)]

    def blocks(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """[B, T, ...] -> [blocks, S, ...]."""
        return [self.plan.to_blocks(x.flatten(0, 1)) for x in inputs]

    def rows(self, x: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Rows of a state in sorted order, a fresh copy; zeros for None."""
        if x is None:
            return like.new_zeros(self.plan.order.numel(), *shape, dtype=self.dtype)
        return x.to(self.dtype).index_select(0, self.plan.order)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, b, beta, log_decay, prior, S0, J0, layout):
        ctx.set_materialize_grads(False)
        ctx.layout = layout
        with torch.autocast(v.device.type, enabled=False):
            output, S, J, kept = _forward((q, k, v, b, beta, log_decay), prior, S0, J0, layout)
        ctx.save_for_backward(q, k, v, b, beta, log_decay, prior, S0, J0, *kept)
        return output, S, J

    @staticmethod
    @once_differentiable
    def backward(ctx, d_output, dS, dJ):
        saved = ctx.saved_tensors  # once: activation checkpointing lets no tensor be unpacked twice
        with torch.autocast(saved[0].device.type, enabled=False):
            return *_backward(saved[:6], *saved[6:9], saved[9:], d_output, dS, dJ, ctx.layout), None


def _state_shapes(v: Tensor, k: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (v.shape[2], v.shape[3], k.shape[3]), (v.shape[2], k.shape[3])


def _forward(inputs, prior, S0, J0, layout: _Layout):
    plan, v = layout.plan, inputs[2]
    states = [layout.rows(x, shape, v) for x, shape in zip((S0, J0), _state_shapes(v, inputs[1]), strict=True)]
    blocks, prior = layout.blocks(inputs), prior.to(layout.dtype)
    out, kept = blocks[2].new_empty(blocks[2].shape, dtype=layout.dtype), []
    for tile in plan.tiles:
        held = [x[tile.first : tile.last] for x in states]
        for i, chunk in enumerate(layout.chunks(tile.steps)):
            if i:  # the first chunk starts from the initial state
                kept += [x[: chunk[0][1]].clone() for x in held]
            for step in chunk:
                out[step[0] : sum(step)], *after = _block(*_take(blocks, step), prior, *_active(held, step))
                for x, new in zip(held, after, strict=True):
                    x[: step[1]] = new
    output = plan.from_blocks(out).view_as(v).to(v.dtype)
    return output, *(x.index_select(0, plan.rank) for x in states), kept


def _take(blocks: list[Tensor], step: tuple[int, int]) -> list[Tensor]:
    return [x[step[0] : sum(step)] for x in blocks]


def _active(states: list[Tensor], step: tuple[int, int]) -> list[Tensor]:
    return [x[: step[1]] for x in states]


def _backward(inputs, prior, S0, J0, kept, d_output, dS, dJ, layout: _Layout):
    plan, v, shapes = layout.plan, inputs[2], _state_shapes(inputs[2], inputs[1])
    initial = [layout.rows(x, shape, v) for x, shape in zip((S0, J0), shapes, strict=True)]
    d_states = [layout.rows(x, shape, v) for x, shape in zip((dS, dJ), shapes, strict=True)]
    blocks, wide = layout.blocks(inputs), prior.to(layout.dtype)
    d_output = layout.blocks((torch.zeros_like(v) if d_output is None else d_output,))[0]
    grads, d_prior, at = [torch.empty_like(x) for x in blocks], torch.zeros_like(wide), 0
    for tile in plan.tiles:
        chunks = layout.chunks(tile.steps)
        starts = [[x[tile.first : tile.last] for x in initial]]
        starts += [list(kept[at + 2 * i : at + 2 * i + 2]) for i in range(len(chunks) - 1)]
        at += 2 * (len(chunks) - 1)
        d_held = [x[tile.first : tile.last] for x in d_states]
        for chunk, start in zip(reversed(chunks), reversed(starts), strict=True):
            for step, state in reversed(_walk(blocks, chunk, wide, start)):
                back = (d_output[step[0] : sum(step)], *_active(d_held, step))
                *found, d_part, d_S, d_J = _block_backward((*_take(blocks, step), wide, *state), back)
                for x, d in zip(_take(grads, step), found, strict=True):
                    x.copy_(d)
                d_prior += d_part
                for x, d in zip(d_held, (d_S, d_J), strict=True):
                    x[: step[1]] = d
    back = [plan.from_blocks(d).view_as(x) for d, x in zip(grads, inputs, strict=True)]
    rows = zip(d_states, (S0, J0), strict=True)
    return *back, d_prior.to(prior.dtype), *(None if x is None else d[plan.rank].to(x.dtype) for d, x in rows)


def _walk(blocks, chunk, prior, state) -> list[tuple[tuple[int, int], list[Tensor]]]:
    """Every step of a chunk with the states at its start."""
    walked = []
    for step in chunk:
        state = _active(state, step)
        walked.append((step, state))
        if step is not chunk[-1]:
            state = _block(*_take(blocks, step), prior, *state)[1:]
    return walked


def _block_backward(inputs: tuple[Tensor, ...], back: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients of what `_block` is given, from those of what it gives."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        given = _block(*leaves)
    return torch.autograd.grad(given, leaves, [d.to(x.dtype) for d, x in zip(back, given, strict=True)])


def _block(q, k, v, b, beta, log_decay, prior, S, J) -> tuple[Tensor, Tensor, Tensor]:
    """One block of n rows: output [n, S, H, P] and the states after it, all in the type of the states.

    Inside, heads stand by group and before the tokens: q, k [n, G, 1, S, N], v [n, G, Hg, S, P], b and beta
    [n, G, Hg, S], decays [n, G, Hg, 1 or N, S].
    """
    q, k = (x.to(S.dtype).transpose(1, 2).unsqueeze(2) for x in (q, k))
    groups = k.shape[1]
    v, b, beta, log_decay = (_by_group(x, groups, S.dtype) for x in (v, b, beta, log_decay))
    log_decay = log_decay.unsqueeze(3) if log_decay.dim() == 4 else log_decay.transpose(3, 4)
    prior, S, J = prior.view(groups, -1, 1, 1), S.unflatten(1, (groups, -1)), J.unflatten(1, (groups, -1))

    J_before, J = _importance(k, beta, log_decay, J)
    held = log_decay.exp().transpose(3, 4) * J_before  # [n, G, Hg, S, N], over from the past
    K = b.unsqueeze(-1) * k / (prior + held)
    log_w = log_decay + (torch.log1p(J_before / prior) - torch.log1p(held / prior)).transpose(3, 4)
    W, c = block_decays(log_w)  # [.., N, S, S], [.., N, S]
    c = c.transpose(3, 4)

    weighted = (W * K.transpose(3, 4).unsqueeze(4)).transpose(3, 4)  # [.., t, N, s]
    erased, read = torch.matmul(torch.stack((k, q), 4).expand(*weighted.shape[:4], 2, -1), weighted).unbind(4)
    seen = torch.matmul(k * c, S.transpose(3, 4))
    one = torch.eye(k.shape[3], dtype=S.dtype, device=S.device)
    U = torch.linalg.solve_triangular(erased.tril(-1) + one, v - seen, upper=False, unitriangular=True)
    output = torch.matmul(q * c, S.transpose(3, 4)) + torch.matmul(read, U)
    S = S * c[..., -1:, :] + torch.matmul(U.transpose(3, 4), weighted[..., -1, :, :].transpose(3, 4))
    return output.flatten(1, 2).transpose(1, 2), S.flatten(1, 2), J.flatten(1, 2)


def _by_group(x: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[n, S, H, ...] -> [n, G, Hg, S, ...]."""
    return x.to(dtype).transpose(1, 2).unflatten(1, (groups, -1))


def _importance(k: Tensor, beta: Tensor, log_decay: Tensor, J: Tensor) -> tuple[Tensor, Tensor]:
    """J before each token [n, G, Hg, S, N], and J after the block [n, G, Hg, N]."""
    L, e = block_decays(log_decay)  # [.., 1 or N, S, S], [.., 1 or N, S]
    added = beta.unsqueeze(-1) * k.square()
    if L.shape[3] == 1:
        inside = torch.matmul(L.squeeze(3), added)
    else:
        inside = torch.matmul(L, added.transpose(3, 4).unsqueeze(-1)).squeeze(-1).transpose(3, 4)
    after = inside + e.transpose(3, 4) * J.unsqueeze(3)
    return torch.cat([J.unsqueeze(3), after[..., :-1, :]], 3), after[..., -1, :]


@torch.no_grad()
def step(x: DeltaInputs) -> Tensor:
    """`scan.metaplastic_delta_step` in plain torch."""
    (S, J), per_group = x.initial_state, x.v.shape[1] // x.k.shape[1]
    q, k = (y.to(S.dtype).repeat_interleave(per_group, 1) for y in (x.q, x.k))  # [B, H, N]
    v, b, beta, prior = (y.to(S.dtype) for y in (x.v, x.b, x.beta, x.prior))
    a = x.log_decay.to(S.dtype).exp()
    a = a.unsqueeze(-1) if a.dim() == 2 else a
    forgotten = prior.unsqueeze(-1) + a * J
    S.mul_((a * (prior.unsqueeze(-1) + J) / forgotten).unsqueeze(2))
    error = v - torch.matmul(S, k.unsqueeze(-1)).squeeze(-1)
    S.addcmul_(error.unsqueeze(-1), (b.unsqueeze(-1) * k / forgotten).unsqueeze(2))
    J.mul_(a).addcmul_(beta.unsqueeze(-1), k * k)
    return torch.matmul(S, q.unsqueeze(-1)).squeeze(-1).to(x.v.dtype)
