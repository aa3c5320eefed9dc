"""The plain Mamba2 scan against a time loop written here, and what happens around a broken mamba-ssm."""

import itertools
import sys
import types

import pytest
import torch
from palimpsa_surgery.base.errors import KernelUnavailableError, UsageError
from palimpsa_surgery.kernels import backends
from palimpsa_surgery.kernels.ssd import metaplastic_scan, torch_scan
from palimpsa_surgery.kernels.ssd.mamba2_scan import MAMBA2_SCAN, mamba2_scan, mamba2_step
from palimpsa_surgery.kernels.ssd.types import SsdProblem

needs_mamba_ssm = pytest.mark.skipif(
    not torch.cuda.is_available() or MAMBA2_SCAN.reason("mamba_ssm", "cuda") is not None,
    reason="mamba-ssm cannot run here",
)
NAMES = ("x", "dt", "A", "B", "C", "state")


def inputs(T, *, batch=2, H=4, P=6, N=5, G=2, rows=None, decays=(-8, 4), seed=0):
    """fp64; A dt is spread evenly over powers of ten of nats per token."""
    r = torch.Generator().manual_seed(seed)
    nats = 10 ** (decays[0] + (decays[1] - decays[0]) * torch.rand(batch, T, H, generator=r, dtype=torch.float64))
    A = -0.1 - torch.rand(H, generator=r, dtype=torch.float64)
    dt = nats / -A
    x = torch.randn(batch, T, H, P, generator=r, dtype=torch.float64) / dt.unsqueeze(-1).clamp(min=0.1)
    B, C = (torch.randn(batch, T, G, N, generator=r, dtype=torch.float64) for _ in "BC")
    return dict(zip(NAMES, (x, dt, A, B, C, torch.randn(rows or batch, H, P, N, generator=r).double()), strict=True))


def loop(x, dt, A, B, C, state, cu_seqlens=None):
    if cu_seqlens is not None:
        parts, bounds = [], cu_seqlens.tolist()
        for i, (a, b) in enumerate(itertools.pairwise(bounds)):
            parts.append(loop(x[:, a:b], dt[:, a:b], A, B[:, a:b], C[:, a:b], state[i : i + 1]))
        return torch.cat([y for y, _ in parts], 1), torch.cat([s for _, s in parts])
    B, C = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (B, C))
    ys = [x[:, :0]]
    for t in range(x.shape[1]):
        new = (x[:, t] * dt[:, t].unsqueeze(-1)).unsqueeze(-1) * B[:, t].unsqueeze(2)
        state = (dt[:, t] * A).exp()[..., None, None] * state + new
        ys.append((state * C[:, t].unsqueeze(2)).sum(-1).unsqueeze(1))
    return torch.cat(ys, 1), state


def chunked(x, dt, A, B, C, state, cu_seqlens=None, **kwargs):
    return mamba2_scan(x, dt, A, B, C, initial_state=state, cu_seqlens=cu_seqlens, backend="torch", **kwargs)


def everything(function, given, dtype=torch.float64, **kwargs):
    """Outputs and gradients of all inputs, for fixed random gradients of output and final state."""
    x = {name: t.to(dtype).requires_grad_() for name, t in given.items()}
    out = function(**x, **kwargs)
    r = torch.Generator().manual_seed(3)
    back = [torch.randn(y.shape, generator=r, dtype=torch.float64).to(dtype) for y in out]
    return *(y.detach() for y in out), *torch.autograd.grad(out, list(x.values()), back)


@pytest.mark.parametrize("T", [1, 3, 63, 64, 65, 129, 257])
def test_equals_the_time_loop_at_every_length_and_decay(relative, T):
    given = inputs(T, seed=T)
    want = everything(loop, given)
    for got, exact in zip(everything(chunked, given), want, strict=True):
        assert relative(got, exact) < 1e-11  # fp64
    for got, exact in zip(everything(chunked, given, torch.float32), want, strict=True):
        assert torch.isfinite(got).all()
        assert relative(got, exact) < 1e-5  # fp32


