"""What goes into the operator's backends and comes out of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DeltaState(NamedTuple):
    """The recurrent states: `S` [B, H, P, N], the memory, and `J` [B, H, N], importance minus prior of each key."""

    S: Tensor
    J: Tensor


class DeltaProblem(NamedTuple):
    """What a backend may have to refuse of a scan or a step."""

    dtype: torch.dtype
    head_dim: int
    state_size: int
    decay_per_key: bool


class DeltaInputs(NamedTuple):
    """What a backend is given: the arguments of `scan.metaplastic_delta_scan`, checked.

    For one step, those of `scan.metaplastic_delta_step`: no tensor has the dimension T, and `initial_state` is
    written to.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    b: Tensor
    beta: Tensor
    log_decay: Tensor
    prior: Tensor
    initial_state: DeltaState | None = None
    cu_seqlens: Tensor | None = None

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """q, k, v, b, beta, log_decay, prior, S and J of the initial state."""
        return (*self[:7], *(self.initial_state or (None, None)))

    @property
    def problem(self) -> DeltaProblem:
        dtype = torch.float64 if torch.float64 in (x.dtype for x in self[:5]) else self.v.dtype
        return DeltaProblem(dtype, self.v.shape[-1], self.k.shape[-1], self.log_decay.dim() == self.v.dim())


class DeltaOutput(NamedTuple):
    """A scan's `output` [B, T, H, P] and its final `state`."""

    output: Tensor
    state: DeltaState
