"""Packed documents: one row of tokens, and where in it each document starts."""

import itertools

import torch
from torch import Tensor

from ...base.errors import UsageError


def check_cu_seqlens(cu_seqlens: Tensor, batch: int, length: int) -> None:
    """Refuse `cu_seqlens` that do not cut one row of `length` tokens into documents; values are read only on the CPU.

    Raises:
        UsageError: wrong rank, dtype, batch or values.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise UsageError(
            f"cu_seqlens has shape {list(cu_seqlens.shape)}; expected [documents + 1] with at least one document."
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise UsageError(f"cu_seqlens has dtype {cu_seqlens.dtype}; expected int32 or int64.")
    if batch != 1:
        raise UsageError(f"cu_seqlens was given with a batch of {batch}; expected packed documents in a batch of 1.")
    if cu_seqlens.device.type != "cpu":
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != length or any(b < a for a, b in itertools.pairwise(bounds)):
        raise UsageError(f"cu_seqlens is {_short(bounds)}; expected values that never fall, from 0 to {length} tokens.")


def _short(values: list[int]) -> str:
    return str(values) if len(values) < 9 else f"[{str(values[:4])[1:-1]}, ..., {str(values[-3:])[1:-1]}]"