@pytest.mark.parametrize(("H", "G"), [(4, 1), (4, 4), (6, 3), (1, 1)])
@pytest.mark.parametrize("chunk_size", [1, 16, 1000])
def test_groups_and_chunks(relative, H, G, chunk_size):
    given = inputs(40, H=H, G=G)
    for got, exact in zip(everything(chunked, given, chunk_size=chunk_size), everything(loop, given), strict=True):
        assert relative(got, exact) < 1e-11


@pytest.mark.parametrize("lengths", [[70], [1] * 9, [1, 0, 63, 2, 64], [0, 5, 0]], ids=str)
def test_packed_documents_equal_separate_ones(relative, lengths):
    given = inputs(sum(lengths), batch=1, rows=len(lengths))
    cu = torch.tensor([0, *lengths]).cumsum(0)
    got, want = everything(chunked, given, cu_seqlens=cu), everything(loop, given, cu_seqlens=cu)
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 1e-11


def test_gradcheck():
    given = inputs(9, batch=1, H=2, P=2, N=2, G=1, decays=(-2, 0))
    x = [t.requires_grad_() for t in given.values()]
    assert torch.autograd.gradcheck(lambda *x: chunked(*x, chunk_size=4), x)


def test_the_gradient_of_a_decay_is_zero_where_nothing_crosses():
    """Not rounding of what stays: A dt of 1e4 nats everywhere gives exact zeros."""
    given = inputs(70, decays=(4, 4.1))
    x = {name: t.float() for name, t in given.items()}
    log_decay = (x["dt"] * x["A"]).requires_grad_()
    y, state = torch_scan.linear_scan(x["C"], x["B"], x["x"], log_decay, x["state"])
    assert not torch.autograd.grad(y.square().sum() + state.sum(), log_decay)[0].any()


def test_steps_and_pieces_equal_one_pass(relative):
    given = inputs(30)
    y, final = loop(**given)
    names = ("x", "dt", "B", "C")
    first = {**given, **{n: given[n][:, :17] for n in names}}
    head, state = chunked(**first)
    tail = []
    for t in range(17, 30):
        x, dt, B, C = (given[n][:, t] for n in names)
        tail.append(mamba2_step(x, dt, given["A"], B, C, state))
    assert relative(torch.cat((head, torch.stack(tail, 1)), 1), y) < 1e-12
    assert relative(state, final) < 1e-12


def test_padding_leaves_the_state_as_it_is():
    given = {name: t.float() for name, t in inputs(7).items()}
    for name in ("x", "dt", "B"):
        given[name] = torch.zeros_like(given[name])
    assert torch.equal(chunked(**given)[1], given["state"])


def test_half_precision_in_fp32_inside(relative):
    given = inputs(50, decays=(-3, 0))
    low = {n: t.bfloat16() if n in "xBC" else t.float() for n, t in given.items()}
    y, state = chunked(**low)
    want, want_state = loop(**{n: t.double() for n, t in low.items()})
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert relative(state, want_state) < 1e-5  # fp32
    assert relative(y, want) < 3e-3  # the rounding of y to bf16


def test_states_are_kept_only_for_a_backward_pass(monkeypatch):
    kept = []
    real = torch_scan._linear_forward

    def watched(*args):
        out = real(*args)
        kept.append(out[2].shape[0])
        return out

    monkeypatch.setattr(torch_scan, "_linear_forward", watched)
    x = {n: t.requires_grad_() for n, t in inputs(200).items()}
    chunked(**x)
    with torch.no_grad():
        chunked(**x)
    assert kept == [2 * 3, 0]  # two rows of four blocks, the first of which start from the initial state


