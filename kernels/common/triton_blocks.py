"""How the GPU kernels see time: one flat row of tokens, cut into documents, cut into blocks of a fixed size.

A batch of B sequences is B documents of T tokens; packed documents come from `cu_seqlens`. A kernel that works on a
block reads its first token, token count and document from one row of `table`, so packed and plain batches share code.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Blocks of at most `size` tokens.

    Attributes:
        table: [count, 3] int32: first token, tokens (0 for a block that is only there to round up), document.
        documents: [rows + 1] int32: the first block of each document, then the number of blocks in use.
        size: tokens of a full block.
        rows: documents.
    """

    table: Tensor
    documents: Tensor
    size: int
    rows: int

    @property
    def count(self) -> int:
        """Rows of `table`: the blocks of a launch grid."""
        return self.table.shape[0]


def make_blocks(batch: int, length: int, size: int, device: torch.device, cu_seqlens: Tensor | None = None) -> Blocks:
    """Cut [batch, length] tokens (or packed documents) into blocks of `size`; never waits for the device.

    The number of blocks of packed documents is not known without reading `cu_seqlens`, so the table has the most that
    there can be, length // size + documents, and the ones not needed are empty.
    """
    if cu_seqlens is None:
        return _batch_blocks(batch, length, size, device)
    bounds = cu_seqlens.to(device=device, dtype=torch.int64)
    rows = bounds.numel() - 1
    documents = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    torch.cumsum((bounds.diff() + size - 1) // size, 0, out=documents[1:])
    index = torch.arange(length // size + rows, device=device)
    document = torch.searchsorted(documents[1:].contiguous(), index, right=True).clamp_(max=rows - 1)
    first = bounds[document] + (index - documents[document]) * size
    count = (bounds[document + 1] - first).clamp_(0, size)
    table = torch.stack((torch.where(count > 0, first, 0), count, document), 1)
    return Blocks(table.to(torch.int32).contiguous(), documents.to(torch.int32), size, rows)


def clear_first_tokens(x: Tensor, batch: int, cu_seqlens: Tensor | None = None) -> None:
    """Zero x [tokens, H] in place at every document's first token; never waits for the device.

    No state precedes these where none was given, so the gradient of their decay is zero, and not the rounding that
    terms which cancel leave behind.
    """
    if cu_seqlens is None:
        x.unflatten(0, (batch, -1))[:, 0] = 0
        return
    first = torch.zeros(x.shape[0] + 1, dtype=torch.bool, device=x.device)  # an empty last document starts behind all
    first.index_fill_(0, cu_seqlens.to(x.device, torch.int64), True)
    x.masked_fill_(first[:-1, None], 0)


@lru_cache(maxsize=64)
def _batch_blocks(batch: int, length: int, size: int, device: torch.device) -> Blocks:
    each = -(-length // size)
    start = torch.arange(each) * size
    first = (torch.arange(batch)[:, None] * length + start).flatten()
    count = (length - start).clamp(max=size).repeat(batch)
    table = torch.stack((first, count, torch.arange(batch).repeat_interleave(each)), 1)
    documents = torch.arange(batch + 1) * each
    return Blocks(table.to(device, torch.int32), documents.to(device, torch.int32), size, batch)
