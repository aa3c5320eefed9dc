"""The dtypes that weights are stored and run in, by the names that users and files give them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...base.errors import UsageError

FLOATS = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
STORED = ("float32", "bfloat16", "float16")
"""What weights are written in."""


def dtype_of(name: str, names: Iterable[str] = tuple(FLOATS)) -> torch.dtype | None:
    """The dtype that `--dtype` names; None for a name that is none, such as "source".

    Raises:
        UsageError: it is not among `names`.
    """
    if name not in (names := tuple(names)):
        raise UsageError(f"--dtype {name}: there is no such dtype; choose one of {', '.join(names)}")
    return FLOATS.get(name)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
