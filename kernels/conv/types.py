"""What a backend of the convolution may have to refuse."""

from typing import NamedTuple

import torch


class ConvProblem(NamedTuple):
    """The dtype of x, its channels and the width of the window; the defaults suit every backend."""

    dtype: torch.dtype
    channels: int = 8
    width: int = 4
