"""Why a loss or a gradient is not finite: the module or the parameters where it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...surgery.checkpoint.keymap import strip_wrappers
from .checkpointing import trained_parameters


def first_bad_module(module: nn.Module, forward: Callable[[], Any]) -> str | None:
    """Runs `forward` once more and names the first module that turned finite inputs into values that are not finite.

    Args:
        module: what `forward` calls.
        forward: one forward pass.

    Returns:
        The module's name and class, with a parameter of its own that is not finite where there is one; None when the
        pass is finite.
    """
    found: list[str] = []

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(inner: nn.Module, inputs: Any, output: Any) -> None:
            if not found and not _finite(output) and _finite(inputs):
                bad = [key for key, p in inner.named_parameters() if not torch.isfinite(p).all()]
                found.append(f"{name} ({type(inner).__name__})" + (f", whose {bad[0]} is not finite" if bad else ""))

        return hook

    handles = [
        inner.register_forward_hook(look(strip_wrappers(name)))
        for name, inner in module.named_modules()
        if name not in ("", "module")
    ]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def bad_gradients(module: nn.Module) -> list[str]:
    """Names of the parameters whose gradient is not finite, the one nearest to the loss first."""
    names = [
        name
        for name, parameter in trained_parameters(module).items()
        if parameter.grad is not None and not _finite(parameter.grad)
    ]
    return names[::-1]


def _finite(value: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
