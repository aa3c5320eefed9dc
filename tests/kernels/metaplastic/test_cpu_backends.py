"""The backends for CPUs against the oracle: values, all gradients, documents, carried states, memory."""

import itertools
import time

import pytest
import torch
from palimpsa_surgery.kernels.metaplastic.scan import METAPLASTIC_SCAN, metaplastic_scan, metaplastic_step

LENGTHS = [1, 3, 63, 64, 65, 127, 128, 129, 255, 256, 257]
FP64, FP32, FP32_GRAD = 1e-12, 1e-5, 1e-5  # relative L2


@pytest.fixture(params=["torch", "numba"])
def backend(request):
    if METAPLASTIC_SCAN.reason(request.param, "cpu"):
        pytest.skip(f"{request.param} cannot run here")
    return request.param


def compare(relative, got, want, forward, backward):
    for name, value in want.items():
        assert torch.isfinite(got[name]).all(), name
        assert relative(got[name], value) < (backward if name.startswith("d ") else forward), name


@pytest.mark.parametrize("T", LENGTHS)
def test_equals_the_reference_at_every_length_with_all_decays_mixed(backend, problem, cast, relative, results, T):
    """Decays from 1e-8 to 1e4 nats per token, carried states, variance, chunk borders inside the sequence."""
    p = problem(T, H=2, P=4, N=5, G=1, g=4, seed=T)
    want = results(p, "reference")
    compare(relative, results(p, backend, chunk_size=64), want, FP64, FP64)
    got = results(cast(p, torch.float32), backend, chunk_size=64)
    compare(relative, got, want, FP32, FP32_GRAD)


@pytest.mark.parametrize(("H", "G", "P", "g"), [(4, 1, 8, 1), (4, 2, 8, 2), (4, 4, 8, 8), (6, 3, 4, 4), (1, 1, 12, 3)])
@pytest.mark.parametrize("B", [1, 3])
def test_groups_of_heads_and_of_channels(backend, problem, relative, results, B, H, G, P, g):
    p = problem(70, B=B, H=H, P=P, G=G, g=g, N=5)
    compare(relative, results(p, backend), results(p, "reference"), FP64, FP64)


@pytest.mark.parametrize("nats", [1e-8, 1e-3, 1.0, 50.0, 200.0, 1e4])
def test_one_decay_throughout(backend, problem, cast, relative, results, nats):
    """The gradient of the decay too: what crosses a token carries that token's own decay, so nothing cancels."""
    p = problem(67, H=2, P=4, N=5, g=4)
    p.log_decay = torch.full_like(p.log_decay, -nats)
    want = results(p, "reference")
    compare(relative, results(cast(p, torch.float32), backend), want, FP32, FP32_GRAD)


def test_a_total_loss_beside_mild_decays_costs_no_digits(backend, problem, cast, relative, results):
    p = problem(48, H=1, P=4, N=5, G=1, g=4, decays=(-4, -2))
    p.log_decay[:, ::7] = -1e4
    compare(relative, results(cast(p, torch.float32), backend), results(p, "reference"), FP32, FP32_GRAD)


def test_minus_infinity_forgets_everything(backend, problem, results):
    p = problem(20, decays=(-3, -1))
    p.log_decay[:, 9] = -float("inf")
    got = results(p, backend)
    assert all(torch.isfinite(x).all() for x in got.values())
    after = problem(20, decays=(-3, -1))
    args = [x[:, 9:] for x in (after.q, after.k, after.v, after.beta, after.log_decay)]
    alone = metaplastic_scan(*args, after.prior, backend=backend)
    assert torch.allclose(got["output"][:, 9:], alone.output, rtol=1e-12)