def test_saved_for_backward_is_the_inputs_and_the_states_at_chunk_borders():
    def kept(T):
        x = {n: t.float().requires_grad_() for n, t in inputs(T, batch=1, H=2, P=8, N=16, G=1).items()}
        given = {t.data_ptr() for t in x.values()}
        sizes = []

        def pack(t):
            sizes.append(0 if t.data_ptr() in given else t.numel())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            chunked(**x)
        return sum(sizes)

    inputs_a_token = 2 * 8 + 3 * 2 + 2 * 16  # v and dt are made of x and dt before the scan
    state = 2 * 8 * 16
    assert (kept(512) - kept(256)) / 256 <= inputs_a_token + state / 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: {"x": g["x"][0]}, r"x has shape \[5, 4, 6\]; expected \[B, T, H, P\]"),
        (lambda g: {"x": g["x"][:, :0]}, r"x has shape \[2, 0, 4, 6\]; expected .* at least one token"),
        (
            lambda g: {"B": g["B"][:, :, :1].repeat(1, 1, 3, 1)},
            r"B has shape \[2, 5, 3, 5\]; expected .* dividing the 4 heads",
        ),
        (lambda g: {"B": g["B"][:, :3]}, r"B has shape \[2, 3, 2, 5\]; expected \[2, 5, 2, 5\] beside x"),
        (lambda g: {"C": g["C"][..., :2]}, r"C has shape \[2, 5, 2, 2\]; expected \[2, 5, 2, 5\] beside x"),
        (lambda g: {"dt": g["dt"][..., :1]}, r"dt has shape \[2, 5, 1\]; expected \[2, 5, 4\] beside x"),
        (lambda g: {"A": g["A"][:1]}, r"A has shape \[1\]; expected \[4\] beside x"),
        (lambda g: {"state": g["state"][:1]}, r"initial_state has shape \[1, 4, 6, 5\]; expected \[2, 4, 6, 5\]"),
        (lambda g: {"dt": g["dt"].to("meta")}, r"dt is on meta while x is on cpu"),
        (lambda g: {"cu_seqlens": torch.tensor([0, 5])}, r"cu_seqlens was given with a batch of 2"),
    ],
)
def test_a_wrong_input_is_named_with_both_shapes(change, message):
    given = inputs(5)
    with pytest.raises(UsageError, match=message):
        chunked(**{**given, **change(given)})


def test_a_step_needs_its_state():
    given = inputs(1)
    x, dt, B, C = (given[n][:, 0] for n in ("x", "dt", "B", "C"))
    with pytest.raises(
        UsageError, match=r"state has shape \[1, 4, 6, 5\] beside x \[2, 4, 6\]; expected \[B, H, P, 5\]"
    ):
        mamba2_step(x, dt, given["A"], B, C, given["state"][:1])


def broken_package(error):
    class Broken(types.ModuleType):
        def __getattr__(self, name):
            raise error

    return Broken("mamba_ssm")


@pytest.mark.parametrize(
    "error", [ImportError("selective_scan_cuda"), RuntimeError("undefined symbol"), OSError("libcudart")]
)
def test_a_broken_mamba_ssm_never_stops_the_tool(monkeypatch, import_anew, imported, error):
    monkeypatch.setitem(sys.modules, "mamba_ssm", broken_package(error))
    imported["ssd.package_scan"] = import_anew("ssd.package_scan")
    assert MAMBA2_SCAN.resolve("auto", "cuda", SsdProblem(torch.bfloat16)) == "metaplastic"
    with pytest.raises(
        KernelUnavailableError, match=f"the Mamba2 scan cannot run on cuda by 'mamba_ssm': it cannot .* {error}"
    ):
        MAMBA2_SCAN.resolve("mamba_ssm", "cuda")


