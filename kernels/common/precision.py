"""The precision that operators compute in."""

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """fp32, or fp64 when any of the tensors is: the type for exponentials, step sizes, decays and states."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32