@pytest.mark.parametrize("g", [1, 2, 4])
def test_gradcheck(backend, problem, g):
    p = problem(18, H=1, P=4, N=2, G=1, g=g, decays=(-3, 1))
    inputs = [x.requires_grad_() for x in (p.q, p.k, p.v, p.beta, p.log_decay, p.prior, p.M0, p.J0)]

    def run(*x):
        # Decays of at most 1, priors above zero: what the search for a derivative may not leave.
        out = metaplastic_scan(*x[:6], initial_state=x[6:], chunk_size=16, backend=backend, variance=True)
        return out.output, *out.state, out.variance

    assert torch.autograd.gradcheck(run, inputs, eps=1e-7, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("which", ["output", "M", "J", "variance"])
def test_gradient_through_one_result_alone(backend, problem, relative, which):
    p = problem(37, g=2)
    grads = {}
    for name in (backend, "reference"):
        x = [t.clone().requires_grad_() for t in (p.k, p.v, p.beta, p.log_decay, p.M0, p.J0)]
        k, v, beta, log_decay, M0, J0 = x
        out = metaplastic_scan(p.q, k, v, beta, log_decay, p.prior, initial_state=(M0, J0), backend=name, variance=True)
        y = {"output": out.output, "M": out.state.M, "J": out.state.J, "variance": out.variance}[which]
        grads[name] = torch.autograd.grad((y * y).sum(), x, materialize_grads=True)
    for a, b in zip(grads[backend], grads["reference"], strict=True):
        assert torch.isfinite(a).all()
        assert (a - b).norm() <= 1e-12 * b.norm() + 1e-14


def test_prior_alone_trains(backend, problem, relative):
    p = problem(50, B=2, g=2)
    got = {}
    for name in (backend, "reference"):
        prior = p.prior.clone().requires_grad_()
        out = metaplastic_scan(p.q, p.k, p.v, p.beta, p.log_decay, prior, backend=name)
        got[name] = torch.autograd.grad(out.output.square().sum(), prior)[0]
    assert relative(got[backend], got["reference"]) < FP64


@pytest.mark.parametrize("cuts", [[1], [17], [16, 33], [1, 2, 64]])
def test_a_carried_state_continues_the_sequence(backend, problem, relative, cuts):
    """Outputs and gradients, the gradient flowing back through the states that pieces hand on."""
    p = problem(70, B=2, g=2, decays=(-4, 1))
    names = ("q", "k", "v", "beta", "log_decay", "prior", "M0", "J0")

    def run(bounds):
        x = {name: getattr(p, name).clone().requires_grad_() for name in names}
        state, outputs = (x["M0"], x["J0"]), []
        for a, b in bounds:
            piece = [x[name][:, a:b] for name in names[:5]]
            out = metaplastic_scan(*piece, x["prior"], initial_state=state, backend=backend)
            state = out.state
            outputs.append(out.output)
        y = torch.cat(outputs, 1)
        loss = (y * y).sum() + (state[0] ** 3).sum() + (state[1] ** 2).sum()
        return y, *state, *torch.autograd.grad(loss, list(x.values()))

    whole, pieces = run([(0, 70)]), run(list(itertools.pairwise([0, *cuts, 70])))
    for a, b in zip(pieces, whole, strict=True):
        assert relative(a, b) < FP64


DOCUMENTS = [[70], [1] * 12, [1, 0, 63, 2, 64], [17, 16, 15, 1, 33], [0, 5, 0]]


@pytest.mark.parametrize("lengths", DOCUMENTS, ids=str)
@pytest.mark.parametrize("g", [1, 8])
def test_packed_documents_equal_separate_ones(backend, problem, relative, results, lengths, g):
    """The oracle runs them one by one: outputs, final states and every gradient, an initial state per document."""
    p = problem(sum(lengths), rows=len(lengths), g=g)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    want = results(p, "reference", cu_seqlens=cu)
    compare(relative, results(p, backend, cu_seqlens=cu, chunk_size=32), want, FP64, FP64)


def test_packed_documents_equal_separate_calls_to_rounding(backend, problem):
    """In fp32 a document's blocks start where it starts, so packing changes no arithmetic: the same bits."""
    lengths = [5, 40, 1, 23]
    p = problem(sum(lengths), dtype=torch.float32, g=2, rows=4)
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packed = metaplastic_scan(p.q, p.k, p.v, p.beta, p.log_decay, p.prior, cu_seqlens=cu, backend=backend)
    for i, n in enumerate(lengths):
        s = slice(int(cu[i]), int(cu[i]) + n)
        args = [x[:, s] for x in (p.q, p.k, p.v, p.beta, p.log_decay)]
        alone = metaplastic_scan(*args, p.prior, backend=backend)
        assert torch.allclose(packed.output[:, s], alone.output, rtol=1e-5, atol=1e-6)
        assert torch.allclose(packed.state.M[i], alone.state.M[0], rtol=1e-5, atol=1e-6)


def test_a_document_sees_nothing_of_its_neighbors(backend, problem):
    p = problem(30, dtype=torch.float32)
    cu = torch.tensor([0, 11, 30])
    args = [x.clone() for x in (p.q, p.k, p.v, p.beta, p.log_decay)]
    clean = metaplastic_scan(*args, p.prior, cu_seqlens=cu, backend=backend).output
    args[2][:, :11] = float("nan")
    dirty = metaplastic_scan(*args, p.prior, cu_seqlens=cu, backend=backend).output
    assert torch.equal(clean[:, 11:], dirty[:, 11:])
    assert dirty[:, :11].isnan().any()


@pytest.mark.parametrize("chunk_size", [1, 16, 50, 1000])
def test_chunk_size_changes_nothing(backend, problem, relative, results, chunk_size):
    p = problem(75, B=2, g=8, P=8)
    compare(relative, results(p, backend, chunk_size=chunk_size), results(p, "reference"), FP64, FP64)


def saved_elements(backend, T, **sizes):
    """Elements kept for backward beyond the inputs, counted as autograd stores them."""
    H, P, N = 2, 16, 32
    r = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, T, 1, N, generator=r) for _ in "qk")
    v, beta = torch.randn(1, T, H, P, generator=r), torch.rand(1, T, H, P, generator=r)
    x = [q, k, v, beta, -torch.rand(1, T, H, generator=r), torch.ones(H)]
    for t in x:
        t.requires_grad_()
    kept, inputs = [], {t.data_ptr() for t in x}

    def pack(t):
        if t.data_ptr() not in inputs:
            kept.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        metaplastic_scan(*x, backend=backend, **sizes)
    return sum(kept), H * P * N