def test_without_a_gpu_the_reason_says_so():
    with pytest.raises(KernelUnavailableError, match="cannot run on cpu by 'mamba_ssm': it runs on cuda, not on cpu"):
        MAMBA2_SCAN.resolve("mamba_ssm", "cpu")
    with pytest.raises(
        UsageError, match="backend='fast' is unknown for the Mamba2 scan; expected auto, mamba_ssm, metaplastic, torch"
    ):
        MAMBA2_SCAN.resolve("fast", "cpu")


def test_required_kernels_are_never_replaced():
    backends.set_require_kernels(True)
    try:
        with pytest.raises(KernelUnavailableError, match="kernels are required but none can run the Mamba2 scan on"):
            mamba2_scan(*(inputs(3)[n] for n in NAMES[:5]))
        assert MAMBA2_SCAN.resolve("torch", "cpu") == "torch"
    finally:
        backends.set_require_kernels(False)


@pytest.fixture
def package(monkeypatch, import_anew, imported):
    """The module over mamba-ssm, which gets these two functions: package(scan, step)."""

    def load(scan=None, step=None):
        ops = "mamba_ssm.ops.triton"
        for name in ("mamba_ssm", "mamba_ssm.ops", ops):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        scans = types.SimpleNamespace(mamba_chunk_scan_combined=scan)
        monkeypatch.setitem(sys.modules, f"{ops}.ssd_combined", scans)
        steps = types.SimpleNamespace(selective_state_update=step)
        monkeypatch.setitem(sys.modules, f"{ops}.selective_state_update", steps)
        imported["ssd.package_scan"] = import_anew("ssd.package_scan")

    return load


