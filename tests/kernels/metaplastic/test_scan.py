"""The front door: what is refused and how, which backend runs, what torch.compile makes of it."""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from palimpsa_surgery.base.errors import KernelUnavailableError, UsageError
from palimpsa_surgery.kernels import backends
from palimpsa_surgery.kernels.metaplastic import scan as api
from palimpsa_surgery.kernels.metaplastic.scan import METAPLASTIC_SCAN
from palimpsa_surgery.kernels.metaplastic.types import ScanProblem

CPU = torch.device("cpu")
CPU_BACKENDS = [name for name, reason in METAPLASTIC_SCAN.unavailable(CPU).items() if reason is None]
ARGS = ("q", "k", "v", "beta", "log_decay", "prior")


def scan(p, **kwargs):
    return api.metaplastic_scan(*(getattr(p, name) for name in ARGS), **kwargs)


def step(p, state=None, **kwargs):
    inputs = [getattr(p, name) for name in ARGS[:5]]
    return api.metaplastic_step(*(x[:, 0] for x in inputs), p.prior, state or (p.M0, p.J0), **kwargs)


@pytest.fixture
def p(problem):
    return problem(5, B=2, H=4, P=8, N=6, G=2, g=2)


@pytest.fixture
def required():
    before = backends.require_kernels()
    backends.set_require_kernels(True)
    yield
    backends.set_require_kernels(before)


FAULTS = {
    "rank": (lambda p: {"q": p.q[0]}, r"q has shape \[5, 2, 6\]; expected 4 dimensions"),
    "integer": (lambda p: {"k": p.k.long()}, r"k has dtype torch.int64; expected a floating dtype"),
    "device": (lambda p: {"beta": p.beta.to("meta")}, r"beta is on meta while v is on cpu"),
    "empty": (lambda p: {n: getattr(p, n)[:, :0] for n in ARGS[:5]}, r"v has shape \[2, 0, 4, 8\].*at least one token"),
    "groups": (
        lambda p: {n: getattr(p, n).repeat(1, 1, 2, 1)[:, :, :3] for n in "qk"},
        r"v has 4 heads and k 3 groups",
    ),
    "q and k": (lambda p: {"q": p.q[..., :4]}, r"q has shape \[2, 5, 2, 4\]; expected \[2, 5, 2, 6\]"),
    "k length": (lambda p: {"k": p.k[:, :3]}, r"k has shape \[2, 3, 2, 6\]; expected \[2, 5, 2, 6\] beside v"),
    "beta heads": (lambda p: {"beta": p.beta[:, :, :3]}, r"beta has shape \[2, 5, 3, 2\]; expected \[2, 5, 4, 2\]"),
    "beta groups": (
        lambda p: {"beta": p.beta.repeat(1, 1, 1, 2)[..., :3]},
        r"beta has 3 groups; expected a divisor of",
    ),
    "no beta": (lambda p: {"beta": p.beta[..., :0]}, r"beta has 0 groups; expected a divisor of the 8 channels"),
    "decay shape": (
        lambda p: {"log_decay": p.log_decay[..., :1]},
        r"log_decay has shape \[2, 5, 1\]; expected \[2, 5, 4\]",
    ),
    "decay sign": (lambda p: {"log_decay": -p.log_decay}, r"log_decay holds [\d.]+; expected values of at most 0"),
    "prior shape": (lambda p: {"prior": p.prior[:1]}, r"prior has shape \[1\]; expected \[4\]"),
    "prior sign": (
        lambda p: {"prior": p.prior - 3},
        r"prior holds -[\d.]+; expected every head's prior to be positive",
    ),
    "prior nan": (lambda p: {"prior": p.prior * float("nan")}, r"prior holds nan; expected every head's prior"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_input_is_named_with_both_shapes(p, fault):
    change, message = FAULTS[fault]
    bad = SimpleNamespace(**{**vars(p), **change(p)})
    with pytest.raises(UsageError, match=message) as error:
        scan(bad)
    assert "\n" not in str(error.value)


STATES = {
    "M": (lambda p: (p.M0[:1], p.J0), r"initial_state.M has shape \[1, 4, 8, 6\]; expected \[2, 4, 8, 6\]"),
    "J": (lambda p: (p.M0, p.M0), r"initial_state.J has shape \[2, 4, 8, 6\]; expected \[2, 4, 2, 6\]"),
    "dtype": (lambda p: (p.M0.long(), p.J0), r"initial_state.M has dtype torch.int64"),
    "device": (lambda p: (p.M0, p.J0.to("meta")), r"initial_state.J is on meta while v is on cpu"),
}


@pytest.mark.parametrize("fault", STATES)
def test_a_wrong_initial_state_is_named(p, fault):
    make, message = STATES[fault]
    with pytest.raises(UsageError, match=message):
        scan(p, initial_state=make(p))


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([0, 3], r"cu_seqlens is \[0, 3\]; expected values that never fall, from 0 to 5 tokens"),
        ([1, 5], r"cu_seqlens is \[1, 5\]"),
        ([0, 4, 2, 5], r"cu_seqlens is \[0, 4, 2, 5\]"),
        ([0, 1, 1, 1, 2, 2, 2, 3, 4, 9], r"cu_seqlens is \[0, 1, 1, 1, ..., 3, 4, 9\]"),
        ([0], r"cu_seqlens has shape \[1\]; expected \[documents \+ 1\]"),
        ([0.0, 5.0], r"cu_seqlens has dtype torch.float32; expected int32 or int64"),
    ],
)
def test_wrong_document_borders_are_refused(problem, cu_seqlens, message):
    with pytest.raises(UsageError, match=message):
        scan(problem(5), cu_seqlens=torch.tensor(cu_seqlens))


