"""Problems for the tests of the operator: every kind of decay, small sizes, one seed each."""

import sys
from types import SimpleNamespace

import pytest
import torch
from palimpsa_surgery.kernels import backends

NAMES = ("q", "k", "v", "beta", "log_decay", "prior", "M0", "J0")


def _problem(T, *, B=1, H=4, P=8, N=6, G=2, g=8, rows=None, decays=(-8.0, 4.0), dtype=torch.float64, seed=0):
    """Inputs of a scan; decays are spread evenly over powers of ten of nats per token."""
    r = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=r, dtype=torch.float64)

    def rand(*shape):
        return torch.rand(*shape, generator=r, dtype=torch.float64)

    rows = rows or B
    tensors = {
        "q": randn(B, T, G, N),
        "k": randn(B, T, G, N),
        "v": randn(B, T, H, P),
        "beta": rand(B, T, H, g),
        "log_decay": -(10 ** (decays[0] + (decays[1] - decays[0]) * rand(B, T, H))),
        "prior": 0.5 + rand(H),
        "M0": randn(rows, H, P, N),
        "J0": rand(rows, H, g, N),
    }
    return SimpleNamespace(**{name: x.to(dtype) for name, x in tensors.items()})


@pytest.fixture
def problem():
    """A factory of inputs: problem(T, B=, H=, P=, N=, G=, g=, rows=, decays=, dtype=, seed=)."""
    return _problem


def _cast(p, dtype):
    return SimpleNamespace(**{name: getattr(p, name).to(dtype) for name in NAMES})


@pytest.fixture
def cast():
    """cast(problem, dtype)."""
    return _cast


def _relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()


@pytest.fixture
def relative():
    """Relative L2 distance of a from b."""
    return _relative


def _results(p, backend, *, variance=True, cu_seqlens=None, chunk_size=None):
    """Everything a scan gives: outputs by name, and the gradient of every input for fixed random output gradients."""
    from palimpsa_surgery.kernels.metaplastic.scan import metaplastic_scan

    x = {name: getattr(p, name).clone().requires_grad_() for name in NAMES}
    out = metaplastic_scan(
        *(x[name] for name in NAMES[:6]),
        initial_state=(x["M0"], x["J0"]),
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        backend=backend,
        variance=variance,
    )
    named = {"output": out.output, "M": out.state.M, "J": out.state.J}
    if variance:
        named["variance"] = out.variance
    r = torch.Generator().manual_seed(99)
    back = [torch.randn(y.shape, generator=r, dtype=torch.float64).to(y) for y in named.values()]
    grads = torch.autograd.grad(list(named.values()), list(x.values()), back)
    return {name: y.detach() for name, y in named.items()} | {
        f"d {name}": d for name, d in zip(NAMES, grads, strict=True)
    }


@pytest.fixture
def results():
    """results(problem, backend, variance=, cu_seqlens=, chunk_size=) -> outputs and gradients by name."""
    return _results


@pytest.fixture
def imported(monkeypatch):
    """A dict of modules, or errors, that importing these backends' modules gives instead of what is there."""
    found, real = {}, backends._import
    monkeypatch.setattr(backends, "_import", lambda name: found.get(name) or real(name))
    return found


@pytest.fixture
def import_anew():
    """import_anew(name): what importing a backend's module gives now, whatever it gave before and will give later."""
    import_once, names = backends._import.__wrapped__, []

    def forget(name):
        sys.modules.pop(f"palimpsa_surgery.kernels.{name}", None)

    def load(name):
        names.append(name)
        forget(name)
        return import_once(name)

    yield load
    for name in names:
        forget(name)