@pytest.fixture
def stand_in(monkeypatch, package):
    """mamba-ssm's two functions with the signatures of 2.3.2, on the CPU; gives the list of calls."""
    calls = []

    def scan(x, dt, A, B, C, chunk_size, initial_states=None, seq_idx=None, return_final_states=False):
        calls.append({"chunk_size": chunk_size, "seq_idx": seq_idx})
        if seq_idx is not None:
            assert seq_idx.dtype == torch.int32
            _, count = seq_idx[0].unique(return_counts=True)
            cu = torch.cat((count.new_zeros(1), count.cumsum(0)))
            return loop(x, dt, A, B, C, x.new_zeros(len(count), *x.shape[2:], B.shape[3]), cu)[0]
        y, state = loop(x, dt, A, B, C, initial_states)
        return (y, state) if return_final_states else y

    def update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False):
        assert (dt.shape, A.shape, dt_bias.shape) == (x.shape, (*x.shape[1:], B.shape[-1]), x.shape[1:])
        assert A.stride(-1) == A.stride(-2) == dt.stride(-1) == dt_bias.stride(-1) == 0  # one decay per head
        assert D.shape == dt_bias.shape  # it reads the strides of both, given or not
        assert not dt_bias.any()
        assert not D.any()
        y, new = loop(x.unsqueeze(1), dt[:, None, :, 0], A[:, 0, 0], B.unsqueeze(1), C.unsqueeze(1), state)
        state.copy_(new)
        return y[:, 0]

    package(scan, update)
    real = MAMBA2_SCAN.choose
    monkeypatch.setattr(
        MAMBA2_SCAN, "choose", lambda name, device, problem: real(name, "cuda", problem._replace(dtype=torch.bfloat16))
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    return calls


def test_a_working_mamba_ssm_is_called_with_our_meaning(stand_in, relative):
    """Step size ready made, no D, no softplus, states in fp32."""
    given = inputs(5)
    want = loop(**given)
    y, state = mamba2_scan(*(given[n] for n in NAMES[:5]), initial_state=given["state"])
    assert stand_in == [{"chunk_size": 256, "seq_idx": None}]
    assert state.dtype == torch.float32
    assert relative(y, want[0]) < 1e-12
    assert relative(state, want[1]) < 1e-6  # fp32
    state, ys = given["state"].clone(), []
    for t in range(5):
        x, dt, B, C = (given[n][:, t] for n in ("x", "dt", "B", "C"))
        ys.append(mamba2_step(x, dt, given["A"], B, C, state))
    assert relative(torch.stack(ys, 1), want[0]) < 1e-12
    assert relative(state, want[1]) < 1e-12


def test_packed_documents_on_mamba_ssm(stand_in, relative):
    """Without states on its kernels; with states on the next backend, or refused where they were asked for by name."""
    given = inputs(9, batch=1, rows=3)
    cu = torch.tensor([0, 2, 3, 9])
    args = [given[n] for n in NAMES[:5]]
    want = loop(*args, torch.zeros_like(given["state"]), cu)
    y, state = mamba2_scan(*args, cu_seqlens=cu, final_state=False)
    assert state is None
    assert stand_in[0]["seq_idx"].tolist() == [[0, 0, 1, 2, 2, 2, 2, 2, 2]]
    assert relative(y, want[0]) < 1e-12
    y, state = mamba2_scan(*args, cu_seqlens=cu)
    assert len(stand_in) == 1
    assert relative(state, want[1]) < 1e-12
    with pytest.raises(KernelUnavailableError, match="it has no states of packed documents"):
        mamba2_scan(*args, cu_seqlens=cu, backend="mamba_ssm")


@pytest.mark.parametrize(
    ("dtype", "precision", "how", "chosen"),
    [
        (torch.bfloat16, "highest", {}, "mamba_ssm"),
        (torch.float32, "highest", {}, "metaplastic"),
        (torch.float32, "highest", {"state_size": 512}, "torch"),
        (torch.float32, "high", {}, "mamba_ssm"),
        (torch.float32, "highest", {"exact": False}, "mamba_ssm"),
        (torch.float32, "highest", {"one_token": True}, "mamba_ssm"),
        (torch.float64, "high", {}, "torch"),
    ],
)
def test_fp32_is_exact_unless_the_user_allows_tf32(package, dtype, precision, how, chosen):
    package()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert MAMBA2_SCAN.resolve("auto", "cuda", SsdProblem(dtype, **how)) == chosen
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("name", "exact"), [("auto", True), ("torch", False)])
def test_a_backend_that_was_named_need_not_be_exact(monkeypatch, name, exact):
    problems = []
    real = MAMBA2_SCAN.choose
    monkeypatch.setattr(MAMBA2_SCAN, "choose", lambda *a: problems.append(a[2]) or real(*a))
    mamba2_scan(*(inputs(3)[n].float() for n in NAMES[:5]), backend=name)
    assert problems == [SsdProblem(torch.float32, 5, exact=exact)]


@pytest.mark.parametrize(("precision", "chosen"), [("tf32", "mamba_ssm"), ("ieee", "metaplastic")])
def test_the_newer_switch_of_tf32_is_understood(monkeypatch, package, precision, chosen):
    """The older question about it raises an error once this one was set."""
    package()
    monkeypatch.setattr(torch.backends.cuda, "matmul", types.SimpleNamespace(fp32_precision=precision))
    assert MAMBA2_SCAN.resolve("auto", "cuda", SsdProblem(torch.float32)) == chosen


def test_required_kernels_say_how_fp32_gets_one(monkeypatch, package):
    package()
    monkeypatch.setattr(backends, "_required", True)
    with pytest.raises(KernelUnavailableError, match=r"TF32; torch\.set_float32_matmul_precision\('high'\) allows it"):
        MAMBA2_SCAN.resolve("auto", "cuda", SsdProblem(torch.float32, state_size=512))


def test_a_state_that_is_not_needed_is_not_given():
    given = inputs(5)
    y, state = mamba2_scan(*(given[n] for n in NAMES[:5]), final_state=False)
    assert state is None
    assert torch.equal(y, mamba2_scan(*(given[n] for n in NAMES[:5]))[0])


