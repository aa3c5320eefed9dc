"""What goes into the operator's backends and comes out of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ScanState(NamedTuple):
    """The recurrent states: `M` [B, H, P, N], importance times memory, and `J` [B, H, g, N], importance minus prior."""

    M: Tensor
    J: Tensor


class ScanProblem(NamedTuple):
    """What a backend may have to refuse of a scan or a step."""

    dtype: torch.dtype
    head_dim: int
    state_size: int
    beta_groups: int
    variance: bool = False


class ScanInputs(NamedTuple):
    """What a backend is given: the arguments of `scan.metaplastic_scan`, checked.

    For one step, those of `scan.metaplastic_step`: no tensor has the dimension T, and `initial_state` is written to.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor
    prior: Tensor
    initial_state: ScanState | None = None
    cu_seqlens: Tensor | None = None
    chunk_size: int | None = None
    variance: bool = False

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """q, k, v, beta, log_decay, prior, M and J of the initial state: what autograd functions take."""
        return (*self[:6], *(self.initial_state or (None, None)))

    @property
    def problem(self) -> ScanProblem:
        v, k, beta = self.v, self.k, self.beta
        dtype = torch.float64 if torch.float64 in (k.dtype, v.dtype, beta.dtype) else v.dtype
        return ScanProblem(dtype, v.shape[-1], k.shape[-1], beta.shape[-1], self.variance)


class ScanOutput(NamedTuple):
    """A scan's `output` [B, T, H, P], its final `state`, and `variance` [B, T, H, g] when it was asked for."""

    output: Tensor
    state: ScanState
    variance: Tensor | None = None
