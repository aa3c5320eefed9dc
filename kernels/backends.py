"""What all operators share: finding a kernel's module, requiring kernels, a compiler's way around them."""

import functools
import importlib
import os
import platform

import torch

_required = os.environ.get("PALIMPSA_REQUIRE_KERNELS", "") not in ("", "0")


def set_require_kernels(required: bool) -> None:
    """With True, "auto" raises `KernelUnavailableError` where it would fall back to plain torch."""
    global _required
    _required = bool(required)


def require_kernels() -> bool:
    """Whether falling back to plain torch is an error (see `set_require_kernels`; env PALIMPSA_REQUIRE_KERNELS=1)."""
    return _required


def kernel_module(name: str):
    """Import a module of kernels by its dotted name, from the package or from the flat folder of a Hub bundle."""
    home = __name__.removesuffix("backends")
    return importlib.import_module(home + (name if home.endswith(".") else name.replace(".", "_")))


def eager(function):
    """Decorator: torch.compile breaks its graph here instead of unrolling the loops, tables and checks inside."""
    disabled = []

    @functools.wraps(function)
    def call(*args, **kwargs):
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if not disabled:  # imports torch._dynamo, so not before something is being compiled
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call


def describe_device(device: torch.device) -> str:
    """One line about the device that kernels run on."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{device}: {torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    threads = torch.get_num_threads()
    return f"{device}: {platform.machine()}, {threads} thread{'s' * (threads != 1)}"
