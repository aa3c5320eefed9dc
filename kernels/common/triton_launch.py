"""Where and how Triton kernels start."""

import contextlib

import torch
import triton
from torch import Tensor

from ..backends import interpreted

# Sums over tokens or keys end in every lane, and all lanes write what they hold to one place. With a product fused into
# the first of their additions, lanes round differently, and nothing says which of them stays.
UNFUSED_SUMS = {"num_warps": 4, "enable_fp_fusion": False}


def uses_assembly(device: torch.device) -> bool:
    """Whether NVIDIA's inline assembly may be used on this device."""
    return device.type == "cuda" and torch.version.hip is None and not interpreted()


def on_device_of(x: Tensor):
    """Kernels start on the tensor's device, whatever the current one is."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def power_of_two(n: int, least: int = 16) -> int:
    """The size a tensor dimension is padded to inside a kernel."""
    return max(least, triton.next_power_of_2(n))
