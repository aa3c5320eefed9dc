"""Checkpoints of hybrids: their config, and the names in their files, which transformers itself renames.

Whoever wrote the files, a tensor has the name here that the host's class gives it. Some are stored in several parts, as
the experts of Nemotron-H are: each part is a tensor of its own here, and the accounting puts them together.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...base.console import counted
from ...base.errors import CheckpointError
from ...mixers.geometry import SCALE_FORMS, GateSpec
from ..families.hybrids import HYBRIDS, PREFIX, Hybrid, HybridConfig
from .keymap import Rule, strip_wrappers

# The kinds that one might take for a hybrid of Mamba2.
_MAMBA1 = ("mamba", "falcon_mamba", "jamba", "zamba")
_WRAPPERS = ("nemotron_h_omni", "nemotron3_5_transcribe")
_QUANTIZED = "hf_quant_config.json"


def host_of(content: Mapping[str, Any]) -> Hybrid | None:
    """The family of a hybrid's config, also of one with swapped layers; None for other configs."""
    return HYBRIDS.get(str(content.get("model_type")).removeprefix(PREFIX))


def refuse_kind(where: str, content: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` for the kinds of model that are near to what is supported."""
    kind = content.get("model_type")
    if kind in _MAMBA1:
        raise CheckpointError(
            f"{where}:model_type: is {kind!r}, whose mixers are Mamba1, expected Mamba2; choose a model of those, "
            f"such as state-spaces/mamba2-130m, or one of {', '.join(HYBRIDS)}"
        )
    inner = [value for value in content.values() if isinstance(value, dict) and host_of(value)]
    if kind in _WRAPPERS or (inner and host_of(content) is None):
        host = inner[0]["model_type"] if inner else "nemotron_h"
        raise CheckpointError(
            f"{where}:model_type: is {kind!r}, a model of more than text around {host}; save its language model alone "
            f"(as {host}, with transformers) and give that folder"
        )


def read_host(path: Path, content: Mapping[str, Any], tensors: int) -> dict[str, Any]:
    """The fields of a `Layout` for the config of a hybrid.

    Args:
        path: the config.
        content: what it holds.
        tensors: how many the weights have.

    Raises:
        CheckpointError: the weights are quantized, or the config is none that transformers takes.
    """
    where, family, kind = path.name, host_of(content), content["model_type"]
    quantized = "quantization_config" if content.get("quantization_config") else ""
    if quantized or (path.parent / _QUANTIZED).is_file():
        raise CheckpointError(
            f"{where if quantized else _QUANTIZED}:{quantized or 'quantization'}: the weights are quantized (as FP8, "
            "NVFP4 or by bitsandbytes), expected bf16, fp16 or fp32; use the original model"
        )
    layers = content.get("num_hidden_layers")
    if type(layers) is int and layers > tensors:  # a class of so many would be built to ask for its tensors
        raise CheckpointError(
            f"{where}: gives num_hidden_layers = {layers}, but the weights are {counted(tensors, 'tensor')} in all; "
            "the config belongs to other weights"
        )
    surgery = ("palimpsa_layers", *GateSpec.KEYS)
    keys = {key: value for key, value in content.items() if kind != family.name or key not in surgery}
    if kind != family.name:
        _check_surgery(where, keys)
    config = family.config(where, {**keys, "model_type": family.name})
    return {
        "name": kind,
        "config": {**keys, "model_type": family.name},
        "says_tied": config.tie_word_embeddings,
        "config_file": path,
        "family": family,
        "names": HostNames(family, config),
    }


def _check_surgery(where: str, keys: Mapping[str, Any]) -> None:
    swapped = keys.get("palimpsa_layers")
    if not isinstance(swapped, list) or not all(type(layer) is int for layer in swapped):
        raise CheckpointError(
            f"{where}:palimpsa_layers: is {swapped!r}, expected a list of layers; restore the config that was written "
            "with the weights"
        )
    kinds = dict(zip(GateSpec.KEYS, (int, int, str, bool), strict=True))
    wrong = [key for key, kind in kinds.items() if type(keys.get(key)) is not kind]
    if swapped and (wrong or keys["beta_scale_form"] not in SCALE_FORMS):
        key = wrong[0] if wrong else "beta_scale_form"
        raise CheckpointError(
            f"{where}:{key}: is {keys.get(key)!r}, which no importance gate has; restore the config that was written "
            "with the weights"
        )


class HostNames:
    """From the names in files to those of a hybrid's class, by the renamings of transformers.

    Args:
        family: the host's.
        config: of the checkpoint.
    """

    def __init__(self, family: Hybrid, config: HybridConfig) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        self._model = family.host(config)
        self._known = dict.fromkeys((*family.shapes(config), *self._model.state_dict()), True)
        self._tied = family.tied(config)
        self._ignored = self._model._keys_to_ignore_on_load_unexpected or ()
        mapping = get_model_conversion_mapping(self._model)
        self._converters = [one for one in mapping if isinstance(one, WeightConverter)]
        self._renamings = [one for one in mapping if not isinstance(one, WeightConverter)]

    def translate(self, source_name: str) -> tuple[str, Rule] | None:
        """The model's name for a tensor in a file and the rule that gave it; None for a name that it does not know."""
        stripped = strip_wrappers(source_name)
        name, pattern = self._renamed(stripped, self._converters)
        if name not in self._known and stripped in self._known:
            name, pattern = stripped, None
        if name in self._known:
            if pattern is None:
                return self._tied.get(name, name), Rule(source_name, name)
            return self._renamed(stripped, [])[0], Rule(source_name, name, part_of=name)
        if any(re.search(one, stripped) for one in self._ignored):
            return stripped, Rule(source_name, stripped, dropped=f"no part of {type(self._model).__name__}")
        return None

    def is_spare(self, source_name: str) -> bool:
        """Whether a name in an index stands for a tensor that is stored under another name."""
        return self._renamed(strip_wrappers(source_name), [])[0] in self._tied

    def whole_shape(self, name: str, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The shape of the model's tensor `name` that parts of these names and shapes make; raises as `whole`."""
        empty = {part: torch.empty(shape, device="meta") for part, shape in parts.items()}
        return tuple(self.whole(name, empty).shape)

    def whole(self, name: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The model's tensor `name`, put together from its parts by their names.

        Raises:
            CheckpointError: they do not go together.
        """
        from transformers.core_model_loading import dot_natural_key

        converter = None
        for part in sorted(parts, key=dot_natural_key):
            _, pattern = self._renamed(part, self._converters)
            own = next(one for one in self._converters if pattern in one.source_patterns)
            converter = converter or copy.deepcopy(own)
            converter.add_tensor(name, part, pattern, parts[part])
        try:
            made = converter.convert(name, model=self._model, config=self._model.config)
        except Exception as error:  # torch's of shapes that differ, wrapped by transformers
            raise CheckpointError(
                f"{next(iter(parts))} and the other parts of {name} do not go together "
                f"({' '.join(str(error).split())[:160]}); download the checkpoint again"
            ) from error
        tensor = made[name]
        return tensor[0] if isinstance(tensor, list) else tensor

    def _renamed(self, name: str, converters: Iterable[Any]) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        return rename_source_key(name, self._renamings, list(converters), self._model.base_model_prefix, self._known)
