"""What all operators share: the registry of their backends, requiring kernels, a compiler's way around them."""

from __future__ import annotations

import functools
import importlib
import os
import platform
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..base.errors import KernelUnavailableError, UsageError

_required = os.environ.get("PALIMPSA_REQUIRE_KERNELS", "") not in ("", "0")


def set_require_kernels(required: bool) -> None:
    """With True, "auto" raises `KernelUnavailableError` where it would fall back to plain torch."""
    global _required
    _required = bool(required)


def require_kernels() -> bool:
    """Whether falling back to plain torch is an error (see `set_require_kernels`; env PALIMPSA_REQUIRE_KERNELS=1)."""
    return _required


def interpreted() -> bool:
    """Whether Triton kernels run in its CPU interpreter in this process (slow, for tests)."""
    return os.environ.get("TRITON_INTERPRET", "") == "1"


TRITON_DEVICES = ("cuda", "xpu", "cpu") if interpreted() else ("cuda", "xpu")


def kernel_module(name: str) -> ModuleType:
    """Import a module of kernels by its dotted name, from the package or from the flat folder of a Hub bundle."""
    home = __name__.removesuffix("backends")
    return importlib.import_module(home + (name if home.endswith(".") else name.replace(".", "_")))


@functools.cache
def _import(name: str) -> ModuleType | Exception:
    """The module, or the error that its import raised (a broken install raises more than ImportError); tried once."""
    try:
        return kernel_module(name)
    except Exception as error:
        return error


class Backend(NamedTuple):
    """One way to run an operator: a module with the functions that the operator's file lists.

    The module is imported when it is first needed. It may also offer `unavailable(device)`, why it cannot run there,
    and `unsupported(problem)`, why it cannot run a problem of the operator; each gives None when it can.

    Attributes:
        name: what users write.
        module: dotted, below `kernels`.
        devices: the types of device it runs on; every type when empty.
        kernel: False for plain torch, which does not do where kernels are required.
    """

    name: str
    module: str
    devices: tuple[str, ...] = ()
    kernel: bool = True


class Operator:
    """The backends of one operator, the fastest first: which one runs, and why another does not.

    `device` is a torch.device or its name. `problem` is the operator's own description of sizes and dtypes; None when
    they are not known, and are then taken to suit.
    """

    def __init__(self, name: str, *backends: Backend) -> None:
        self.name = name
        self.backends = {backend.name: backend for backend in backends}

    def module(self, name: str) -> ModuleType:
        """The module of one backend.

        Raises:
            UsageError: unknown name.
            KernelUnavailableError: it cannot be imported here.
        """
        found = _import(self._backend(name).module)
        if isinstance(found, Exception):
            raise KernelUnavailableError(f"{self.name} cannot run by {name!r}: {_failed(found)}; use backend='auto'.")
        return found

    def reason(self, name: str, device: torch.device | str, problem: Any = None) -> str | None:
        """Why backend `name` cannot run, None when it can.

        Raises:
            UsageError: unknown name.
        """
        backend, device = self._backend(name), torch.device(device)
        if backend.devices and device.type not in backend.devices:
            return f"it runs on {' and '.join(backend.devices)}, not on {device.type}"
        module = _import(backend.module)
        if isinstance(module, Exception):
            return _failed(module)
        reason = module.unavailable(device) if hasattr(module, "unavailable") else None
        if reason is None and problem is not None and hasattr(module, "unsupported"):
            reason = module.unsupported(problem)
        return reason

    def unavailable(self, device: torch.device | str, problem: Any = None) -> dict[str, str | None]:
        """Every backend -> why it cannot run, None when it can."""
        return {name: self.reason(name, device, problem) for name in self.backends}

    def resolve(self, name: str, device: torch.device | str, problem: Any = None) -> str:
        """The backend that will run: the named one, or with "auto" the first that can.

        Raises:
            UsageError: unknown name.
            KernelUnavailableError: the named backend cannot run, or kernels are required and none can.
        """
        reasons = {}
        for candidate in self.backends if name == "auto" else (name,):
            if name != "auto" or self.backends[candidate].kernel or not require_kernels():
                reasons[candidate] = self.reason(candidate, device, problem)
                if reasons[candidate] is None:
                    return candidate
        if name != "auto":
            raise KernelUnavailableError(
                f"{self.name} cannot run on {device} by {name!r}: {reasons[name]}; use backend='auto'."
            )
        listed = "; ".join(f"{candidate}: {reason}" for candidate, reason in reasons.items())
        raise KernelUnavailableError(
            f"kernels are required but none can run {self.name} on {device} ({listed}); "
            "install what is missing or drop --require-kernels."
        )

    def choose(self, name: str, device: torch.device | str, problem: Any = None) -> ModuleType:
        """The module of the backend that will run; raises as `resolve`."""
        return self.module(self.resolve(name, device, problem))

    def _backend(self, name: str) -> Backend:
        if name not in self.backends:
            known = ", ".join(self.backends)
            raise UsageError(f"backend={name!r} is unknown for {self.name}; expected auto, {known}.")
        return self.backends[name]


def _failed(error: Exception) -> str:
    return f"it cannot be imported ({type(error).__name__}: {error})"


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
