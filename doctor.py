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
from .kernels.backends import Operator, describe_device
from .kernels.common.precision import dtype_name
from .kernels.conv.causal_conv import CAUSAL_CONV, causal_conv
from .kernels.metaplastic.scan import METAPLASTIC_SCAN, metaplastic_scan, metaplastic_step
from .kernels.metaplastic.types import ScanProblem
from .kernels.ssd.mamba2_scan import MAMBA2_SCAN, mamba2_scan, mamba2_step
from .kernels.ssd.types import SsdProblem
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
    # The sizes of the published models: heads of 64, state 128, one beta per channel.
    backends = (
        *(_chosen("swapped layers", METAPLASTIC_SCAN, device, ScanProblem(d, 64, 128, 64)) for d in _dtypes(device)),
        *(_chosen("plain layers", MAMBA2_SCAN, device, SsdProblem(d)) for d in _dtypes(device)),
        _chosen("all layers", CAUSAL_CONV, device),
    )
    found = Diagnosis(versions(), describe_device(device), backends, ())
    watch(found)
    for check in run_checks(device):
        found = replace(found, checks=(*found.checks, check))
        watch(found)
    return found


def _dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16, torch.float32) if device.type == "cuda" else (torch.float32,)


def versions() -> dict[str, str | None]:
    """Package -> installed version, None when it is absent; `python` first."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _chosen(layers: str, operator: Operator, device: torch.device, problem: Any = None) -> LayerBackend:
    part = f"{layers}: {operator.name.removeprefix('the ')}" + (f", {dtype_name(problem.dtype)}" if problem else "")
    unavailable = operator.unavailable(device, problem)
    try:
        chosen = operator.resolve("auto", device, problem)
    except KernelUnavailableError as error:
        return LayerBackend(part, None, str(error), unavailable)
    passed = [f"{name}: {reason}" for name, reason in unavailable.items() if reason is not None and name != chosen]
    why = f"the fastest that runs here ({'; '.join(passed)})" if passed else "the fastest that runs here"
    return LayerBackend(part, chosen, why, unavailable)


def run_checks(device: torch.device) -> Iterator[Check]:
    """Compares every backend that can run here with fp64: small, odd sizes, seconds in all."""
    for dtype in _dtypes(device):
        problem = _Problem(device, dtype)
        for operator, check in (
            (METAPLASTIC_SCAN, problem.check_scan),
            (MAMBA2_SCAN, problem.check_plain),
            (CAUSAL_CONV, problem.check_convolution),
        ):
            for name, reason in operator.unavailable(device).items():
                if reason is None and name != "reference":
                    yield from check(name)
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
            return metaplastic_scan(*tensors, backend=backend).output

        def decode(*tensors: Tensor, backend: str) -> Tensor:
            *rest, prior = tensors
            carried = [prior.new_zeros(*self.x[:, 0].shape, self.q.shape[3]) for _ in "MJ"]
            outputs = [
                metaplastic_step(*(x[:, t].contiguous() for x in rest), prior, carried, backend=backend)
                for t in range(5)
            ]
            return torch.stack(outputs, 1)

        yield from self._compare("metaplastic scan", scan, inputs, name, kept)
        yield self._compare_decode("metaplastic decode", decode, inputs, name, kept, "reference")

    def check_plain(self, name: str) -> Iterator[Check]:
        def scan(x: Tensor, step: Tensor, A: Tensor, k: Tensor, q: Tensor, backend: str) -> Tensor:
            if backend != "reference":
                return mamba2_scan(x, step, A, k, q, backend=backend)[0]
            nothing, one = x.new_zeros(*x.shape[:3], 1), x.new_ones(x.shape[2])  # with these the operator is Mamba2's
            v = x * step.unsqueeze(-1)
            return metaplastic_scan(q, k, v, nothing, step * A, one, backend="reference").output

        def decode(x: Tensor, step: Tensor, A: Tensor, k: Tensor, q: Tensor, backend: str) -> Tensor:
            state = A.new_zeros(*x.shape[:1], *x.shape[2:], k.shape[-1])
            outputs = [
                mamba2_step(*(y[:, t].contiguous() for y in (x, step)), A, k[:, t], q[:, t], state, backend=backend)
                for t in range(5)
            ]
            return torch.stack(outputs, 1)

        inputs, kept = (self.x, self.step, self.A, self.k, self.q), (1, 2)
        yield from self._compare("Mamba2 scan", scan, inputs, name, kept)
        yield self._compare_decode("Mamba2 decode", decode, inputs, name, kept, "torch")

    def check_convolution(self, name: str) -> Iterator[Check]:
        def convolve(x: Tensor, weight: Tensor, bias: Tensor, backend: str) -> Tensor:
            if backend != "reference":
                return causal_conv(x, weight, bias, backend=backend)[0]
            padded = functional.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
            y = functional.conv1d(padded, weight.unsqueeze(1), bias, groups=weight.shape[0])
            return functional.silu(y).transpose(1, 2)

        yield from self._compare("convolution", convolve, (self.channels, self.weight, self.bias), name)

    def _cast(self, inputs: tuple[Tensor, ...], kept: tuple[int, ...]) -> list[Tensor]:
        return [
            x.to(self.device, torch.float32 if index in kept else self.dtype, copy=True)
            for index, x in enumerate(inputs)
        ]

    def _label(self, what: str, name: str) -> str:
        return f"{what}, {name}, {dtype_name(self.dtype)}"

    def _compare_decode(self, what: str, run: Callable[..., Tensor], inputs, name: str, kept, oracle: str) -> Check:
        """Output of `run` on backend `name`, against backend `oracle` in fp64."""
        return _measured(
            self._label(what, name),
            FORWARD_TOLERANCE[self.dtype],
            lambda: ([run(*self._cast(inputs, kept), backend=name)], [run(*inputs, backend=oracle)]),
        )

    def _compare(self, what: str, run: Callable[..., Tensor], inputs, name: str, kept=()) -> Iterator[Check]:
        """Output and all gradients of `run` on backend `name`, against its reference in fp64."""

        @functools.cache
        def results(backend: str) -> tuple[list[Tensor], list[Tensor]]:
            tensors = list(inputs) if backend == "reference" else self._cast(inputs, kept)
            leaves = [x.detach().clone().requires_grad_() for x in tensors]
            output = run(*leaves, backend=backend)
            weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
            return [output], list(torch.autograd.grad((output * weights.to(output)).sum(), leaves))

        held_to = torch.bfloat16 if name in _TF32 else self.dtype
        for index, part in enumerate(("", ", gradients")):
            tolerance = (GRADIENT_TOLERANCE if index else FORWARD_TOLERANCE)[held_to]
            both = lambda index=index: (results(name)[index], results("reference")[index])  # noqa: E731
            yield _measured(self._label(what, name) + part, tolerance, both)


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
        yield _measured(f"model {what}, {dtype_name(dtype)}", tolerance, lambda run=run: (run(model()), run(exact)))


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