def test_documents_need_a_batch_of_one(p):
    with pytest.raises(
        UsageError, match="cu_seqlens was given with a batch of 2; expected packed documents in a batch of 1"
    ):
        scan(p, cu_seqlens=torch.tensor([0, 5]))


def test_an_initial_state_is_one_a_document(problem):
    p = problem(5)
    with pytest.raises(UsageError, match=r"initial_state.M has shape \[1, 4, 8, 6\]; expected \[2, 4, 8, 6\]"):
        scan(p, initial_state=(p.M0, p.J0), cu_seqlens=torch.tensor([0, 2, 5]))


def test_chunk_size_is_positive(p):
    with pytest.raises(UsageError, match="chunk_size is 0; expected a positive number of tokens"):
        scan(p, chunk_size=0)


def test_a_step_takes_no_time_dimension(p):
    with pytest.raises(UsageError, match=r"q of one step has shape \[2, 5, 2, 6\]; expected 3 dimensions, no time"):
        api.metaplastic_step(p.q, p.k, p.v, p.beta, p.log_decay, p.prior, (p.M0, p.J0))


def test_a_step_needs_a_state_that_it_can_write(p):
    with pytest.raises(UsageError, match="expected M and J with stride 1 over N"):
        step(p, (p.M0.transpose(2, 3).contiguous().transpose(2, 3), p.J0))
    with pytest.raises(UsageError, match=r"state.J has shape \[2, 4, 8, 6\]; expected \[2, 4, 2, 6\]"):
        step(p, (p.M0, p.M0))


@pytest.mark.parametrize("variance", [False, True])
@pytest.mark.parametrize("backend", ["auto", *CPU_BACKENDS])
def test_shapes_and_dtypes_of_the_results(p, cast, backend, variance):
    half = cast(p, torch.float32)
    half.v = half.v.bfloat16()
    out = scan(half, backend=backend, variance=variance)
    assert (out.output.shape, out.output.dtype) == (p.v.shape, torch.bfloat16)
    assert (out.state.M.shape, out.state.M.dtype) == (p.M0.shape, torch.float32)
    assert (out.state.J.shape, out.state.J.dtype) == (p.J0.shape, torch.float32)
    assert (out.variance is None) == (not variance)
    one = step(half, backend=backend, variance=variance)
    y = one[0] if variance else one
    assert (y.shape, y.dtype) == ((2, 4, 8), torch.bfloat16)
    if variance:
        assert out.variance.shape == (2, 5, 4, 2)
        assert one[1].shape == (2, 4, 2)


def test_auto_on_a_cpu_is_numba_where_it_is_installed(imported):
    assert METAPLASTIC_SCAN.resolve("auto", "cpu") == "numba"
    assert METAPLASTIC_SCAN.resolve("reference", "cpu") == "reference"
    imported["metaplastic.numba_scan"] = ModuleNotFoundError("No module named 'numba'")
    assert METAPLASTIC_SCAN.resolve("auto", "cpu") == "torch"
    reason = "it cannot be imported (ModuleNotFoundError: No module named 'numba')"
    assert METAPLASTIC_SCAN.unavailable("cpu")["numba"] == reason


def test_numba_runs_on_cpus_alone():
    assert METAPLASTIC_SCAN.reason("numba", "cuda") == "it runs on cpu, not on cuda"


def test_every_backend_says_why_it_cannot_run():
    found = METAPLASTIC_SCAN.unavailable("cpu")
    assert list(found) == list(METAPLASTIC_SCAN.backends)
    assert found["torch"] is None
    assert found["reference"] is None


