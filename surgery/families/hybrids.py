"""Models of transformers that mix Mamba2 or Gated DeltaNet with attention, MLPs or experts: hosts, which are data.

Where their mixers lie is said in `modeling/hybrids/hosts.py`, names and shapes are asked of the host's own class, built
on `meta` once. A host is written as its model was: every key of its config.json stays.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.errors import CheckpointError, PalimpsaError
from ...base.files import write_json
from ...mixers.geometry import GATE, GATE_FP32, MIXER_FP32, GateSpec
from .base import Site

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

PREFIX = "palimpsa_"
"""Before a host's `model_type`, that of its models with swapped layers."""

_KINDS = {"full_attention": "attention", "moe": "mixture of experts", "mlp": "MLP"}
_ATTENTION = {"full_attention", "hybrid"}
DELTAS = ("qwen3_5_text", "qwen3_next", "olmo_hybrid")
"""Hosts whose mixers are layers of a Gated DeltaNet."""
_DELTA_WORDS = (
    "Gated DeltaNet",
    "metaplastic delta rule",
    "has no meaning for the metaplastic delta rule, which is in no paper and whose output at another start than the "
    "source's nobody derived",
)
_OF_FILES = ("model_type", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version")
"""Keys of config.json that concern the code and the files, not what the model computes."""
_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class HybridConfig:
    """What a stage asks of the config of a hybrid, and all that its file says.

    Attributes:
        model_type: of the host.
        content: the keys of config.json without those that a surgery adds.
        layer_types: what each layer is, in the words of transformers.
        palimpsa_layers: the layers already swapped, sorted.
        gate: the importance gate of those; None where the config says nothing of one.
    """

    model_type: str
    content: Mapping[str, Any] = field(repr=False)
    layer_types: tuple[str, ...]
    vocab_size: int
    hidden_size: int
    tie_word_embeddings: bool
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    palimpsa_layers: tuple[int, ...] = ()
    gate: GateSpec | None = None

    @property
    def num_hidden_layers(self) -> int:
        """Layers of every kind."""
        return len(self.layer_types)

    def keys(self) -> dict[str, Any]:
        """The host's keys, as its config.json has them."""
        return {**self.content, **{key: value for key in _SPECIAL if (value := getattr(self, key)) is not None}}

    def arguments(self) -> dict[str, Any]:
        """The keys of config.json that say what the model computes."""
        gate = self.gate.keys() if self.gate else {}
        host = {key: value for key, value in self.keys().items() if key not in _OF_FILES}
        return {**host, **gate, "palimpsa_layers": list(self.palimpsa_layers)}


class Hybrid:
    """The family of one host; see `base.Family`."""

    copied = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.layouts = (name, f"{PREFIX}{name}")
        words = _DELTA_WORDS if name in DELTAS else ("Mamba2", "Palimpsa-M", "")
        self.plain, self.swapped, self.exact_only = words

    def config(self, where: str, keys: Mapping[str, Any]) -> HybridConfig:
        surgery = {key: keys[key] for key in ("palimpsa_layers", *GateSpec.KEYS) if key in keys}
        content = {key: value for key, value in keys.items() if key not in surgery}
        host = self._host_config(content, where)
        ids = {key: content[key] if key in content else getattr(host, key) for key in _SPECIAL}
        swapped = tuple(sorted(surgery.pop("palimpsa_layers", None) or ()))
        config = HybridConfig(
            model_type=self.name,
            content=content,
            layer_types=tuple(host.layer_types),
            vocab_size=host.vocab_size,
            hidden_size=host.hidden_size,
            tie_word_embeddings=bool(host.tie_word_embeddings),
            **ids,
        )
        paths = self.paths(config)
        if not paths:
            raise CheckpointError(
                f"{where}: a {self.name} model of {len(config.layer_types)} layers, none of which has a {self.plain} "
                "mixer; choose a model that has some"
            )
        if not _ATTENTION & set(config.layer_types):
            raise CheckpointError(
                f"{where}: a {self.name} model without a layer of attention, which transformers cannot run with a "
                "cache, and so not generate with; choose a model that has some"
            )
        for layer in swapped:
            if layer not in paths:
                raise CheckpointError(
                    f"{where}:palimpsa_layers: names layer {layer}, which holds no {self.plain} mixer; restore the "
                    "config that was written with the weights"
                )
        return replace(config, palimpsa_layers=swapped, gate=self._gate(where, config, surgery))

    def _gate(self, where: str, config: HybridConfig, said: Mapping[str, Any]) -> GateSpec | None:
        if not said:
            return None
        geometry = next(iter(self.sites(config).values())).geometry
        gate = GateSpec.complete(geometry.hidden_size, geometry.gate_channels, **said)
        for key, fault in gate.misfits(geometry.hidden_size, geometry.gate_channels):
            raise CheckpointError(f"{where}:{key}: {fault}, or restore the config that was written with the weights")
        return gate

    def paths(self, config: Any) -> dict[int, str]:
        from ...modeling.hybrids.hosts import mixer_paths

        return mixer_paths(config)

    def sites(self, config: HybridConfig) -> dict[int, Site]:
        from ...modeling.hybrids.hosts import HOSTS, norm_path
        from ...modeling.hybrids.swapping import mixer_geometry

        model, swapped = self.host(config), set(config.palimpsa_layers)
        sites = {}
        for layer, path in self.paths(config).items():
            mixer = model.get_submodule(path)
            geometry = mixer_geometry(mixer, model.config)
            absent = tuple(geometry.shapes().keys() - dict(mixer.named_parameters()).keys())
            gate = config.gate if layer in swapped else None
            offset = HOSTS[self.name].norm_offset
            sites[layer] = Site(layer, path, norm_path(config, layer), geometry, gate, absent, offset)
        return sites

    def kind(self, config: HybridConfig, layer: int) -> str:
        if layer in self.paths(config):
            return self.plain
        return _KINDS.get(config.layer_types[layer], config.layer_types[layer])

    def shapes(self, config: HybridConfig) -> dict[str, tuple[int, ...]]:
        tied = self.tied(config)
        shapes = {
            name: tuple(tensor.shape) for name, tensor in self.host(config).state_dict().items() if name not in tied
        }
        sites = self.sites(config)
        for layer in config.palimpsa_layers:
            shapes |= sites[layer].new(config.gate)
        return shapes

    def tied(self, config: HybridConfig) -> dict[str, str]:
        """Names of the model for tensors that have another one: it to the name that they are stored under."""
        first: dict[int, str] = {}
        names = self.host(config).state_dict(keep_vars=True).items()
        return {name: one for name, tensor in names if (one := first.setdefault(id(tensor), name)) != name}

    def keeps_fp32(self, config: HybridConfig, name: str) -> bool:
        strict = getattr(self.host(config), "_keep_in_fp32_modules_strict", None) or ()
        paths = self.paths(config)
        own = {f"{paths[layer]}.{tensor}" for layer in config.palimpsa_layers for tensor in MIXER_FP32}
        return (
            name in own
            or name in _made_fp32(self.name, self._content(config))
            or name.endswith(tuple(f".{GATE}.{one}" for one in GATE_FP32))
            or any(re.search(rf"(^|\.){re.escape(part)}(\.|$)", name) for part in strict)
        )

    def model_config(self, config: HybridConfig, **more: Any) -> Any:
        from ...modeling.hybrids.configuration_palimpsa_hybrid import config_class

        return config_class(self.name).from_dict({**config.arguments(), **more})

    def write_config(self, config: HybridConfig, folder: Path, **more: Any) -> None:
        of_files = {"model_type": f"{PREFIX}{self.name}", **more}
        write_json(folder / "config.json", _strict({**config.arguments(), **of_files}))

    def write_host_config(self, config: HybridConfig, folder: Path, **more: Any) -> None:
        """config.json of the host's own class, as it was before a surgery, and `more`."""
        of_files = {"model_type": self.name, "architectures": [type(self.host(config)).__name__], **more}
        keys = {key: value for key, value in config.keys().items() if key not in _OF_FILES}
        write_json(folder / "config.json", _strict({**keys, **of_files}))

    def model_class(self) -> type:
        from ...modeling.hybrids.modeling_palimpsa_hybrid import model_class

        return model_class(self.name)

    def build(self, config: HybridConfig, state: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
        return _loaded(self.model_class(), self.model_config(config), state, dtype)

    def reference(self, config: HybridConfig, state: Mapping[str, Tensor]) -> Any:
        import torch

        from ...modeling.hybrids.modeling_palimpsa_hybrid import host_class
        from ...modeling.hybrids.swapping import bound_step_sizes

        model = _loaded(host_class(self.name), self._host_config(config.keys()), state, torch.float32)
        for path in self.paths(config).values():
            bound_step_sizes(model.get_submodule(path), model.config)
        return model

    def mixers(self, config: HybridConfig, layer: int) -> tuple[nn.Module, nn.Module]:
        from ...modeling.hybrids.swapping import bound_step_sizes, swapped_mixer

        model, path = self.host(config), self.paths(config)[layer]
        plain, swapped = (copy.deepcopy(model.get_submodule(path)) for _ in range(2))
        bound_step_sizes(plain, model.config)
        for name, buffer in self._buffers(config).items():
            plain.register_buffer(name, buffer, persistent=False)
            swapped.register_buffer(name, buffer, persistent=False)
        return plain, swapped_mixer(swapped, model.config, config.gate)

    def remarks(self, config: HybridConfig) -> tuple[str, ...]:
        from ...modeling.hybrids.hosts import time_step_limit

        model = self.host(config)
        bounds = time_step_limit(model.config)
        own = getattr(model.get_submodule(next(iter(self.paths(config).values()))), "time_step_limit", None)
        if own is None or tuple(own) == bounds:
            return ()
        return (
            f"{type(model).__name__} bounds step sizes to {_span(own)}, the model was trained with {_span(bounds)}: "
            "all its mixers have these here, and a comparison gives them to the class too",
        )

    def _buffers(self, config: HybridConfig) -> dict[str, Tensor]:
        """The values of what a mixer has beside its parameters, which every layer has alike."""
        from transformers.initialization import no_init_weights

        from ...modeling.hybrids.hosts import HOSTS
        from ...modeling.hybrids.modeling_palimpsa_hybrid import host_class

        name = HOSTS[self.name].output_multiplier
        if name is None:
            return {}
        layer, path = next(iter(self.paths(config).items()))
        small = copy.deepcopy(self.host(config).config)
        small.num_hidden_layers, small.vocab_size = layer + 1, 2
        with no_init_weights():  # memory that is not written to is not taken
            mixer = host_class(self.name)(small).get_submodule(path)
        return {name: getattr(mixer, name).clone()}

    def host(self, config: HybridConfig) -> Any:
        """The host's model on `meta`, without swapped layers; one object, not to be changed."""
        return _on_meta(self.name, self._content(config))

    def _content(self, config: HybridConfig) -> str:
        return json.dumps(_strict(config.content), sort_keys=True, default=str)

    def _host_config(self, content: Mapping[str, Any], where: str = "config.json") -> Any:
        from ...modeling.hybrids.configuration_palimpsa_hybrid import host_config_class

        keys = {key: value for key, value in content.items() if key not in _OF_FILES}
        try:
            return host_config_class(self.name).from_dict(keys)
        except PalimpsaError:
            raise
        except Exception as error:  # of many kinds: strict fields, missing keys, arithmetic
            reason = " ".join(str(error).split())[:200].rstrip(".")
            raise CheckpointError(
                f"{where}: transformers refuses it as the config of a {self.name} model ({reason}); correct that key, "
                "or download the config again"
            ) from error


def _span(bounds: Any) -> str:
    low, high = bounds
    return f"({low:g}, {high:g})"


def _strict(value: Any) -> Any:
    """A value of a config for strict JSON: an infinity in the way of transformers."""
    if isinstance(value, Mapping):
        return {key: _strict(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")}
    return value


@lru_cache(maxsize=4)
def _on_meta(name: str, content: str, **options: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    keys = json.loads(content, object_hook=lambda table: float(table["__float__"]) if "__float__" in table else table)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(HYBRIDS[name]._host_config(keys), **options)
    except PalimpsaError:
        raise
    except Exception as error:  # sizes that contradict each other, of which every class speaks in its own way
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise CheckpointError(
            f"config.json: transformers cannot build a {name} model from it ({reason}); correct it, or download "
            "it again"
        ) from error


@lru_cache(maxsize=4)
def _made_fp32(name: str, content: str) -> frozenset[str]:
    """The parameters that the host's class makes in fp32 in a model of another type."""
    import torch

    parameters = _on_meta(name, content, dtype=torch.bfloat16).named_parameters()
    return frozenset(name for name, parameter in parameters if parameter.dtype == torch.float32)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' own progress bars, which appear even where stderr is no terminal."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _loaded(model_class: type, config: Any, state: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """A model of transformers from tensors; what is no parameter it makes itself."""
    with quiet_transformers():
        model, info = model_class.from_pretrained(
            None, config=config, state_dict=dict(state), dtype=dtype, output_loading_info=True
        )
    wrong = [*info["missing_keys"], *info["unexpected_keys"], *(name for name, *_ in info["mismatched_keys"])]
    if wrong:
        raise RuntimeError(f"{model_class.__name__}: missing, unexpected or of another shape: {', '.join(wrong[:5])}")
    return model.eval()


HYBRIDS: dict[str, Hybrid] = {
    name: Hybrid(name) for name in ("bamba", "granitemoehybrid", "falcon_h1", "zamba2", "nemotron_h", *DELTAS)
}
"""By the host's `model_type`."""
