"""The operator in plain torch: blocks of a few tokens by matrix products, with the backward pass written by hand.

The loop walks tiles of (row, head) pairs, called lanes below, whose [lane, g, S, N] temporaries stay in the cache.
Saved for backward are the inputs and the two states every `chunk_size` tokens; everything else is derived again.
No decay is ever divided by, so decays may underflow.

For one lane and block of S tokens, with L and the decay from the block's start e, states M, J at the start, W the
gradient of I, (dM, dJ) the gradient of the states at the block's end and Pg = P / g channels in each beta group:
    I = (L beta) K^2 + e J + prior     R = q / I     D = sum over a group's channels of do M, also by matrix products
    o = (L R K^T) v + e R M            W = -R D / I  dq = sum_g D / I
The gradient of a log decay sums what crosses its token: pairs inside the block, start to token, token to end, and
start to end. Each has its own decay, so nothing cancels and the sum restarts in every block.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..common.precision import compute_dtype
from ..common.torch_blocks import (
    NEVER,
    BlockPlan,
    before_here,
    block_decays,
    crossing,
    from_here_on,
    make_plan,
    needs_backward,
    row_lengths,
)
from .types import ScanInputs, ScanOutput, ScanState

DEFAULT_CHUNK = 256
# Elements of one temporary: half a megabyte of fp32. Larger ones leave the cache of a core (a third slower at 2 MB).
_TILE_ELEMENTS = 131072


def scan(x: ScanInputs) -> ScanOutput:
    """`scan.metaplastic_scan` in plain torch."""
    batch, length, heads, _ = x.v.shape
    groups, state_size = x.beta.shape[3], x.k.shape[3]
    lengths = row_lengths(batch, length, x.cu_seqlens)
    block = min(_block_size(groups), max(lengths))
    lanes = max(1, _TILE_ELEMENTS // (groups * block * state_size))
    tile_heads = min(heads, lanes)
    plan = make_plan(lengths, block, max(1, lanes // tile_heads), x.v.device)
    inputs = x.differentiable
    save_every = max(1, (x.chunk_size or DEFAULT_CHUNK) // block) if needs_backward(*inputs) else NEVER
    layout = _Layout(plan, tile_heads, save_every, x.variance)
    output, var, M, J = _Scan.apply(*inputs, layout, compute_dtype(x.q, x.k, x.v, x.beta))
    return ScanOutput(output, ScanState(M, J), var)


def _block_size(groups: int) -> int:
    """Short blocks where each channel has its importance (the tile grows with S), long ones where they share it."""
    return 16 if groups > 4 else 32


@dataclass(frozen=True)
class _Layout:
    """How one call walks its tiles; states are saved every `save_every` blocks."""

    plan: BlockPlan
    tile_heads: int
    save_every: int
    variance: bool

    def tiles(self, heads: int):
        """Every tile: rows, heads, and where its saved states begin."""
        at = 0
        for tile in self.plan.tiles:
            for h in range(0, heads, self.tile_heads):
                yield tile, slice(h, min(h + self.tile_heads, heads)), at
            at += sum(n for _, n in tile.steps[self.save_every :: self.save_every])

    def saved_states(self) -> int:
        return sum(n for tile in self.plan.tiles for _, n in tile.steps[self.save_every :: self.save_every])


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, beta, log_decay, prior, M0, J0, layout, dtype):
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.dtype = layout, dtype
        with torch.autocast(v.device.type, enabled=False):
            output, var, M, J, saved = _forward(q, k, v, beta, log_decay, prior, M0, J0, layout, dtype)
        ctx.save_for_backward(q, k, v, beta, log_decay, prior, M0, J0, *saved)
        return output, var, M, J

    @staticmethod
    @once_differentiable
    def backward(ctx, d_output, d_var, dM, dJ):
        inputs = ctx.saved_tensors
        with torch.autocast(inputs[0].device.type, enabled=False):
            grads = _backward(*inputs, d_output, d_var, dM, dJ, ctx.layout, ctx.dtype)
        return *grads, None, None


class _Lanes:
    """Inputs in block layout, handed out for one tile and step as [lanes, S, ...] in the compute dtype."""

    def __init__(self, plan: BlockPlan, dtype: torch.dtype, **inputs: Tensor):
        self.dtype = dtype
        self.blocks = {name: plan.to_blocks(x.flatten(0, 1)) for name, x in inputs.items()}
        self._buffers: dict[str, Tensor] = {}

    def scratch(self, name: str, *shape: int) -> Tensor:
        """A buffer used again in every step: touching fresh memory costs more than computing what goes there."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = self.blocks["v"].new_empty(size, dtype=self.dtype)
        return self._buffers[name][:size].view(shape)

    def take(self, name: str, step: tuple[int, int], heads: slice | Tensor) -> Tensor:
        x = self.blocks[name][step[0] : step[0] + step[1], :, heads].transpose(1, 2)
        return x.to(self.dtype).flatten(0, 1)