def by_metaplastic(x, dt, A, B, C, state, cu_seqlens=None):
    """On a CPU that scan's own backends run it, in fp64 too."""
    return metaplastic_scan.scan(x, dt, A, B, C, state, cu_seqlens, None)


@pytest.mark.parametrize("lengths", [[130], [1] * 5, [1, 63, 2, 64]], ids=str)
@pytest.mark.parametrize(("H", "G"), [(4, 1), (6, 3)])
def test_an_importance_of_one_leaves_the_plain_scan(relative, lengths, H, G):
    given = inputs(sum(lengths), batch=1, rows=len(lengths), H=H, G=G, decays=(-6, 2))
    cu = torch.tensor([0, *lengths]).cumsum(0)
    got, want = everything(by_metaplastic, given, cu_seqlens=cu), everything(loop, given, cu_seqlens=cu)
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 1e-11


def test_its_steps_continue_the_scan(relative):
    given = inputs(9)
    state, ys = given["state"].float(), []
    for t in range(9):
        x, dt, B, C = (given[n][:, t].float() for n in ("x", "dt", "B", "C"))
        ys.append(metaplastic_scan.step(x, dt, given["A"].float(), B, C, state))
    y, final = loop(**given)
    assert relative(torch.stack(ys, 1), y) < 1e-5  # fp32
    assert relative(state, final) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("lengths", [[300], [100, 7, 193]], ids=str)
def test_on_a_gpu_it_equals_the_torch_form(relative, dtype, limit, lengths):
    given = inputs(300, P=64, N=128, batch=1, rows=len(lengths), decays=(-3, 0))
    low = {n: (t.to(dtype) if n in "xBC" else t.float()).cuda() for n, t in given.items()}
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0)

    def run(backend):
        x = {n: t.clone().requires_grad_() for n, t in low.items()}
        args = [x[n] for n in NAMES[:5]]
        y, state = mamba2_scan(*args, initial_state=x["state"], cu_seqlens=cu, backend=backend)
        return y, state, *torch.autograd.grad(y.square().sum() + state.square().sum(), list(x.values()))

    for a, b in zip(run("metaplastic"), run("torch"), strict=True):
        assert a.dtype == b.dtype
        assert relative(a, b) < limit


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kernels", [pytest.param("mamba_ssm", marks=needs_mamba_ssm), "metaplastic"])
def test_steps_on_a_gpu_equal_the_torch_form(relative, kernels):
    given = {n: t.float().cuda() for n, t in inputs(3, P=64, N=128, decays=(-3, 0)).items()}
    found = []
    for backend in (kernels, "torch"):
        state, ys = given["state"].clone(), []
        for t in range(3):
            x, dt, B, C = (given[n][:, t].contiguous() for n in ("x", "dt", "B", "C"))
            ys.append(mamba2_step(x, dt, given["A"], B, C, state, backend=backend))
        found.append((torch.stack(ys), state))
    for a, b in zip(*found, strict=True):
        assert relative(a, b) < 1e-5  # fp32, sums without TF32


@pytest.mark.gpu
@needs_mamba_ssm
def test_mamba_ssm_equals_the_torch_form(relative):
    given = {n: t.float().cuda() for n, t in inputs(300, P=64, N=128, decays=(-3, 0)).items()}

    def run(backend):
        x = {n: t.clone().requires_grad_() for n, t in given.items()}
        args = [x[n] for n in NAMES[:5]]
        y, state = mamba2_scan(*args, initial_state=x["state"], backend=backend)
        return y, state, *torch.autograd.grad(y.square().sum() + state.square().sum(), list(x.values()))

    # Its products take fp32 in TF32, cut off and not rounded: each operand loses 3.5e-4 on average, and losses that all
    # point one way add up along a chain of products. Four operands reach the output, ten the gradients of its square.
    limits = [2e-3] * 2 + [4e-3] * len(given)
    for a, b, limit in zip(run("mamba_ssm"), run("torch"), limits, strict=True):
        assert relative(a, b) < limit
