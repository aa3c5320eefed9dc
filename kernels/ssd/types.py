"""What a backend of the plain Mamba2 scan may have to refuse."""

from typing import NamedTuple

import torch


class SsdProblem(NamedTuple):
    """One problem.

    Attributes:
        dtype: of x; fp64 where any input has it.
        state_size: N; 0 where it is not known.
        packed_states: packed documents with states in or out.
        one_token: a step instead of the scan.
        exact: fp32 is to be multiplied as fp32, unless the user allows TF32 for matrix products at large.
    """

    dtype: torch.dtype
    state_size: int = 0
    packed_states: bool = False
    one_token: bool = False
    exact: bool = True