class _Block:
    """What forward and backward both need of one step: inputs of its lanes, decays and importance.

    Shapes, with l lanes: q, k, k2 [l, S, N]; v [l, g, S, Pg]; beta [l, g, S]; e, w [l, S]; L [l, S, S].
    """

    def __init__(self, lanes: _Lanes, step: tuple[int, int], heads: slice, groups: Tensor):
        self.q, self.k = lanes.take("q", step, groups), lanes.take("k", step, groups)
        self.k2 = self.k * self.k
        self.beta = lanes.take("beta", step, heads).transpose(1, 2)
        self.g = self.beta.shape[1]
        self.v = split_channels(lanes.take("v", step, heads), self.g)
        self.L, self.e = block_decays(lanes.take("log_decay", step, heads))
        self.w, self.A = self.L[:, -1], self.e[:, -1, None, None]
        self._scratch = lanes.scratch

    def big(self, name: str) -> Tensor:
        """Scratch [l, g, S, N]."""
        return self._scratch(name, *self.beta.shape, self.k.shape[2])

    def square(self, name: str) -> Tensor:
        """Scratch [l, g, S, S]."""
        return self._scratch(name, *self.beta.shape, self.k.shape[1])

    def importance(self, prior: Tensor, J: Tensor) -> tuple[Tensor, Tensor]:
        """I [l, g, S, N] from the tile's priors [heads] and J [l, g, N], and L beta [l, g, S, S], both scratch."""
        lane_prior = prior.repeat(J.shape[0] // prior.shape[0])[:, None, None, None]
        imp = torch.mul(self.e[:, None, :, None], J.unsqueeze(2), out=self.big("importance")).add_(lane_prior)
        Lb = torch.mul(self.L.unsqueeze(1), self.beta.unsqueeze(2), out=self.square("L beta"))
        self.flat(imp).baddbmm_(self.flat(Lb), self.k2)
        return imp, Lb

    def outer(self, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        """[..., S, Pg] times [..., Pg, n]; for one channel the plain product is several times faster."""
        return torch.mul(x, y, out=out) if x.shape[-1] == 1 else torch.matmul(x, y, out=out)

    def inner(self, x: Tensor, y: Tensor) -> Tensor:
        """[l, g, S, N] times the transpose of [l, g, c, N]; for one channel, as in `outer`."""
        if y.shape[2] > 1:
            return torch.matmul(x, y.transpose(2, 3))
        return torch.mul(x, y, out=self.big("product")).sum(-1, keepdim=True)

    def over_keys(self, name: str, x: Tensor, keys: Tensor) -> Tensor:
        """[l, g, S, N] times the transpose of [l, S, N], into scratch [l, g, S, S]."""
        out = self.square(name)
        torch.bmm(self.flat(x), keys.transpose(1, 2), out=self.flat(out))
        return out

    @staticmethod
    def flat(x: Tensor) -> Tensor:
        """[l, g, S, ...] -> [l, g S, ...], a view."""
        return x.flatten(1, 2)

    def next_state(self, M: Tensor, J: Tensor) -> None:
        """Carry M [l, P, N] and J [l, g, N] over the block, in place."""
        weighted = (self.v * self.w[:, None, :, None]).transpose(2, 3).flatten(1, 2)
        M.mul_(self.A).baddbmm_(weighted, self.k)
        J.mul_(self.A).baddbmm_(self.beta * self.w.unsqueeze(1), self.k2)


def split_channels(x: Tensor, groups: int) -> Tensor:
    """[l, S, P] -> [l, g, S, Pg], contiguous."""
    return x.unflatten(2, (groups, -1)).transpose(1, 2).contiguous()


def _place(target: Tensor, step: tuple[int, int], heads: slice, x: Tensor) -> None:
    """Write [lanes, S, ...] into its heads of the block layout."""
    target[step[0] : step[0] + step[1], :, heads] = x.unflatten(0, (step[1], -1)).transpose(1, 2)


def _sorted_state(x: Tensor | None, shape: tuple, plan: BlockPlan, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Rows of a state in sorted order, a fresh copy; zeros for None."""
    if x is None:
        return like.new_zeros(plan.order.numel(), *shape, dtype=dtype)
    return x.to(dtype).index_select(0, plan.order)


def _forward(q, k, v, beta, log_decay, prior, M0, J0, layout: _Layout, dtype):
    plan, (heads, head_dim), g, N = layout.plan, v.shape[2:], beta.shape[3], k.shape[3]
    M_rows = _sorted_state(M0, (heads, head_dim, N), plan, dtype, v)
    J_rows = _sorted_state(J0, (heads, g, N), plan, dtype, v)
    lanes = _Lanes(plan, dtype, q=q, k=k, v=v, beta=beta, log_decay=log_decay)
    out = torch.empty_like(lanes.blocks["v"])
    var = torch.empty_like(lanes.blocks["beta"], dtype=dtype) if layout.variance else None
    saved_M, saved_J = (v.new_empty(layout.saved_states(), *x.shape[1:], dtype=dtype) for x in (M_rows, J_rows))
    prior, group_of = prior.to(dtype), torch.arange(heads, device=v.device) // (heads // k.shape[2])
    for tile, hs, at in layout.tiles(heads):
        M, J = M_rows[tile.first : tile.last, hs].clone(), J_rows[tile.first : tile.last, hs].clone()
        for i, step in enumerate(tile.steps):
            n = step[1]
            if i and i % layout.save_every == 0:
                saved_M[at : at + n, hs], saved_J[at : at + n, hs] = M[:n], J[:n]
                at += n
            m, j = M[:n].flatten(0, 1), J[:n].flatten(0, 1)
            block = _Block(lanes, step, hs, group_of[hs])
            o, x = _block_output(block, prior[hs], m, j, layout.variance)
            _place(out, step, hs, o)
            if var is not None:
                _place(var, step, hs, x)
            block.next_state(m, j)
        M_rows[tile.first : tile.last, hs], J_rows[tile.first : tile.last, hs] = M, J
    output = plan.from_blocks(out).view_as(v)
    var = None if var is None else plan.from_blocks(var).view_as(beta)
    final = (x.index_select(0, plan.rank) for x in (M_rows, J_rows))
    return output, var, *final, (saved_M, saved_J)


def _block_output(b: _Block, prior: Tensor, M: Tensor, J: Tensor, variance: bool) -> tuple[Tensor, Tensor | None]:
    """Output [l, S, P] and variance [l, S, g] of one block."""
    imp, _ = b.importance(prior, J)
    R = torch.div(b.q.unsqueeze(1), imp, out=imp)
    X = b.over_keys("X", R, b.k).mul_(b.L.unsqueeze(1))
    carried = b.inner(R, M.unflatten(1, (b.g, -1)))
    o = torch.matmul(X, b.v).addcmul_(carried, b.e[:, None, :, None])
    var = torch.einsum("lgsn,lsn->lsg", R, b.q) if variance else None
    return o.transpose(1, 2).flatten(2), var


def _backward(q, k, v, beta, log_decay, prior, M0, J0, saved_M, saved_J, d_output, d_var, dM, dJ, layout, dtype):
    plan, (heads, head_dim), g, N = layout.plan, v.shape[2:], beta.shape[3], k.shape[3]
    M_rows = _sorted_state(M0, (heads, head_dim, N), plan, dtype, v)
    J_rows = _sorted_state(J0, (heads, g, N), plan, dtype, v)
    dM_rows = _sorted_state(dM, (heads, head_dim, N), plan, dtype, v)
    dJ_rows = _sorted_state(dJ, (heads, g, N), plan, dtype, v)
    d_output = torch.zeros_like(v) if d_output is None else d_output
    more = {} if d_var is None else {"d_var": d_var}
    lanes = _Lanes(plan, dtype, q=q, k=k, v=v, beta=beta, log_decay=log_decay, d_output=d_output, **more)
    grads = {name: torch.zeros_like(lanes.blocks[name], dtype=dtype) for name in ("q", "k")}
    grads |= {name: torch.empty_like(lanes.blocks[name]) for name in ("v", "beta", "log_decay")}
    prior_c, group_of = prior.to(dtype), torch.arange(heads, device=v.device) // (heads // k.shape[2])
    d_prior = torch.zeros_like(prior_c)
    for tile, hs, at in layout.tiles(heads):
        rows = slice(tile.first, tile.last)
        starts = [(M_rows[rows, hs], J_rows[rows, hs])]
        for _, n in tile.steps[layout.save_every :: layout.save_every]:
            starts.append((saved_M[at : at + n, hs], saved_J[at : at + n, hs]))
            at += n
        dm, dj = dM_rows[rows, hs].clone(), dJ_rows[rows, hs].clone()
        for c in reversed(range(len(starts))):
            steps = tile.steps[c * layout.save_every : (c + 1) * layout.save_every]
            _backward_chunk(lanes, steps, hs, group_of, prior_c, starts[c], dm, dj, grads, d_prior)
        dM_rows[rows, hs], dJ_rows[rows, hs] = dm, dj
    named = {"q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay}
    back = [plan.from_blocks(grads[name]).view_as(x).to(x.dtype) for name, x in named.items()]
    initial = [
        None if x is None else d.index_select(0, plan.rank).to(x.dtype) for x, d in ((M0, dM_rows), (J0, dJ_rows))
    ]
    return *back, d_prior.to(prior.dtype), *initial


def _backward_chunk(lanes, steps, heads, group_of, prior, start, dM, dJ, grads, d_prior) -> None:
    """Walk one chunk backwards: states are derived again from `start`, dM and dJ of the tile's rows change in place."""
    n = steps[0][1]
    M, J = start[0][:n].clone(), start[1][:n].clone()
    walked = []
    for step in steps:
        block = _Block(lanes, step, heads, group_of[heads])
        m, j = M[: step[1]].flatten(0, 1), J[: step[1]].flatten(0, 1)
        walked.append((step, block, m.clone(), j.clone()))
        block.next_state(m, j)
    for step, block, m, j in reversed(walked):
        dm, dj = dM[: step[1]].flatten(0, 1), dJ[: step[1]].flatten(0, 1)
        do = split_channels(lanes.take("d_output", step, heads), block.g)
        d_var = lanes.take("d_var", step, heads) if "d_var" in lanes.blocks else None
        dq, dk, dv, d_beta, dla, dp = _block_backward(block, prior[heads], m, j, do, d_var, dm, dj)
        blocks = slice(step[0], step[0] + step[1])
        for name, d in (("q", dq), ("k", dk)):
            grads[name][blocks].index_add_(2, group_of[heads], d.unflatten(0, (step[1], -1)).transpose(1, 2))
        for name, d in (("v", dv), ("beta", d_beta), ("log_decay", dla)):
            _place(grads[name], step, heads, d)
        d_prior[heads] += dp.unflatten(0, (step[1], -1)).sum(0)


def _block_backward(b: _Block, prior, M, J, do, d_var, dM, dJ):
    """Gradients of one block's inputs and of the prior [lanes]; dM and dJ go from its end to its start in place.

    `do` is [l, g, S, Pg], `d_var` [l, S, g] or None.
    """
    L, e, w = b.L.unsqueeze(1), b.e.unsqueeze(1), b.w.unsqueeze(1)  # [l, 1, S(, S)]
    M_g, v_w = M.unflatten(1, (b.g, -1)), (b.v * w.unsqueeze(-1)).transpose(1, 2).flatten(2)
    do_e = do * e.unsqueeze(-1)
    Lv = b.outer(do, b.v.transpose(2, 3), b.square("L do v")).mul_(L)
    D = b.outer(do_e, M_g, b.big("D"))
    b.flat(D).baddbmm_(b.flat(Lv), b.k)
    imp, Lb = b.importance(prior, J)
    R = torch.div(b.q.unsqueeze(1), imp, out=b.big("R"))
    dq = 0
    if d_var is not None:
        d_var = d_var.transpose(1, 2).unsqueeze(-1)
        D.addcmul_(b.q.unsqueeze(1), d_var)
        dq = torch.mul(R, d_var, out=b.big("product")).sum(1)
    F = D.div_(imp)
    dq = F.sum(1) + dq
    V = F.mul_(R)  # minus the gradient of I
    X, Y = b.over_keys("X", R, b.k), b.over_keys("Y", V, b.k2)
    inside = (Lv * X).sub_(Lb * Y).sum(1)
    end_M = torch.bmm(b.k, dM.transpose(1, 2)).mul_(b.w.unsqueeze(-1))  # [l, S, P]
    end_J = torch.bmm(dJ, b.k2.transpose(1, 2)).mul_(w)  # [l, g, S]
    dv = torch.matmul(X.mul_(L).transpose(2, 3), do).transpose(1, 2).flatten(2) + end_M
    d_beta = end_J - Y.mul_(L).sum(2)
    d_k2 = torch.bmm((b.beta * w).transpose(1, 2), dJ).baddbmm_(b.flat(Lb).transpose(1, 2), b.flat(V), alpha=-1)
    dk = torch.bmm(v_w, dM).baddbmm_(b.flat(Lv).transpose(1, 2), b.flat(R)).addcmul_(b.k, d_k2, value=2)
    # What crosses each token, for the log decays.
    carried = (b.inner(R, M_g) * do_e).sum((1, 3))
    carried -= (b.inner(V, J.unsqueeze(2)).squeeze(-1) * e).sum(1)
    leaving = (end_M * b.v.transpose(1, 2).flatten(2)).sum(-1) + (end_J * b.beta).sum(1)
    through = b.A[:, :, 0] * ((dM * M).sum((1, 2)) + (dJ * J).sum((1, 2))).unsqueeze(-1)
    dla = crossing(inside) + from_here_on(carried) + before_here(leaving) + through
    # Back over the block.
    dM.mul_(b.A).add_(torch.matmul(do_e.transpose(2, 3), R).flatten(1, 2))
    over_time = torch.matmul(torch.stack((b.e, torch.ones_like(b.e)), 1).unsqueeze(1), V)  # [l, g, 2, N]
    dJ.mul_(b.A).sub_(over_time[:, :, 0])
    return dq, dk, dv, d_beta.transpose(1, 2), dla, -over_time[:, :, 1].sum((1, 2))


@torch.no_grad()
def step(x: ScanInputs) -> tuple[Tensor, Tensor | None]:
    """`scan.metaplastic_step` in plain torch."""
    v, beta, (M, J) = x.v, x.beta, x.initial_state
    per_group, g = v.shape[1] // x.k.shape[1], beta.shape[2]
    q, k = (y.to(M.dtype).repeat_interleave(per_group, 1).unsqueeze(2) for y in (x.q, x.k))  # [B, H, 1, N]
    a = x.log_decay.to(M.dtype).exp()[..., None, None]
    M.mul_(a).addcmul_(v.to(M.dtype).unsqueeze(-1), k)
    J.mul_(a).addcmul_(beta.to(M.dtype).unsqueeze(-1), k * k)
    R = q / (J + x.prior.to(M.dtype)[:, None, None])  # [B, H, g, N]
    output = (M.unflatten(2, (g, -1)) * R.unsqueeze(3)).sum(-1).flatten(2)
    return output.to(v.dtype), (R * q).sum(-1) if x.variance else None
