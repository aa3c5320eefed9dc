"""Which numbers stay in fp32, and how."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class KeepFp32Mixin(nn.Module):
    """Keeps the parameters named in `keep_fp32` in fp32 through `.to(bfloat16)`, `.half()` and the like.

    A decay exp(-A d) over thousands of tokens amplifies the rounding of A_log; these tensors are a few numbers per head
    and cost nothing. `.double()` converts them too, so that a model can be its own fp64 oracle. Loading keeps them in
    fp32 by `_keep_in_fp32_modules_strict` of the model class.
    """

    keep_fp32: tuple[str, ...] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        kept = {id(tensor) for name in self.keep_fp32 for tensor in _with_gradient(getattr(self, name))}

        def guarded(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            if id(tensor) in kept and result.dtype in (torch.bfloat16, torch.float16):
                return tensor.to(device=result.device, dtype=torch.float32)
            return result

        return super()._apply(guarded, recurse)


def at_least_fp32(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself where it is wide enough."""
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return parameter if wide == parameter.dtype else nn.Parameter(parameter.detach().to(wide))


def _with_gradient(parameter: Tensor) -> list[Tensor]:
    return [parameter] if parameter.grad is None else [parameter, parameter.grad]