def test_an_unknown_backend_lists_the_known(p):
    known = f"expected auto, {', '.join(METAPLASTIC_SCAN.backends)}"
    with pytest.raises(UsageError, match=f"backend='cuda' is unknown for the metaplastic scan; {known}"):
        scan(p, backend="cuda")


def test_a_backend_that_cannot_be_imported_is_skipped_or_named(monkeypatch):
    """Whatever its import raises, "auto" goes on and the name says why; the import is tried once."""
    tried = []

    def broken(name):
        tried.append(name)
        raise OSError("libcuda.so.1 not found")

    operator = backends.Operator("a scan", backends.Backend("fast", "a.fast_scan"))
    monkeypatch.setattr(backends, "kernel_module", broken)
    with pytest.raises(KernelUnavailableError, match=r"a scan cannot run on cpu by 'fast': .*libcuda.so.1 not found"):
        operator.resolve("fast", CPU)
    with pytest.raises(KernelUnavailableError, match=r"a scan cannot run by 'fast': .*\(OSError: libcuda"):
        operator.module("fast")
    assert tried == ["a.fast_scan"]


def test_a_backend_may_refuse_a_device_or_a_problem(imported, p):
    """The next one that can takes over; naming the backend gives its reason."""
    fake = SimpleNamespace(unavailable=lambda device: None, unsupported=lambda problem: f"P is {problem.head_dim}")
    imported["metaplastic.numba_scan"] = fake
    assert METAPLASTIC_SCAN.resolve("auto", CPU) == "numba"
    assert METAPLASTIC_SCAN.resolve("auto", CPU, ScanProblem(torch.float32, 8, 6, 2)) == "torch"
    assert scan(p).output.shape == p.v.shape
    with pytest.raises(KernelUnavailableError, match="the metaplastic scan cannot run on cpu by 'numba': P is 8; use"):
        scan(p, backend="numba")
    fake.unavailable = lambda device: f"{device} is old"
    assert METAPLASTIC_SCAN.reason("numba", CPU) == "cpu is old"


def test_required_kernels_are_never_replaced(p, required, imported):
    assert scan(p).output.shape == p.v.shape  # compiled for the CPU
    imported["metaplastic.numba_scan"] = SimpleNamespace(unavailable=lambda device: "numba is broken")
    with pytest.raises(
        KernelUnavailableError, match=r"kernels are required but none can run .* on cpu \(.*numba: numba is broken.*\)"
    ):
        scan(p)
    with pytest.raises(KernelUnavailableError, match="kernels are required"):
        step(p)
    assert scan(p, backend="torch").output.shape == p.v.shape  # asked for by name


@pytest.mark.parametrize(("value", "required"), [("1", True), ("0", False), ("", False), (None, False)])
def test_required_kernels_by_environment(monkeypatch, value, required):
    if value is None:
        monkeypatch.delenv("PALIMPSA_REQUIRE_KERNELS", raising=False)
    else:
        monkeypatch.setenv("PALIMPSA_REQUIRE_KERNELS", value)
    spec = importlib.util.spec_from_file_location("palimpsa_surgery.kernels.backends_read_again", backends.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.require_kernels() is required


def test_importing_the_operator_brings_in_nothing_heavy():
    """No triton, no compiler: they are imported by the backends that use them."""
    code = (
        "import sys, torch; before = set(sys.modules);"
        "from palimpsa_surgery.kernels.conv import causal_conv;"
        "from palimpsa_surgery.kernels.metaplastic import scan;"
        "from palimpsa_surgery.kernels.ssd import mamba2_scan;"
        "heavy = {'triton', 'numba', 'torch._dynamo', 'mamba_ssm', 'causal_conv1d'};"
        "print(sorted(heavy & (set(sys.modules) - before)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_compiled_caller_gives_the_same_numbers(problem):
    """Two lengths, outputs and gradients: the graph breaks at the operator and goes on behind it."""

    def model(q, k, v, beta, log_decay, prior):
        return api.metaplastic_scan(q * 2, k, v, beta, log_decay, prior).output.sin()

    dynamo = importlib.import_module("torch._dynamo")
    dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    for T in (9, 20):
        p = problem(T, dtype=torch.float32)
        x = [getattr(p, name).requires_grad_() for name in ARGS]
        plain, fast = model(*x), compiled(*x)
        assert torch.equal(plain, fast)
        for a, b in zip(torch.autograd.grad(plain.sum(), x), torch.autograd.grad(fast.sum(), x), strict=True):
            assert torch.equal(a, b)
    dynamo.reset()
