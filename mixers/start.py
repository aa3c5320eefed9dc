"""Initial values that models of every kind share.

The start of the paper: s ~ U(0.1, 1), W_up ~ U(-R^-0.5, R^-0.5), W_down ~ N(0, 0.02), I_prior = 1.

Both who trains from scratch and who converts take it from here. `init` has the functions of `torch.nn.init`: that
module, or one of transformers that leaves alone what a checkpoint filled. `options` may hold a generator.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .metaplasticity import Metaplasticity


def start_projections(down: Tensor, up: Tensor, init: Any = nn.init, **options: Any) -> None:
    """Fills W_down [R, D] and W_up [H g, R]."""
    init.normal_(down, 0.0, 0.02, **options)
    bound = 1 / math.sqrt(up.shape[1])
    init.uniform_(up, -bound, bound, **options)


def start_scale(scale: Tensor, init: Any = nn.init, **options: Any) -> None:
    """Fills s [H]."""
    init.uniform_(scale, 0.1, 1.0, **options)


def start_gate(gate: Metaplasticity, init: Any = nn.init) -> None:
    """Fills every parameter of an importance gate."""
    start_scale(gate.beta_scale, init)
    init.zeros_(gate.log_prior)
    start_projections(gate.beta_down.weight, gate.beta_up.weight, init)


def start_steps(dt_bias: Tensor, config: Any, init: Any) -> None:
    """mamba_ssm's: step sizes are drawn log-uniformly between `time_step_min` and `time_step_max`; softplus undone."""
    low, high = math.log(config.time_step_min), math.log(config.time_step_max)
    step = torch.empty_like(dt_bias).uniform_(low, high).exp().clamp(min=config.time_step_floor)
    init.copy_(dt_bias, step + torch.log(-torch.expm1(-step)))
