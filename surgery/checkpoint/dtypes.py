"""The dtypes that a user may ask for by name."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...base.errors import UsageError
from ...kernels.common.precision import DTYPES

STORED = ("float32", "bfloat16", "float16")
"""What weights are written in."""


def dtype_of(name: str, names: Iterable[str] = tuple(DTYPES)) -> torch.dtype | None:
    """The dtype that `--dtype` names; None for a name that is none, such as "source".

    Raises:
        UsageError: it is not among `names`.
    """
    if name not in (names := tuple(names)):
        raise UsageError(f"--dtype {name}: there is no such dtype; choose one of {', '.join(names)}")
    return DTYPES.get(name)
