"""What is installed here, which kernel each kind of layer will run on and why, and whether its numbers are right."""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import math
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from .base.errors import KernelUnavailableError
from .kernels.backends import describe_device
from .kernels.conv import causal_conv as conv
from .kernels.metaplastic import scan as api
from .kernels.ssd import mamba2_scan as ssd
from .modeling.palimpsa_mamba2.configuration_palimpsa_mamba2 import PalimpsaMamba2Config
from .modeling.palimpsa_mamba2.modeling_palimpsa_mamba2 import PalimpsaMamba2ForCausalLM

PACKAGES = (
    "palimpsa-surgery",
    "torch",
    "triton",
    "numba",
    "transformers",
    "huggingface_hub",
    "safetensors",
    "accelerate",
    "datasets",
    "peft",
    "mamba-ssm",
    "causal-conv1d",
    "liger-kernel",
    "lm-eval",
)
FORWARD_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-3}
GRADIENT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-2}

MODEL_TOLERANCE = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (5e-2, 1e-1)}
"""Of logits and of all gradients together; in bf16 every layer's rounding adds to that of the layers before it."""

_TF32 = ("mamba_ssm",)
"""Multiplies fp32 in TF32, so that it is held to the limits of bf16."""


@dataclass(frozen=True)
class LayerBackend:
    """Which backend one part of one kind of layer will use.

    Attributes:
        part: for people, such as "swapped layers: metaplastic scan".
        chosen: the backend, or None when kernels are required and none can run.
        why: reason of the choice, or why there is none.
        unavailable: backend -> why it cannot run here, None when it can.
    """

    part: str
    chosen: str | None
    why: str
    unavailable: dict[str, str | None]


@dataclass(frozen=True)
class Check:
    """One comparison with the reference in fp64, the worst of its tensors.

    Attributes:
        name: what was compared.
        error: relative root-mean-square error; None when it could not run.
        tolerance: what it may be.
        ok: whether it is within the tolerance, or is not used for this problem at all.
        note: why it did not run.
    """

    name: str
    error: float | None
    tolerance: float
    ok: bool
    note: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """What `palimpsa doctor` reports; not `ok` when a kernel is wrong, or missing though required."""

    versions: dict[str, str | None]
    device: str
    backends: tuple[LayerBackend, ...]
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks) and all(part.chosen for part in self.backends)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def diagnose(device: str | torch.device = "cpu", watch: Callable[[Diagnosis], None] = lambda found: None) -> Diagnosis:
    """Looks at this machine and runs every kernel that works on `device`, and a tiny model, against the reference.

    Args:
        device: where.
        watch: is given what is known so far, before the first check and after each one. On a fresh GPU kernels are
            compiled for a minute or two.
    """
    device = torch.device(device)
    backends = (
        *(_scan_backends(device, dtype) for dtype in _dtypes(device)),
        *(_plain_backends(device, dtype) for dtype in _dtypes(device)),
        _chosen(
            "all layers: convolution", conv.conv_backends(device), lambda: conv.resolve_conv_backend("auto", device)
        ),
    )
    found = Diagnosis(versions(), describe_device(device), backends, ())
    watch(found)
    for check in run_checks(device):
        found = replace(found, checks=(*found.checks, check))
        watch(found)
    return found


def _dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16, torch.float32) if device.type == "cuda" else (torch.float32,)


def _scan_backends(device: torch.device, dtype: torch.dtype) -> LayerBackend:
    """The choice for the sizes of the published models: heads of 64, state 128, one beta a channel."""
    shape = api.ScanShape(1, 2048, 1, 80, 64, 128, 64, dtype)
    unavailable = {name: api.why_unavailable(name, device, shape) for name in api.backends(device)}
    part = f"swapped layers: metaplastic scan, {_name(dtype)}"
    return _chosen(part, unavailable, lambda: api.resolve_backend("auto", device, shape))


def _plain_backends(device: torch.device, dtype: torch.dtype) -> LayerBackend:
    part = f"plain layers: Mamba2 scan, {_name(dtype)}"
    return _chosen(part, _ssd_backends(device), lambda: ssd.resolve_ssd_backend("auto", device, dtype))


