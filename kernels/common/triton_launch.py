"""Where and how Triton kernels start."""

import contextlib
import os

import torch
import triton
from torch import Tensor


def unavailable(device: torch.device) -> str | None:
    """Runs on GPUs, and on a CPU under Triton's interpreter (TRITON_INTERPRET=1, slow, for tests)."""
    if device.type in ("cuda", "xpu") or interpreted():
        return None
    return f"it needs a GPU that Triton runs on, not {device.type}"


def interpreted() -> bool:
    """Whether Triton kernels run in its CPU interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET", "") == "1"


def uses_assembly(device: torch.device) -> bool:
    """Whether NVIDIA's inline assembly may be used on this device."""
    return device.type == "cuda" and torch.version.hip is None and not interpreted()


def on_device_of(x: Tensor):
    """Kernels start on the tensor's device, whatever the current one is."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def power_of_two(n: int, least: int = 16) -> int:
    """The size a tensor dimension is padded to inside a kernel."""
    return max(least, triton.next_power_of_2(n))
