"""Hosts in which chosen mixers are swapped, for transformers 5.17 and later.

A model class is a host's own class with one mixin before it: the host builds itself, then our mixers take the places of
its own, Palimpsa-M in the chosen layers and plain Mamba2 in the others (see `swapping`). Names of tensors, generation,
masks, caches, tied weights, device maps and checkpointing stay the host's.

The classes are made when they are asked for, as attributes of this module too: `PalimpsaBambaForCausalLM` and, without
the head, `PalimpsaBambaModel`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING,
    MODEL_MAPPING_NAMES,
)

from ...kernels.common.kept import KeptOutputs
from ...mixers.geometry import GATE, GATE_FP32, MIXER_FP32
from ...mixers.metaplasticity import Metaplasticity
from ...mixers.start import start_gate
from ...mixers.states import CACHE_NAMES
from ..strict_loading import StrictLoadingMixin
from .configuration_palimpsa_hybrid import config_class, host_config_class, known_hosts
from .hosts import HOSTS, host_type, mixer_paths
from .mixer_hybrid import HybridMixer
from .swapping import plain_mixer, swapped_mixer

_FP32 = (*MIXER_FP32, *(f"{GATE}.{name}" for name in GATE_FP32))


class PalimpsaHybridMixin(StrictLoadingMixin):
    """Before a host's class among the bases of a model."""

    _can_compile_fullgraph = False  # where the pads are is worked out from the mask's values

    def __init__(self, config, *args, **kwargs) -> None:
        super().__init__(config, *args, **kwargs)
        # Paths are those below the causal model; the model without a head is one level further down.
        inside = "" if self.base_model is not self else f"{self.base_model_prefix}."
        for layer, path in mixer_paths(config).items():
            place = path.removeprefix(inside)
            mixer = self.get_submodule(place)
            if layer in config.palimpsa_layers:
                self.set_submodule(place, swapped_mixer(mixer, config, config.gate))
                # By full path: the tensors of other mixers have the types that the host gives them.
                self._keep_in_fp32_modules_strict.update(f"{place}.{name}" for name in _FP32)
            else:
                self.set_submodule(place, plain_mixer(mixer, config))
        if HOSTS[host_type(config)].counts_each_piece_anew:
            self.base_model.register_forward_pre_hook(_positions_after_cache, with_kwargs=True)
        if next(self.parameters()).device.type != "meta":
            for module in self.modules():
                if isinstance(module, Metaplasticity):
                    start_gate(module, init)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Metaplasticity):
            start_gate(module, init)
        else:
            super()._init_weights(module)

    def _set_gradient_checkpointing(self, *args, **kwargs) -> None:
        super()._set_gradient_checkpointing(*args, **kwargs)
        for module in self.modules():
            # The hosts' layers call this with what they are to run twice.
            run_twice = vars(module).get("_gradient_checkpointing_func")
            if isinstance(module, GradientCheckpointingLayer) and run_twice and _has_swapped_mamba2(module):
                module._gradient_checkpointing_func = partial(_keep_scans, run_twice)

    @classmethod
    def is_custom_code(cls) -> bool:
        """False, so that transformers treats the model as it treats the host.

        Of custom code it leaves modules without parameters of their own uninitialized, and FalconH1Model is one, which
        fills the multipliers of the mixers; nor would it rename the tensors of files that older code wrote.
        """
        return False


def _has_swapped_mamba2(module: nn.Module) -> bool:
    return any(isinstance(part, HybridMixer) for part in module.modules())


def _keep_scans(run_twice: Callable[..., Any], layer: Callable[..., Any], *args: Tensor) -> Any:
    """`run_twice(layer, *args)` where the second run finds what the scans of the first gave."""
    if torch.compiler.is_compiling():
        return run_twice(layer, *args)
    kept = KeptOutputs()

    def keeping(*given: Tensor) -> Any:
        with kept.use():
            return layer(*given)

    return run_twice(keeping, *args)


def _positions_after_cache(
    model: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """The arguments of a forward with the positions that follow on what the cache has read, where none are given."""
    given = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}
    cache = next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)
    if cache is None or given.get("position_ids") is not None:
        return None
    text = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
    positions = torch.arange(text.shape[1], device=text.device) + cache.get_seq_length()
    return (), {**given, "position_ids": positions.unsqueeze(0)}


@cache
def host_class(host: str, *, headless: bool = False) -> type[PreTrainedModel]:
    """The host's own class, causal or `headless`.

    Args:
        host: a key of `HOSTS`.
        headless: the model that ends with the last norm, as `AutoModel` gives it.

    Raises:
        UsageError: as `host_config_class`.
    """
    mapping = MODEL_MAPPING if headless else MODEL_FOR_CAUSAL_LM_MAPPING
    return mapping[host_config_class(host)]


@cache
def model_class(host: str, *, headless: bool = False) -> type[PreTrainedModel]:
    """The class of a host with swapped layers, `PalimpsaBambaForCausalLM` for "bamba"; see `host_class`."""
    base, config = host_class(host, headless=headless), config_class(host)

    class Model(PalimpsaHybridMixin, base):
        config_class = config

    Model.__name__ = Model.__qualname__ = f"Palimpsa{base.__name__}"
    Model.__doc__ = f"`{base.__name__}` with swapped mixers in the layers `config.palimpsa_layers`."
    # transformers looks up how to rename the tensors of older files by `model_type`.
    renamings = get_checkpoint_conversion_mapping(host)
    if renamings is not None:
        register_checkpoint_conversion_mapping(config.model_type, renamings, overwrite=True)
    if not headless:
        # The Trainer shifts labels for label smoothing only of classes that are listed here by name.
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type] = Model.__name__
    return Model


def __getattr__(name: str):
    for host in known_hosts():
        for headless, names in ((False, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), (True, MODEL_MAPPING_NAMES)):
            if name == f"Palimpsa{names[host]}":
                return model_class(host, headless=headless)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
