"""The front door of the delta rule: what is refused and how, which backend runs."""

from types import SimpleNamespace

import pytest
import torch
from palimpsa_surgery.base.errors import KernelUnavailableError, UsageError
from palimpsa_surgery.kernels import backends
from palimpsa_surgery.kernels.metaplastic_delta import scan as api
from palimpsa_surgery.kernels.metaplastic_delta.scan import METAPLASTIC_DELTA

ARGS = ("q", "k", "v", "b", "beta", "log_decay", "prior")


def scan(p, **kwargs):
    return api.metaplastic_delta_scan(*(getattr(p, name) for name in ARGS), **kwargs)


def step(p, state=None, **changed):
    inputs = {name: getattr(p, name)[:, 0] for name in ARGS[:6]} | changed
    return api.metaplastic_delta_step(**inputs, prior=p.prior, state=state or (p.S0, p.J0))


@pytest.fixture
def p(problem):
    return problem(5, B=2, H=4, P=3, N=6, G=2)


FAULTS = {
    "rank": (lambda p: {"q": p.q[0]}, r"q has shape \[5, 2, 6\]; expected 4 dimensions\."),
    "decay rank": (
        lambda p: {"log_decay": p.log_decay[0]},
        r"log_decay has shape \[5, 4\]; expected 3 dimensions \(4 for a decay per key\)",
    ),
    "integer": (lambda p: {"k": p.k.long()}, r"k has dtype torch.int64; expected a floating dtype"),
    "device": (lambda p: {"b": p.b.to("meta")}, r"b is on meta while v is on cpu"),
    "empty": (lambda p: {n: getattr(p, n)[:, :0] for n in ARGS[:6]}, r"v has shape \[2, 0, 4, 3\].*at least one token"),
    "groups": (lambda p: {n: getattr(p, n).repeat(1, 1, 2, 1)[:, :, :3] for n in "qk"}, r"4 heads and k 3 groups"),
    "q and k": (lambda p: {"q": p.q[..., :4]}, r"q has shape \[2, 5, 2, 4\]; expected \[2, 5, 2, 6\]"),
    "b": (lambda p: {"b": p.b[:, :, :3]}, r"b has shape \[2, 5, 3\]; expected \[2, 5, 4\] beside v \[2, 5, 4, 3\]"),
    "beta": (lambda p: {"beta": p.beta[:, :3]}, r"beta has shape \[2, 3, 4\]; expected \[2, 5, 4\]"),
    "decay per key": (
        lambda p: {"log_decay": p.log_decay.unsqueeze(-1)},
        r"log_decay has shape \[2, 5, 4, 1\]; expected \[2, 5, 4, 6\]",
    ),
    "decay sign": (lambda p: {"log_decay": -p.log_decay}, r"log_decay holds [\d.]+; expected values of at most 0"),
    "prior shape": (lambda p: {"prior": p.prior[:1]}, r"prior has shape \[1\]; expected \[4\]"),
    "prior sign": (lambda p: {"prior": p.prior - 3}, r"prior holds -[\d.]+; expected every head's prior"),
    "prior nan": (lambda p: {"prior": p.prior * float("nan")}, r"prior holds nan; expected every head's prior"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_input_is_named_with_both_shapes(p, fault):
    change, message = FAULTS[fault]
    with pytest.raises(UsageError, match=message) as error:
        scan(SimpleNamespace(**{**vars(p), **change(p)}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: (p.S0[:1], p.J0), r"initial_state.S has shape \[1, 4, 3, 6\]; expected \[2, 4, 3, 6\]"),
        (lambda p: (p.S0, p.S0), r"initial_state.J has shape \[2, 4, 3, 6\]; expected \[2, 4, 6\]"),
        (lambda p: (p.S0.long(), p.J0), r"initial_state.S has dtype torch.int64"),
        (lambda p: (p.S0, p.J0.to("meta")), r"initial_state.J is on meta while v is on cpu"),
    ],
)
def test_a_wrong_initial_state_is_named(p, make, message):
    with pytest.raises(UsageError, match=message):
        scan(p, initial_state=make(p))


def test_documents_are_checked(problem, p):
    with pytest.raises(UsageError, match="cu_seqlens was given with a batch of 2"):
        scan(p, cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(UsageError, match=r"cu_seqlens is \[0, 3\]; expected values that never fall, from 0 to 5"):
        scan(problem(5), cu_seqlens=torch.tensor([0, 3]))
    one = problem(5)
    with pytest.raises(UsageError, match=r"initial_state.S has shape \[1, 4, 3, 5\]; expected \[2, 4, 3, 5\]"):
        scan(one, initial_state=(one.S0, one.J0), cu_seqlens=torch.tensor([0, 2, 5]))


def test_a_step_takes_no_time_dimension_and_states_that_fit(p):
    with pytest.raises(UsageError, match=r"q of one step has shape \[2, 5, 2, 6\]; expected 3 dimensions, no time"):
        step(p, q=p.q)
    with pytest.raises(UsageError, match=r"b of one step has shape \[2, 5, 4\]; expected 2 dimensions, no time"):
        step(p, b=p.b)
    with pytest.raises(UsageError, match=r"log_decay of one step has shape \[4\]; expected 2 or 3 dimensions"):
        step(p, log_decay=p.log_decay[0, 0])
    with pytest.raises(UsageError, match=r"state.J has shape \[2, 4, 3, 6\]; expected \[2, 4, 6\]"):
        step(p, (p.S0, p.S0))


def test_the_chunk_form_runs_and_there_is_no_kernel_yet(p):
    assert METAPLASTIC_DELTA.resolve("auto", "cpu") == "torch"
    assert METAPLASTIC_DELTA.resolve("auto", "cuda") == "torch"
    with pytest.raises(UsageError, match="backend='fast' is unknown for the metaplastic delta rule; expected"):
        scan(p, backend="fast")
    backends.set_require_kernels(True)
    try:
        with pytest.raises(KernelUnavailableError, match="kernels are required but none can run the metaplastic delta"):
            scan(p)
    finally:
        backends.set_require_kernels(False)


def test_a_problem_says_what_a_backend_may_refuse(problem):
    found = api.DeltaInputs(*(getattr(problem(3, per_key=True), name) for name in ARGS)).problem
    assert found == (torch.float64, 3, 5, True)
    found = api.DeltaInputs(*(getattr(problem(3, dtype=torch.bfloat16), name) for name in ARGS)).problem
    assert found == (torch.bfloat16, 3, 5, False)


def test_a_compiled_function_runs_it_outside_the_graph(problem):
    p = problem(20, dtype=torch.float32)
    run = torch.compile(lambda v: scan(SimpleNamespace(**{**vars(p), "v": 2 * v})).output + 1, backend="eager")
    want = scan(SimpleNamespace(**{**vars(p), "v": 2 * p.v})).output + 1
    assert torch.equal(run(p.v), want)
