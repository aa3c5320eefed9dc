"""How the torch backends lay tokens out: blocks of a few tokens, ordered so that each step of a loop is one slice.

A row is one sequence of the batch, or one packed document. Rows are cut into blocks of S tokens (the last one padded
with zeros, which leave every state untouched) and ordered like a packed sequence: rows sorted by length, block i of
every row that is long enough, then block i + 1. A loop over i thus handles many short documents at once, a
document's blocks are aligned with its start, and nothing of one document can leak into the next.
"""

import sys
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .documents import check_cu_seqlens

NEVER = sys.maxsize  # blocks between kept states when none is to be kept


@dataclass(frozen=True)
class RowTile:
    """Rows first..last (in sorted order) that are walked together.

    `steps[i]` is (offset, count): blocks offset..offset+count hold the tile's i-th blocks, of its first `count` rows.
    """

    first: int
    last: int
    steps: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class BlockPlan:
    """The layout of one call: index tensors between [tokens, ...] and [blocks, S, ...], and the tiles to walk."""

    size: int
    rank: Tensor  # [rows]: where a row stands in the sorted order
    order: Tensor  # [rows]: the row that stands there
    gather: Tensor  # [blocks * S]: the token of each slot (any token for a pad)
    pads: Tensor | None  # slots that are padding
    scatter: Tensor  # [tokens]: the slot of each token
    tiles: tuple[RowTile, ...]

    def to_blocks(self, x: Tensor) -> Tensor:
        """[tokens, ...] -> [blocks, S, ...], zeros in the padding."""
        out = x.index_select(0, self.gather)
        if self.pads is not None:
            out.index_fill_(0, self.pads, 0)
        return out.view(-1, self.size, *x.shape[1:])

    def from_blocks(self, x: Tensor) -> Tensor:
        """[blocks, S, ...] -> [tokens, ...]."""
        return x.reshape(-1, *x.shape[2:]).index_select(0, self.scatter)


def needs_backward(*tensors: Tensor | None) -> bool:
    """Whether a backward pass may follow: without one no state needs to be kept."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def row_lengths(batch: int, length: int, cu_seqlens: Tensor | None) -> list[int]:
    """Tokens of each row, checked to cover the tokens exactly (reads `cu_seqlens` from its device)."""
    if cu_seqlens is None:
        return [length] * batch
    bounds = cu_seqlens.cpu()
    check_cu_seqlens(bounds, batch, length)
    return bounds.diff().tolist()


def make_plan(lengths: list[int], size: int, rows_per_tile: int, device: torch.device) -> BlockPlan:
    """Lay rows of the given lengths (consecutive in the token dimension) out in blocks of `size` tokens."""
    length = torch.tensor(lengths)
    start = length.cumsum(0) - length
    order = length.argsort(descending=True, stable=True)
    count = (length[order] + size - 1) // size  # blocks of each row, falling
    ranks = torch.arange(len(lengths)).repeat_interleave(count)
    index = torch.arange(ranks.numel()) - (count.cumsum(0) - count).repeat_interleave(count)
    most = int(count.max()) + 1
    key = ((ranks // rows_per_tile) * most + index) * len(lengths) + ranks
    walk = key.argsort()
    ranks, index = ranks[walk], index[walk]
    slot = (index * size)[:, None] + torch.arange(size)  # place within the row
    row = order[ranks][:, None]
    real = slot < length[row]
    token = torch.where(real, start[row] + slot, 0).flatten()
    scatter = torch.empty(int(length.sum()), dtype=torch.long)
    scatter[token[real.flatten()]] = torch.arange(token.numel())[real.flatten()]
    pads = (~real).flatten().nonzero().flatten()
    return BlockPlan(
        size,
        order.argsort().to(device),
        order.to(device),
        token.to(device),
        pads.to(device) if pads.numel() else None,
        scatter.to(device),
        _tiles(count.tolist(), rows_per_tile),
    )


def _tiles(count: list[int], rows_per_tile: int) -> tuple[RowTile, ...]:
    tiles, offset = [], 0
    for first in range(0, len(count), rows_per_tile):
        rows = count[first : first + rows_per_tile]
        steps, active = [], len(rows)
        for i in range(rows[0]):
            while rows[active - 1] <= i:
                active -= 1
            steps.append((offset, active))
            offset += active
        tiles.append(RowTile(first, first + len(rows), tuple(steps)))
    return tuple(tiles)


def block_decays(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Decays inside blocks, from [..., S] log decays.

    Each exponent is summed over its own tokens, never a difference of two long sums: next to a token that forgets
    everything (-1e4 nats) such a difference would lose the digits of the mild ones. Masked before exp.

    Returns:
        L [..., S, S], L[t, s] = exp(sum of s < j <= t), zero for s > t; and from the start, [..., S].
    """
    size = log_decay.shape[-1]
    ones = torch.ones(size, size, dtype=torch.bool, device=log_decay.device)
    terms = log_decay.unsqueeze(-1).expand(*log_decay.shape, size).masked_fill(~ones.tril(-1), 0)
    L = terms.cumsum(-2).masked_fill_(ones.triu(1), -float("inf")).exp_()
    return L, log_decay.cumsum(-1).exp_()


def from_here_on(x: Tensor) -> Tensor:
    """Sum over t >= j along the last dimension."""
    return x.flip(-1).cumsum(-1).flip(-1)


def before_here(x: Tensor) -> Tensor:
    """Sum over s < j along the last dimension; `cumsum(x) - x` would leave the rounding of x where zero belongs."""
    return pad(x[..., :-1], (1, 0)).cumsum(-1)


def crossing(pairs: Tensor) -> Tensor:
    """Sum over s < j <= t of pairs [..., t, s], for each j."""
    return from_here_on(pairs.transpose(-2, -1)).transpose(-2, -1).tril(-1).sum(-1)
