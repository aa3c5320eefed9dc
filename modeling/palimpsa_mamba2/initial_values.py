"""Initial values of a model trained from scratch: mamba_ssm's, and the paper's for the new parameters.

Only through `transformers.initialization`: those functions leave alone what a checkpoint filled, whereas transformers
calls this on a module as soon as one of its parameters is missing.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from ...mixers.attention import Projection
from ...mixers.metaplasticity import Metaplasticity
from ...mixers.mixer import CausalConv1d, Mamba2Mixer
from ...mixers.start import start_gate, start_steps
from .configuration_palimpsa_mamba2 import PalimpsaMamba2Config


@torch.no_grad()
def initialize(module: nn.Module, config: PalimpsaMamba2Config) -> None:
    """Fills the parameters that `module` itself is responsible for; transformers calls it on every module."""
    if isinstance(module, Mamba2Mixer):
        _initialize_mixer(module, config)
    elif isinstance(module, Projection):
        _initialize_projection(module, config)
    elif isinstance(module, CausalConv1d) and module.activation is None:  # of attention; a mixer draws its own
        init.kaiming_uniform_(module.weight, a=math.sqrt(5))
        init.zeros_(module.bias)
    else:
        initialize_common(module, config)


def initialize_common(module: nn.Module, config: PreTrainedConfig) -> None:
    """Importance gates, the embedding, the head and the norms, which are alike in every kind of model."""
    if isinstance(module, Metaplasticity):
        start_gate(module, init)
    elif isinstance(module, nn.Embedding) or _is_head(module, config):
        init.normal_(module.weight, mean=0.0, std=config.initializer_range)
    elif hasattr(module, "eps") and hasattr(module, "weight"):
        init.ones_(module.weight)


def _is_head(module: nn.Module, config: PreTrainedConfig) -> bool:
    return isinstance(module, nn.Linear) and module.out_features == config.vocab_size


def _initialize_mixer(mixer: Mamba2Mixer, config: PalimpsaMamba2Config) -> None:
    init.copy_(mixer.A_log, torch.empty_like(mixer.A_log).uniform_(1.0, 16.0).log())
    init.ones_(mixer.D)
    start_steps(mixer.dt_bias, config, init)
    init.kaiming_uniform_(mixer.conv1d.weight, a=math.sqrt(5))
    init.kaiming_uniform_(mixer.in_proj.weight, a=math.sqrt(5))
    bound = (1.0 / (mixer.out_proj.weight.shape[1] * _branches(config))) ** 0.5
    init.uniform_(mixer.out_proj.weight, -bound, bound)
    for bias in (mixer.conv1d.bias, mixer.in_proj.bias, mixer.out_proj.bias):
        if bias is not None:
            init.zeros_(bias)


def _initialize_projection(projection: Projection, config: PalimpsaMamba2Config) -> None:
    bound = (1.0 / (projection.in_features * (_branches(config) if projection.closes else 1))) ** 0.5
    init.uniform_(projection.weight, -bound, bound)
    if projection.bias is not None:
        init.zeros_(projection.bias)


def _branches(config: PalimpsaMamba2Config) -> int:
    """Residual branches of the model: the scale of each is 1 / sqrt(branches) at the start, as in GPT-2."""
    if not config.rescale_prenorm_residual:
        return 1
    return config.num_hidden_layers * (2 if config.d_intermediate else 1)
