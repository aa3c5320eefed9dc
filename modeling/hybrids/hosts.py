"""Families of transformers whose layers hold mixers that can be swapped: data, and where a config puts the mixers.

A host is the class of transformers that runs such a model. Mixers of Mamba2 have the attributes and the tensors of
`Mamba2Mixer` under the same names, layers of a Gated DeltaNet call their rule alike, so that a new family is one more
entry of `HOSTS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "palimpsa_"
"""Stands before a host's `model_type` in that of its models with swapped layers."""

_LARGEST_FP32 = 3.4028234663852886e38


@dataclass(frozen=True)
class Host:
    """What cannot be read from a host's own modules.

    Attributes:
        mixers: path of the mixer below its layer, by the layer's type in `config.layer_types`; the other types have
            none.
        norm: the norm before the mixer, beside it.
        head_dim: key of the config with the channels of a head.
        layers: path of the list of layers below the causal model.
        time_step_limit: bounds of the step size that the models were trained with: a key of the config, or the bounds
            themselves where the class uses others.
        input_multiplier: attribute of the host's mixer that scales the input of `in_proj`.
        output_multiplier: buffer of the host's mixer that scales the output of `in_proj`, element by element.
        logits_multiplier: key of the config by which logits are multiplied.
        logits_divisor: key of the config by which logits are divided.
        counts_each_piece_anew: whether its class, where no positions are given, numbers a piece of text after a cache
            from 0 again.
        keeps_documents_apart: whether positions that start again at 0 tell its attention where a document begins.
        delta: its mixers are layers of a Gated DeltaNet: what is swapped is their rule (see `mixer_delta`).
        norm_offset: what the norm before the mixer adds to its weight.
    """

    mixers: Mapping[str, str]
    norm: str = "input_layernorm"
    head_dim: str = "mamba_d_head"
    layers: str = "model.layers"
    time_step_limit: str | tuple[float, float] = "time_step_limit"
    input_multiplier: str | None = None
    output_multiplier: str | None = None
    logits_multiplier: str | None = None
    logits_divisor: str | None = None
    counts_each_piece_anew: bool = False
    keeps_documents_apart: bool = True
    delta: bool = False
    norm_offset: float = 0.0


HOSTS: dict[str, Host] = {
    "bamba": Host({"linear_attention": "mamba"}, counts_each_piece_anew=True),
    "granitemoehybrid": Host(
        {"linear_attention": "mamba"}, logits_divisor="logits_scaling", keeps_documents_apart=False
    ),
    "falcon_h1": Host(
        {"hybrid": "mamba"},
        input_multiplier="ssm_in_multiplier",
        output_multiplier="mup_vector",
        logits_multiplier="lm_head_multiplier",
    ),
    # Its class clamps the step size at `time_step_min`, which is for initialization; the authors' code does not.
    "zamba2": Host(
        {"linear_attention": "mamba", "hybrid": "mamba_decoder.mamba"},
        head_dim="mamba_headdim",
        time_step_limit=(0.0, math.inf),
    ),
    "nemotron_h": Host({"linear_attention": "mixer"}, norm="norm", head_dim="mamba_head_dim"),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_next"),
        Host({"linear_attention": "linear_attn"}, time_step_limit=(0.0, math.inf), delta=True, norm_offset=1.0),
    ),
    "olmo_hybrid": Host({"linear_attention": "linear_attn"}, time_step_limit=(0.0, math.inf), delta=True),
}
"""By `model_type`."""


def host_type(config: Any) -> str:
    """The host's `model_type`, of its own config or of one with swapped layers."""
    return config.model_type.removeprefix(PREFIX)


def is_hybrid(config: Any) -> bool:
    """Whether a config is of a host, with swapped layers or without."""
    return getattr(config, "model_type", "").removeprefix(PREFIX) in HOSTS


def is_delta(config: Any) -> bool:
    """Whether a config is of a host whose mixers are layers of a Gated DeltaNet."""
    return is_hybrid(config) and HOSTS[host_type(config)].delta


def gate_channels(config: Any) -> int:
    """How many channels of a head may have an importance of their own."""
    host = HOSTS[host_type(config)]
    return 1 if host.delta else getattr(config, host.head_dim)


def mixer_path(config: Any, layer: int) -> str | None:
    """Path of a layer's mixer below the causal model; None for a layer that has none."""
    host = HOSTS[host_type(config)]
    below = host.mixers.get(config.layer_types[layer])
    return None if below is None else f"{host.layers}.{layer}.{below}"


def mixer_paths(config: Any) -> dict[int, str]:
    """Paths of all mixers below the causal model, by layer, in order."""
    paths = {layer: mixer_path(config, layer) for layer in range(len(config.layer_types))}
    return {layer: path for layer, path in paths.items() if path is not None}


def norm_path(config: Any, layer: int) -> str | None:
    """Path of the norm before a layer's mixer; None for a layer without a mixer."""
    path = mixer_path(config, layer)
    return None if path is None else f"{path.rpartition('.')[0]}.{HOSTS[host_type(config)].norm}"


def time_step_limit(config: Any) -> tuple[float, float]:
    """Lower and upper bound of the step size that the model was trained with; `inf` for none."""
    limit = HOSTS[host_type(config)].time_step_limit
    low, high = (getattr(config, limit) if isinstance(limit, str) else limit) or (0.0, math.inf)
    # Steps are fp32: a bound from its largest number on, which some write for want of an infinity, is none.
    return float(low or 0.0), math.inf if high is None or high >= _LARGEST_FP32 else float(high)


def logits_factor(config: Any) -> float:
    """By what the output of the head is multiplied to be the logits; 1 for a model that is no host."""
    if not is_hybrid(config):
        return 1.0
    host = HOSTS[host_type(config)]
    factor = getattr(config, host.logits_multiplier) if host.logits_multiplier else 1.0
    return factor / getattr(config, host.logits_divisor) if host.logits_divisor else factor
