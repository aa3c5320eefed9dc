"""Problems for the tests of the delta rule: unit keys, write gates up to 2, priors from 1, every kind of decay."""

from types import SimpleNamespace

import pytest
import torch
from palimpsa_surgery.kernels.metaplastic_delta.scan import metaplastic_delta_scan

NAMES = ("q", "k", "v", "b", "beta", "log_decay", "prior", "S0", "J0")


def _problem(T, *, B=1, H=4, P=3, N=5, G=2, rows=None, per_key=False, decays=(-8.0, 4.0), dtype=torch.float64, seed=0):
    """Inputs of a scan; decays are spread evenly over powers of ten of nats per token."""
    r = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=r, dtype=torch.float64)

    def rand(*shape):
        return torch.rand(*shape, generator=r, dtype=torch.float64)

    rows, k = rows or B, randn(B, T, G, N)
    tensors = {
        "q": randn(B, T, G, N),
        "k": k / k.norm(dim=-1, keepdim=True),
        "v": randn(B, T, H, P),
        "b": 2 * rand(B, T, H),
        "beta": 3 * rand(B, T, H),
        "log_decay": -(10 ** (decays[0] + (decays[1] - decays[0]) * rand(B, T, H, *([N] if per_key else [])))),
        "prior": 1 + rand(H),
        "S0": randn(rows, H, P, N),
        "J0": rand(rows, H, N),
    }
    return SimpleNamespace(**{name: x.to(dtype) for name, x in tensors.items()})


@pytest.fixture
def problem():
    """A factory of inputs: problem(T, B=, H=, P=, N=, G=, rows=, per_key=, decays=, dtype=, seed=)."""
    return _problem


@pytest.fixture
def cast():
    """cast(problem, dtype)."""
    return lambda p, dtype: SimpleNamespace(**{name: getattr(p, name).to(dtype) for name in NAMES})


def _results(p, backend, *, cu_seqlens=None):
    x = {name: getattr(p, name).clone().requires_grad_() for name in NAMES}
    args, state = [x[name] for name in NAMES[:7]], (x["S0"], x["J0"])
    out = metaplastic_delta_scan(*args, initial_state=state, cu_seqlens=cu_seqlens, backend=backend)
    named = {"output": out.output, "S": out.state.S, "J": out.state.J}
    r = torch.Generator().manual_seed(99)
    back = [torch.randn(y.shape, generator=r, dtype=torch.float64).to(y) for y in named.values()]
    grads = torch.autograd.grad(list(named.values()), list(x.values()), back)
    return {name: y.detach() for name, y in named.items()} | {
        f"d {name}": d for name, d in zip(NAMES, grads, strict=True)
    }


@pytest.fixture
def results():
    """results(problem, backend, cu_seqlens=) -> outputs and the gradients of all nine inputs, by name."""
    return _results