def versions() -> dict[str, str | None]:
    """Package -> installed version, None when it is absent; `python` first."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _chosen(part: str, unavailable: dict[str, str | None], resolve: Callable[[], str]) -> LayerBackend:
    try:
        chosen = resolve()
    except KernelUnavailableError as error:
        return LayerBackend(part, None, str(error), unavailable)
    passed = [f"{name}: {reason}" for name, reason in unavailable.items() if reason is not None and name != chosen]
    why = f"the fastest that runs here ({'; '.join(passed)})" if passed else "the fastest that runs here"
    return LayerBackend(part, chosen, why, unavailable)


def _ssd_backends(device: torch.device) -> dict[str, str | None]:
    on_gpu = device.type == "cuda"
    return {"mamba_ssm": ssd.mamba_ssm_unavailable() if on_gpu else f"it needs CUDA, not {device}", "torch": None}


def run_checks(device: torch.device) -> Iterator[Check]:
    """Compares every backend that can run here with fp64: small, odd sizes, seconds in all."""
    for dtype in _dtypes(device):
        problem = _Problem(device, dtype)
        for name, reason in api.backends(device).items():
            if reason is None and name != "reference":
                yield from problem.check_scan(name)
        for name, reason in _ssd_backends(device).items():
            if reason is None:
                yield from problem.check_plain(name)
        for name, reason in conv.conv_backends(device).items():
            if reason is None:
                yield from problem.check_convolution(name)
        yield from check_model(device, dtype)


class _Problem:
    """One small problem (length 77, two groups, four heads) and its answers in fp64 on the CPU."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        draw = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        def rounded(x: Tensor) -> Tensor:
            return x.to(dtype).double()

        batch, length, groups, heads, width, state = 2, 77, 2, 4, 64, 64
        self.q, self.k = rounded(normal(batch, length, groups, state)), rounded(normal(batch, length, groups, state))
        self.x = rounded(normal(batch, length, heads, width))
        self.step = normal(batch, length, heads).exp().clamp(max=5).float().double() * 0.1
        self.A = -torch.tensor([0.01, 0.1, 1.0, 8.0], dtype=torch.float64)
        self.beta = rounded(torch.rand(batch, length, heads, width, generator=draw, dtype=torch.float64) * 0.3)
        self.prior = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
        self.weight, self.bias = rounded(normal(96, 4)), rounded(normal(96))
        self.channels = rounded(normal(batch, length, 96))

    def check_scan(self, name: str) -> Iterator[Check]:
        v = (self.x * self.step.unsqueeze(-1)).to(self.dtype).double()
        inputs = (self.q, self.k, v, self.beta, self.step * self.A, self.prior)
        kept = (4, 5)  # the decay and the prior stay in fp32 whatever the dtype

        def scan(*tensors: Tensor, backend: str) -> Tensor:
            return api.metaplastic_scan(*tensors, backend=backend).output

        label = f"metaplastic scan, {name}, {_name(self.dtype)}"
        yield from self._compare(label, scan, inputs, name, kept)
        yield self._check_step(name, inputs)

    def _check_step(self, name: str, inputs: tuple[Tensor, ...]) -> Check:
        def decode(tensors: list[Tensor], backend: str) -> Tensor:
            *rest, prior = tensors
            heads, width, state = self.x.shape[2], self.x.shape[3], self.q.shape[3]
            dtype = torch.float64 if prior.dtype == torch.float64 else torch.float32
            carried = [prior.new_zeros(2, heads, width, state, dtype=dtype) for _ in "MJ"]
            outputs = [
                api.metaplastic_step(*(x[:, t].contiguous() for x in rest), prior, carried, backend=backend)
                for t in range(5)
            ]
            return torch.stack(outputs, 1)

        label = f"metaplastic decode, {name}, {_name(self.dtype)}"
        return _measured(
            label,
            FORWARD_TOLERANCE[self.dtype],
            lambda: ([decode(self._cast(inputs, (4, 5)), name)], [decode(list(inputs), "reference")]),
        )

    def check_plain(self, name: str) -> Iterator[Check]:
        def scan(x: Tensor, step: Tensor, A: Tensor, k: Tensor, q: Tensor, backend: str) -> Tensor:
            if backend != "reference":
                return ssd.mamba2_scan(x, step, A, k, q, backend=backend)[0]
            nothing, one = x.new_zeros(*x.shape[:3], 1), x.new_ones(x.shape[2])  # with these the operator is Mamba2's
            v = x * step.unsqueeze(-1)
            return api.metaplastic_scan(q, k, v, nothing, step * A, one, backend="reference").output

        inputs = (self.x, self.step, self.A, self.k, self.q)
        yield from self._compare(f"Mamba2 scan, {name}, {_name(self.dtype)}", scan, inputs, name, kept=(1, 2))
        yield self._check_plain_step(name, inputs)

    def _check_plain_step(self, name: str, inputs: tuple[Tensor, ...]) -> Check:
        def decode(tensors: list[Tensor], backend: str) -> Tensor:
            x, step, A, k, q = tensors
            state = A.new_zeros(*x.shape[:1], *x.shape[2:], k.shape[-1])
            outputs = [
                ssd.mamba2_step(*(y[:, t].contiguous() for y in (x, step)), A, k[:, t], q[:, t], state, backend=backend)
                for t in range(5)
            ]
            return torch.stack(outputs, 1)

        return _measured(
            f"Mamba2 decode, {name}, {_name(self.dtype)}",
            FORWARD_TOLERANCE[self.dtype],
            lambda: ([decode(self._cast(inputs, (1, 2)), name)], [decode(list(inputs), "torch")]),
        )

    def check_convolution(self, name: str) -> Iterator[Check]:
        def convolve(x: Tensor, weight: Tensor, bias: Tensor, backend: str) -> Tensor:
            if backend != "reference":
                return conv.causal_conv(x, weight, bias, backend=backend)[0]
            padded = functional.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
            y = functional.conv1d(padded, weight.unsqueeze(1), bias, groups=weight.shape[0])
            return functional.silu(y).transpose(1, 2)

        inputs = (self.channels, self.weight, self.bias)
        yield from self._compare(f"convolution, {name}, {_name(self.dtype)}", convolve, inputs, name)

    def _cast(self, inputs: tuple[Tensor, ...], kept: tuple[int, ...]) -> list[Tensor]:
        return [
            x.to(self.device, torch.float32 if index in kept else self.dtype, copy=True)
            for index, x in enumerate(inputs)
        ]

    def _compare(
        self,
        label: str,
        run: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
        name: str,
        kept: tuple[int, ...] = (),
    ) -> Iterator[Check]:
        """Output and all gradients of `run` on backend `name`, against its reference in fp64."""

        @functools.cache
        def results(backend: str) -> tuple[list[Tensor], list[Tensor]]:
            tensors = list(inputs) if backend == "reference" else self._cast(inputs, kept)
            leaves = [x.detach().clone().requires_grad_() for x in tensors]
            output = run(*leaves, backend=backend)
            weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
            return [output], list(torch.autograd.grad((output * weights.to(output)).sum(), leaves))

        held_to = torch.bfloat16 if name in _TF32 else self.dtype
        for index, what in enumerate(("", ", gradients")):
            tolerance = (GRADIENT_TOLERANCE if index else FORWARD_TOLERANCE)[held_to]
            yield _measured(
                label + what, tolerance, lambda index=index: (results(name)[index], results("reference")[index])
            )


