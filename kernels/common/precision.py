"""The precision that operators compute in, and the names of dtypes."""

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def dtype_name(dtype: torch.dtype) -> str:
    """As in config.json: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """fp32, or fp64 when any of the tensors is: the type for exponentials, step sizes, decays and states."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32
