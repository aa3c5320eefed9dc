"""Initial values of a Palimpsa-D model trained from scratch: the authors' ranges, and the paper's for importance.

Only through `transformers.initialization`: those functions leave alone what a checkpoint filled.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import initialization as init

from ...mixers.palimpsa_d import PalimpsaDMixer
from ...mixers.start import start_steps
from ..palimpsa_mamba2.initial_values import initialize_common
from .configuration_palimpsa_d import PalimpsaDConfig

LEAST_RATE = 1e-4
"""A ~ U(0, 16) may be zero, whose logarithm is not finite."""


@torch.no_grad()
def initialize(module: nn.Module, config: PalimpsaDConfig) -> None:
    """Fills the parameters that `module` itself is responsible for; transformers calls it on every module."""
    if isinstance(module, PalimpsaDMixer):
        _initialize_mixer(module, config)
    else:
        initialize_common(module, config)


def _initialize_mixer(mixer: PalimpsaDMixer, config: PalimpsaDConfig) -> None:
    init.copy_(mixer.A_log, torch.empty_like(mixer.A_log).uniform_(0.0, 16.0).clamp(min=LEAST_RATE).log())
    init.ones_(mixer.D)
    start_steps(mixer.dt_bias, config, init)
    into = (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.g_proj, mixer.bs_proj, mixer.dt_proj)
    for module in (*into, mixer.q_conv1d, mixer.k_conv1d, mixer.v_conv1d):
        init.kaiming_uniform_(module.weight, a=math.sqrt(5))
    # One residual branch a layer: its scale is 1 / sqrt(layers) at the start, as in GPT-2.
    branches = config.num_hidden_layers if config.rescale_prenorm_residual else 1
    bound = (1.0 / (mixer.o_proj.weight.shape[1] * branches)) ** 0.5
    init.uniform_(mixer.o_proj.weight, -bound, bound)