def check_model(device: torch.device, dtype: torch.dtype) -> Iterator[Check]:
    """Prefill, decode and a training step of a tiny model, one layer of three swapped, by the kernels it would use."""
    config = PalimpsaMamba2Config(
        vocab_size=64, hidden_size=64, num_hidden_layers=3, num_heads=4, head_dim=32, state_size=64, palimpsa_layers=[1]
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        exact = PalimpsaMamba2ForCausalLM(config).double().eval()
        ids = torch.randint(3, 64, (2, 70))

    @functools.cache
    def model() -> PalimpsaMamba2ForCausalLM:
        return copy.deepcopy(exact).to(device, dtype)

    def logits(model: PalimpsaMamba2ForCausalLM, *pieces: int) -> list[Tensor]:
        cache, found = DynamicCache(config=config), []
        with torch.no_grad():
            for piece in ids.to(model.device).split(pieces, dim=1):
                found.append(model(piece, cache=cache).logits)
        return [torch.cat(found, 1)]

    def gradients(model: PalimpsaMamba2ForCausalLM) -> list[Tensor]:
        model.train()(ids.to(model.device), labels=ids.to(model.device)).loss.backward()
        found = torch.cat([p.grad.double().cpu().flatten() for p in model.parameters()])
        model.zero_grad()
        model.eval()
        return [found]

    forward, backward = MODEL_TOLERANCE[dtype]
    for what, tolerance, run in (
        ("prefill", forward, lambda model: logits(model, 70)),
        ("decode", forward, lambda model: logits(model, 66, 1, 1, 1, 1)),
        ("training step", backward, gradients),
    ):
        yield _measured(f"model {what}, {_name(dtype)}", tolerance, lambda run=run: (run(model()), run(exact)))


def _measured(label: str, tolerance: float, run: Callable[[], tuple[list[Tensor], list[Tensor]]]) -> Check:
    """The worst error of the tensors that `run` gives, against those it expects."""
    try:
        found, expected = run()
    except KernelUnavailableError as error:  # these sizes or this dtype are not its own; "auto" passes it by
        return Check(label, None, tolerance, True, f"not used: {error}")
    except Exception as error:  # a kernel that cannot be compiled is a finding, not the end of the report
        note = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return Check(label, None, tolerance, False, note)
    error = max(_relative_error(one, other) for one, other in zip(found, expected, strict=True))
    return Check(label, error if math.isfinite(error) else None, tolerance, error <= tolerance)


def _relative_error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    error = float((found - expected).norm() / expected.norm())
    return math.inf if math.isnan(error) else error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
