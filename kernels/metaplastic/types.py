"""What goes into the operator's backends and comes out of them."""

from typing import NamedTuple

import torch
from torch import Tensor


class ScanState(NamedTuple):
    """The recurrent states: `M` [B, H, P, N], importance times memory, and `J` [B, H, g, N], importance minus prior."""

    M: Tensor
    J: Tensor


class ScanOutput(NamedTuple):
    """A scan's `output` [B, T, H, P], its final `state`, and `variance` [B, T, H, g] when it was asked for."""

    output: Tensor
    state: ScanState
    variance: Tensor | None = None


class ScanShape(NamedTuple):
    """The sizes of one problem, for backends that must refuse some of them."""

    batch: int
    length: int
    groups: int
    heads: int
    head_dim: int
    state_size: int
    beta_groups: int
    dtype: torch.dtype
    packed: bool = False
    variance: bool = False
