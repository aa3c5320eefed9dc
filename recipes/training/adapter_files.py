"""The files of an adapter folder: PEFT's own two, and the one that says which base they belong to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ...base.errors import CheckpointError, UsageError
from ...base.files import RECIPE, load_json
from ...base.schemas import StrictModel
from ...surgery.checkpoint.lazy import SafetensorsFile
from ...surgery.checkpoint.sources import reading

CONFIG, TENSORS, SOURCE = "adapter_config.json", "adapter_model.safetensors", "adapter_source.json"

_KEEPS_THE_BASE = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Values of PEFT's `init_lora_weights` whose matrices are put on the base as it is. The others (pissa, olora, corda,
loftq, lora_ga) take something out of the base first, which only PEFT does again when it loads them."""


class AdapterSource(StrictModel):
    """Which model an adapter belongs to: its Hub id or folder name, its fingerprint, its swapped layers, the sha256 of
    its weights files, and what the product of its low-rank matrices was multiplied with in training (earlier releases
    wrote neither of the two)."""

    base: str
    fingerprint: str
    palimpsa_layers: tuple[int, ...]
    weights: tuple[str, ...] = ()
    scale: float | None = None


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """PEFT's settings of an adapter, whose base is the model that it names and nothing made of it.

    Raises:
        SchemaError: the file is not JSON.
        CheckpointError: it is no table.
        UsageError: the adapter was started in a way that changes its base.
    """
    config = load_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / CONFIG}: holds a {type(config).__name__}, expected PEFT's table of settings")
    start = config.get("init_lora_weights")
    if start not in _KEEPS_THE_BASE:
        raise UsageError(
            f"{folder / CONFIG}:init_lora_weights: is {start!r}, a start that changes the base, so this adapter does "
            "not fit the model it names; make it a plain one with PEFT's "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    return config


def adapter_recipe(folder: Path) -> Path | None:
    """The recipe that an adapter was trained by: beside it, or that of the run in whose `adapter/` it lies."""
    folder = folder.resolve()
    run = [folder.parent / RECIPE] if folder.name == "adapter" else []
    return next((path for path in (folder / RECIPE, *run) if path.is_file()), None)


def read_adapter_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter by their names in its file.

    Raises:
        CheckpointError: the file is damaged, or a value is not finite.
    """
    with reading(folder.name):
        file = SafetensorsFile(folder / TENSORS)
    tensors = {name: file.load(name) for name in file.tensors}
    for name, tensor in tensors.items():
        if not file.contents(name, tensor).finite:
            raise CheckpointError(
                f"{TENSORS}: tensor {name} holds values that are not finite (NaN or infinity), expected a trained "
                "adapter; use an undamaged one"
            )
    return tensors
