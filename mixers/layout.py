"""Where the real tokens and the documents of a batch are: padding masks and packing, worked out once a forward pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..base.errors import UsageError
from ..kernels.backends import eager


class SequenceLayout(NamedTuple):
    """What the mixers need to know of a batch that is padded or packed; there is none for a plain batch.

    A tuple of tensors, so that whatever moves a batch between devices moves this too.

    Attributes:
        mask: [B, T], true for real tokens; None without padding.
        order: [B, T], positions of each row (or document) with the real tokens first, in their order; None without
            padding. The convolution runs in this order, so that a pad never stands between two real tokens.
        inverse: [B, T], the way back.
        lengths: [B], real tokens in each row; None without padding.
        cu_seqlens: [S + 1], where the documents start in the one row of a packed batch; None when not packed.
    """

    mask: Tensor | None = None
    order: Tensor | None = None
    inverse: Tensor | None = None
    lengths: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None


@eager
def sequence_layout(
    shape: tuple[int, int],
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> SequenceLayout | None:
    """The layout of a batch, or None when it is neither padded nor packed.

    Documents are told, in this order of precedence, by `cu_seqlens`, by `seq_idx`, or by position ids that start
    again at 0 (only without padding: generation numbers left-padded rows so). Packed batches come back as one row.

    Args:
        shape: (B, T) of the piece at hand.
        attention_mask: [B, S] with S >= T, not 0 for real tokens; the last T columns belong to this piece.
        position_ids: [B, T] or [1, T].
        seq_idx: [B, T], a number per document; a document is a run of equal numbers.
        cu_seqlens: [S + 1], starts of the documents in a batch of one row, and the end.

    Raises:
        UsageError: a mask or document numbers of another shape.
    """
    mask = _real_tokens(attention_mask, shape)
    starts = _document_starts(shape, mask is not None, position_ids, seq_idx, cu_seqlens)
    if mask is None and starts is None:
        return None
    if starts is None:
        pads = ~mask
        order = torch.argsort(pads.to(torch.uint8), dim=1, stable=True)
        return SequenceLayout(mask, order, torch.argsort(order, dim=1), mask.sum(1))
    if mask is None:
        return SequenceLayout(cu_seqlens=starts)
    mask = mask.reshape(1, -1)
    document = torch.bucketize(torch.arange(mask.shape[1], device=mask.device), starts[1:], right=True)
    order = torch.argsort(2 * document + (~mask).long(), dim=1, stable=True)
    return SequenceLayout(mask, order, torch.argsort(order, dim=1), mask.sum(1), starts)


def reorder(tensor: Tensor, order: Tensor) -> Tensor:
    """Rows of `tensor` [B, T, ...] in the order [B, T]; indexing, so that its gradient can be deterministic."""
    rows = torch.arange(tensor.shape[0], device=tensor.device).unsqueeze(1)
    return tensor[rows, order]


def _real_tokens(attention_mask: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    if attention_mask is None:
        return None
    batch, length = shape
    if attention_mask.ndim != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < length:
        raise UsageError(
            f"attention_mask has shape {list(attention_mask.shape)}; expected [{batch}, {length}] or more columns, "
            "of which the last belong to these tokens"
        )
    mask = attention_mask[:, attention_mask.shape[1] - length :] != 0
    return None if bool(mask.all()) else mask


def _document_starts(
    shape: tuple[int, int],
    padded: bool,
    position_ids: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor | None:
    batch, length = shape
    if cu_seqlens is not None:
        if batch != 1:
            raise UsageError(
                f"documents were told by cu_seqlens in a batch of {batch} rows; expected one row, "
                "or seq_idx for more than one"
            )
        return cu_seqlens.to(torch.int32)
    if seq_idx is not None:
        if tuple(seq_idx.shape) != shape:
            raise UsageError(f"seq_idx has shape {list(seq_idx.shape)}; expected [{batch}, {length}] like the tokens")
        starts = seq_idx[:, 1:] != seq_idx[:, :-1]
    elif position_ids is not None and not padded and position_ids.ndim == 2 and position_ids.shape[1] == length:
        starts = (position_ids[:, 1:] == 0).expand(batch, -1)
        if not bool(starts.any()):
            return None
    else:
        return None
    first = starts.new_ones(batch, 1)
    begin = torch.cat([first, starts], dim=1).reshape(-1).nonzero().squeeze(1)
    end = begin.new_tensor([batch * length])
    return torch.cat([begin, end]).to(torch.int32)
