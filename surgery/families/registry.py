"""The families there are, and the mixers of a model that runs."""

from __future__ import annotations

from typing import Any

from .base import Family
from .hybrids import HYBRIDS, PREFIX
from .mamba2 import MAMBA2

FAMILIES: dict[str, Family] = {f"{PREFIX}{family.name}": family for family in (MAMBA2, *HYBRIDS.values())}
"""By the `model_type` of the models that run."""


def mixers(model: Any) -> dict[int, Any]:
    """The mixers of a model that runs, swapped or not, by layer."""
    paths = FAMILIES[model.config.model_type].paths(model.config)
    return {layer: model.get_submodule(path) for layer, path in paths.items()}
