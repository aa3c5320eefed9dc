"""Initial values of a model trained from scratch: mamba_ssm's, and the paper's for the new parameters.

Only through `transformers.initialization`: those functions leave alone what a checkpoint filled, whereas transformers
calls this on a module as soon as one of its parameters is missing.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import initialization as init

from ...mixers.metaplasticity import Metaplasticity
from ...mixers.mixer import Mamba2Mixer
from ...mixers.start import start_gate
from .configuration_palimpsa_mamba2 import PalimpsaMamba2Config


@torch.no_grad()
def initialize(module: nn.Module, config: PalimpsaMamba2Config) -> None:
    """Fills the parameters that `module` itself is responsible for; transformers calls it on every module."""
    if isinstance(module, Mamba2Mixer):
        _initialize_mixer(module, config)
    elif isinstance(module, Metaplasticity):
        start_gate(module, init)
    elif isinstance(module, nn.Embedding) or _is_head(module, config):
        init.normal_(module.weight, mean=0.0, std=config.initializer_range)
    elif hasattr(module, "eps") and hasattr(module, "weight"):
        init.ones_(module.weight)


def _is_head(module: nn.Module, config: PalimpsaMamba2Config) -> bool:
    return isinstance(module, nn.Linear) and module.out_features == config.vocab_size


def _initialize_mixer(mixer: Mamba2Mixer, config: PalimpsaMamba2Config) -> None:
    init.copy_(mixer.A_log, torch.empty_like(mixer.A_log).uniform_(1.0, 16.0).log())
    init.ones_(mixer.D)
    low, high = math.log(config.time_step_min), math.log(config.time_step_max)
    step = torch.empty_like(mixer.dt_bias).uniform_(low, high).exp().clamp(min=config.time_step_floor)
    init.copy_(mixer.dt_bias, step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
    init.kaiming_uniform_(mixer.conv1d.weight, a=math.sqrt(5))
    init.kaiming_uniform_(mixer.in_proj.weight, a=math.sqrt(5))
    # One residual branch a layer: its scale is 1 / sqrt(layers) at the start, as in GPT-2.
    branches = config.num_hidden_layers if config.rescale_prenorm_residual else 1
    bound = (1.0 / (mixer.out_proj.weight.shape[1] * branches)) ** 0.5
    init.uniform_(mixer.out_proj.weight, -bound, bound)
    for bias in (mixer.conv1d.bias, mixer.in_proj.bias, mixer.out_proj.bias):
        if bias is not None:
            init.zeros_(bias)
