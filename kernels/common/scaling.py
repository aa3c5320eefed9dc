"""One number per token and head times a row of channels, in one pass over memory: values and the importance gate."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends import TRITON_DEVICES, Backend, Operator

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDTHS = (8, 1024)

FUSED = Operator("the scaling of rows", Backend("triton", "common.triton_scaling", TRITON_DEVICES))


def scale_rows(x: Tensor, scale: Tensor, dtype: torch.dtype, *, sigmoid: bool = False) -> Tensor:
    """x, or sigmoid(x), times `scale`, computed in the type of `scale` and given in `dtype`.

    Args:
        x: [B, T, H, C], or [B, H, C] for one step.
        scale: the same without the last dimension.
    """
    fits = x.dim() == 4 and _WIDTHS[0] <= x.shape[-1] <= _WIDTHS[1]
    fits = fits and x.dtype in _DTYPES and scale.dtype == torch.float32
    # A compiler fuses the few operations below by itself.
    if fits and not torch.compiler.is_compiling() and FUSED.reason("triton", x.device) is None:
        return FUSED.module("triton").scale_rows(x, scale, dtype, sigmoid)
    wide = x.to(scale.dtype)
    return ((wide.sigmoid() if sigmoid else wide) * scale.unsqueeze(-1)).to(dtype)
