"""PEFT's settings of an adapter: whether it is plain LoRA, its scale, and what they say its file holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...base.errors import UsageError
from .adapter_files import CONFIG

_READ = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "init_lora_weights"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
)
_HARMLESS = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "runtime_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("megatron_core", "qalora_group_size"),
)
"""Settings of PEFT that say where an adapter comes from, act in training alone, or do nothing unless another is set."""


@dataclass(frozen=True)
class LoraSettings:
    """What plain LoRA does to a model: `scale * (B @ A)` is added to some matrices, some modules are trained whole.

    Attributes:
        rank: rows of each A, columns of each B.
        scale: what their product is multiplied with.
        targets: paths or last parts of paths of modules, or a regular expression of whole paths.
        excluded: the same for modules that are left out.
        layers: numbers of the layers that have adapters; None for all.
        patterns: what stands before such a number in a path.
        saved: ends of the paths of modules that are trained whole.
    """

    rank: int
    scale: float
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...] | None
    patterns: tuple[str, ...]
    saved: tuple[str, ...]

    def pairs(self, names: Iterable[str], shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        """Those of `names` that are weights with a pair of low-rank matrices, by their shapes in the base."""
        return {
            name
            for name in names
            if name.endswith(".weight") and len(shapes[name]) > 1 and self._is_target(name.removesuffix(".weight"))
        }

    def whole(self, names: Iterable[str]) -> set[str]:
        """Those of `names` that lie in modules that are trained whole."""
        return {name for name in names if any(path.endswith(self.saved) for path in _modules(name))}

    def _is_target(self, path: str) -> bool:
        if any(re.match(rf"(^|.*\.){name}($|\..*)", path) for name in self.saved) or _named(path, self.excluded):
            return False
        if not _named(path, self.targets):
            return False
        if self.layers is None or isinstance(self.targets, str):
            return True
        found = (re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", path) for pattern in self.patterns or (r"[^.]*",))
        number = next((match.group(1) for match in found if match), None)
        return number is not None and int(number) in self.layers


def lora_settings(config: Mapping[str, Any]) -> LoraSettings:
    """The settings of an adapter that is plain LoRA.

    Args:
        config: content of `adapter_config.json`.

    Raises:
        UsageError: it is of another kind, has a setting that this does not know to be without effect, or a value that
            is none.
    """
    odd = _odd_settings(config)
    if config.get("peft_type") != "LORA" or odd:
        kind = f"{config.get('peft_type')}{' with ' + ', '.join(odd) if odd else ''}"
        raise UsageError(f"{CONFIG}: the adapter is {kind}; only plain LORA can be merged here, PEFT merges others")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise UsageError(f"{CONFIG}:r: is {rank!r}, expected a whole number above 0; write the file again")
    if type(alpha) not in (int, float) or not alpha > 0:
        raise UsageError(f"{CONFIG}:lora_alpha: is {alpha!r}, expected a number above 0; write the file again")
    targets = _names(config, "target_modules")
    if not targets:
        raise UsageError(
            f"{CONFIG}:target_modules: names no module, expected those with adapters; write the file again"
        )
    return LoraSettings(
        rank=rank,
        scale=alpha / (rank**0.5 if config.get("use_rslora") else rank),
        targets=targets,
        excluded=_names(config, "exclude_modules"),
        layers=_layers(config),
        patterns=_listed(config, "layers_pattern"),
        saved=_listed(config, "modules_to_save"),
    )


def _odd_settings(config: Mapping[str, Any]) -> list[str]:
    """Names of the settings that may change what is computed: set, not known here, and not at PEFT's own default."""
    odd = [key for key, value in config.items() if key not in (*_READ, *_HARMLESS) and value]
    odd = [key for key in odd if not (key == "bias" and config[key] == "none")]
    if odd:
        defaults = _peft_defaults()
        odd = [key for key in odd if key not in defaults or config[key] != defaults[key]]
    return odd


def _peft_defaults() -> dict[str, Any]:
    """What the installed PEFT sets where nothing is asked for, which may be newer than this; {} without it."""
    try:
        from peft import LoraConfig
    except ImportError:
        return {}
    return LoraConfig().to_dict()


def _names(config: Mapping[str, Any], key: str) -> str | tuple[str, ...]:
    value = config.get(key)
    if not isinstance(value, str):
        return _listed(config, key)
    try:
        re.compile(value)
    except re.error as error:
        raise UsageError(
            f"{CONFIG}:{key}: {value!r} is no regular expression ({error}); write the file again"
        ) from error
    return value


def _listed(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = config.get(key) or ()
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) and name for name in value):
        raise UsageError(f"{CONFIG}:{key}: is {value!r}, expected a list of names; write the file again")
    return tuple(value)


def _layers(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    value = config.get("layers_to_transform")
    value = [value] if type(value) is int else value
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise UsageError(
            f"{CONFIG}:layers_to_transform: is {value!r}, expected numbers of layers; write the file again"
        )
    return tuple(value)


def _named(path: str, names: str | tuple[str, ...]) -> bool:
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, path) is not None
    return path in names or path.endswith(tuple(f".{name}" for name in names))


def _modules(name: str) -> list[str]:
    """The paths of the modules around a parameter."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]