def test_memory_for_backward_is_the_states_at_chunk_borders(backend):
    for T in (256, 512, 1024):
        kept, state = saved_elements(backend, T, chunk_size=128)
        assert kept == 2 * state * (T // 128 - 1)
    assert saved_elements(backend, 1024, chunk_size=512)[0] == 2 * saved_elements(backend, 1024, chunk_size=512)[1]


def test_many_short_documents_are_walked_together(backend, problem):
    """2,000 documents of one or two tokens take a handful of steps, not thousands."""
    lengths = [1, 2] * 1000
    p = problem(3000, H=1, G=1, P=2, g=2, N=2, dtype=torch.float32)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    args = (p.q, p.k, p.v, p.beta, p.log_decay, p.prior)
    metaplastic_scan(*args, cu_seqlens=cu, backend=backend)
    start = time.process_time()
    metaplastic_scan(*args, cu_seqlens=cu, backend=backend)
    assert time.process_time() - start < 1.0


def test_second_derivatives_are_refused(backend, problem):
    p = problem(5)
    v = p.v.requires_grad_()
    out = metaplastic_scan(p.q, p.k, v, p.beta, p.log_decay, p.prior, backend=backend).output
    (d,) = torch.autograd.grad(out.square().sum(), v, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        d.sum().backward()


def test_autocast_does_not_reach_inside(backend, problem, relative):
    p = problem(40, dtype=torch.float32, decays=(-3, 0))
    args = [x.requires_grad_() for x in (p.q, p.k, p.v, p.beta, p.log_decay, p.prior)]

    def run():
        out = metaplastic_scan(*args, backend=backend).output
        return out.detach(), *torch.autograd.grad(out.square().sum(), args)

    plain = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run()
    for a, b in zip(cast, plain, strict=True):
        assert torch.equal(a, b)


def test_inputs_that_are_not_contiguous(backend, problem, relative):
    p = problem(33, B=2, dtype=torch.float32)
    args = (p.q, p.k, p.v, p.beta, p.log_decay)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in args]
    plain = metaplastic_scan(*args, p.prior, initial_state=(p.M0, p.J0), backend=backend)
    view = metaplastic_scan(*strided, p.prior, initial_state=(p.M0, p.J0), backend=backend)
    assert torch.equal(plain.output, view.output)


def test_inputs_and_states_are_not_written(backend, problem):
    p = problem(33)
    before = [x.clone() for x in vars(p).values()]
    metaplastic_scan(p.q, p.k, p.v, p.beta, p.log_decay, p.prior, initial_state=(p.M0, p.J0), backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(before, vars(p).values(), strict=True))


def test_a_step_keeps_no_graph(backend, problem):
    p = problem(1)
    args = [x[:, 0].requires_grad_() for x in (p.q, p.k, p.v, p.beta, p.log_decay)]
    assert not metaplastic_step(*args, p.prior, (p.M0, p.J0), backend=backend).requires_grad


@pytest.mark.parametrize("lengths", [[40], [1, 16, 0, 23]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_forgets_nothing_has_no_gradient_for_it(backend, problem, dtype, lengths):
    """At a document's first token there is no state to forget: exactly zero, not rounding."""
    p = problem(40, dtype=dtype, g=8, decays=(-3, 0))
    log_decay = p.log_decay.requires_grad_()
    cu = torch.tensor([0, *lengths]).cumsum(0)
    out = metaplastic_scan(p.q, p.k, p.v, p.beta, log_decay, p.prior, cu_seqlens=cu, backend=backend)
    (d,) = torch.autograd.grad(out.output.square().sum() + out.state.M.sum() + out.state.J.sum(), log_decay)
    starts = [start for start, n in zip(cu.tolist(), lengths, strict=False) if n]
    assert not d[:, starts].any()
    assert d[:, [t for t in range(40) if t not in starts]].ne(0).all()
