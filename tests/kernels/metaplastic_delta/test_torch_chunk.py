"""The chunk form against the loop: values, both states, all nine gradients, documents, carried states, memory."""

import itertools

import pytest
import torch
from palimpsa_surgery.kernels.metaplastic_delta import torch_chunk
from palimpsa_surgery.kernels.metaplastic_delta.scan import metaplastic_delta_scan

LENGTHS = [1, 2, 3, 15, 16, 17, 31, 33, 255, 256, 257]
FP64, FP32, FP32_GRAD = 1e-12, 1e-5, 1e-4  # relative L2


def args(p):
    return p.q, p.k, p.v, p.b, p.beta, p.log_decay, p.prior


def compare(relative, got, want, forward, backward):
    for name, value in want.items():
        assert torch.isfinite(got[name]).all(), name
        assert relative(got[name], value) < (backward if name.startswith("d ") else forward), name


@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize("T", LENGTHS)
def test_equals_the_loop_at_every_length_with_all_decays_mixed(problem, cast, relative, results, T, per_key):
    """Decays from 1e-8 to 1e4 nats per token, carried states, borders of blocks and chunks inside the sequence."""
    p = problem(T, H=2, G=1, per_key=per_key, seed=T)
    want = results(p, "reference")
    compare(relative, results(p, "torch"), want, FP64, FP64)
    compare(relative, results(cast(p, torch.float32), "torch"), want, FP32, FP32_GRAD)


@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize(("H", "G", "P", "N"), [(4, 1, 8, 4), (4, 2, 1, 7), (4, 4, 3, 1), (6, 3, 5, 9), (1, 1, 2, 16)])
@pytest.mark.parametrize("B", [1, 3])
def test_groups_of_heads_and_sizes(problem, relative, results, B, H, G, P, N, per_key):
    p = problem(37, B=B, H=H, G=G, P=P, N=N, per_key=per_key)
    compare(relative, results(p, "torch"), results(p, "reference"), FP64, FP64)


@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize("nats", [1e-8, 1e-3, 1.0, 50.0, 200.0, 1e4])
def test_one_decay_throughout(problem, cast, relative, results, nats, per_key):
    p = problem(35, H=2, per_key=per_key)
    p.log_decay = torch.full_like(p.log_decay, -nats)
    compare(relative, results(cast(p, torch.float32), "torch"), results(p, "reference"), FP32, FP32_GRAD)


@pytest.mark.parametrize("per_key", [False, True])
def test_a_total_loss_beside_mild_decays_costs_no_digits(problem, cast, relative, results, per_key):
    p = problem(48, H=1, G=1, per_key=per_key, decays=(-4, -2))
    p.log_decay[:, ::7] = -1e4
    compare(relative, results(cast(p, torch.float32), "torch"), results(p, "reference"), FP32, FP32_GRAD)


@pytest.mark.parametrize("per_key", [False, True])
def test_minus_infinity_forgets_everything(problem, results, per_key):
    p = problem(20, per_key=per_key, decays=(-3, -1))
    p.log_decay[:, 9] = -float("inf")
    got = results(p, "torch")
    assert all(torch.isfinite(x).all() for x in got.values())
    alone = metaplastic_delta_scan(*(x[:, 9:] for x in args(p)[:6]), p.prior, backend="torch")
    assert torch.allclose(got["output"][:, 9:], alone.output, rtol=1e-12)


@pytest.mark.parametrize("per_key", [False, True])
def test_gradcheck(problem, per_key, monkeypatch):
    monkeypatch.setattr(torch_chunk, "BLOCK", 3)
    monkeypatch.setattr(torch_chunk, "KEPT_EVERY", 6)
    p = problem(8, H=2, G=1, P=2, N=2, per_key=per_key, decays=(-3, 1))
    inputs = [x.requires_grad_() for x in (*args(p), p.S0, p.J0)]

    def run(*x):
        out = metaplastic_delta_scan(*x[:7], initial_state=x[7:], backend="torch")
        return out.output, *out.state

    assert torch.autograd.gradcheck(run, inputs, eps=1e-7, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("which", ["output", "S", "J"])
def test_gradient_through_one_result_alone(problem, which):
    p = problem(37, decays=(-4, 1))
    grads = {}
    for name in ("torch", "reference"):
        x = [t.clone().requires_grad_() for t in (*args(p), p.S0, p.J0)]
        out = metaplastic_delta_scan(*x[:7], initial_state=x[7:], backend=name)
        y = {"output": out.output, "S": out.state.S, "J": out.state.J}[which]
        grads[name] = torch.autograd.grad((y * y).sum(), x, materialize_grads=True)
    for a, b in zip(grads["torch"], grads["reference"], strict=True):
        assert (a - b).norm() <= FP64 * b.norm() + 1e-14


@pytest.mark.parametrize("name", ["q", "k", "v", "b", "beta", "log_decay", "prior", "S0", "J0"])
def test_each_input_alone_may_train(problem, relative, name):
    p, got = problem(20, decays=(-3, 0)), {}
    for backend in ("torch", "reference"):
        x = getattr(p, name).clone().requires_grad_()
        one = problem(20, decays=(-3, 0))
        setattr(one, name, x)
        out = metaplastic_delta_scan(*args(one), initial_state=(one.S0, one.J0), backend=backend)
        got[backend] = torch.autograd.grad(out.output.square().sum(), x)[0]
    assert relative(got["torch"], got["reference"]) < FP64


@pytest.mark.parametrize("cuts", [[1], [17], [16, 33], [1, 2, 40]], ids=str)
def test_a_carried_state_continues_the_sequence(problem, relative, cuts):
    """Outputs and gradients, the gradient flowing back through the states that pieces hand on."""
    p = problem(50, B=2, decays=(-4, 1))

    def run(bounds):
        x = [y.clone().requires_grad_() for y in (*args(p), p.S0, p.J0)]
        state, outputs = x[7:], []
        for a, b in bounds:
            out = metaplastic_delta_scan(*(y[:, a:b] for y in x[:6]), x[6], initial_state=state, backend="torch")
            state = out.state
            outputs.append(out.output)
        y = torch.cat(outputs, 1)
        loss = (y * y).sum() + (state[0] ** 3).sum() + (state[1] ** 2).sum()
        return y, *state, *torch.autograd.grad(loss, x)

    whole, pieces = run([(0, 50)]), run(list(itertools.pairwise([0, *cuts, 50])))
    for a, b in zip(pieces, whole, strict=True):
        assert relative(a, b) < FP64


@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize("lengths", [[50], [1] * 9, [1, 0, 31, 2, 16], [17, 16, 15, 1, 300], [0, 5, 0]], ids=str)
def test_packed_documents_equal_separate_ones(problem, relative, results, lengths, per_key):
    """The loop runs them one by one: outputs, final states and every gradient, an initial state per document."""
    p = problem(sum(lengths), rows=len(lengths), per_key=per_key)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    want = results(p, "reference", cu_seqlens=cu)
    compare(relative, results(p, "torch", cu_seqlens=cu), want, FP64, FP64)


def test_a_document_sees_nothing_of_its_neighbors(problem):
    p = problem(30, dtype=torch.float32)
    cu, inputs = torch.tensor([0, 11, 30]), [x.clone() for x in args(p)]
    clean = metaplastic_delta_scan(*inputs, cu_seqlens=cu, backend="torch").output
    inputs[2][:, :11] = float("nan")
    dirty = metaplastic_delta_scan(*inputs, cu_seqlens=cu, backend="torch").output
    assert torch.equal(clean[:, 11:], dirty[:, 11:])
    assert dirty[:, :11].isnan().any()


def test_rows_in_several_tiles(problem, relative, results, monkeypatch):
    p = problem(300, B=5, rows=5, H=2, G=1, decays=(-4, 0))
    monkeypatch.setattr(torch_chunk, "_TILE_ELEMENTS", 2 * 2 * 5 * 16 * 16)
    compare(relative, results(p, "torch"), results(p, "reference"), FP64, FP64)


def test_nothing_is_read_before_it_was_written(problem, results):
    """torch fills fresh memory with NaN here: outputs, states and gradients hold none."""
    lengths = [20, 3, 17, 300]
    p = problem(sum(lengths), rows=4, dtype=torch.float32, decays=(-3, 0))
    cu = torch.tensor([0, *lengths]).cumsum(0)
    plain = results(p, "torch", cu_seqlens=cu)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        filled = results(p, "torch", cu_seqlens=cu)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(filled[name], plain[name]) for name in plain)


@pytest.mark.parametrize("T", [256, 512, 1024])
def test_memory_for_backward_is_the_states_at_chunk_borders(problem, T):
    p, kept = problem(T, H=2, G=1, dtype=torch.float32, decays=(-4, 0)), []
    x = [y.requires_grad_() for y in args(p)]
    inputs = {y.data_ptr() for y in x}

    def pack(y):
        if y.data_ptr() not in inputs:
            kept.append(y.numel())
        return y

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        metaplastic_delta_scan(*x, backend="torch")
    assert sum(kept) == (T // torch_chunk.KEPT_EVERY - 1) * 2 * (3 * 5 + 5)


def test_without_gradients_nothing_is_kept(problem):
    p = problem(600, dtype=torch.float32, decays=(-4, 0))
    assert metaplastic_delta_scan(*args(p), backend="torch").output.grad_fn is None


def test_second_derivatives_are_refused(problem):
    p = problem(5)
    p.v.requires_grad_()
    (d,) = torch.autograd.grad(metaplastic_delta_scan(*args(p)).output.square().sum(), p.v, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        d.sum().backward()


def test_autocast_does_not_reach_inside(problem):
    p = problem(40, dtype=torch.float32, decays=(-3, 0))
    x = [y.requires_grad_() for y in args(p)]

    def run():
        out = metaplastic_delta_scan(*x, backend="torch").output
        return out.detach(), *torch.autograd.grad(out.square().sum(), x)

    plain = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run()
    assert all(torch.equal(a, b) for a, b in zip(cast, plain, strict=True))


def test_inputs_that_are_not_contiguous_and_are_not_written(problem):
    p = problem(33, B=2, dtype=torch.float32)
    before = [x.clone() for x in vars(p).values()]
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in args(p)[:6]]
    plain = metaplastic_delta_scan(*args(p), initial_state=(p.S0, p.J0), backend="torch")
    view = metaplastic_delta_scan(*strided, p.prior, initial_state=(p.S0, p.J0), backend="torch")
    assert torch.equal(plain.output, view.output)
    assert all(torch.equal(a, b) for a, b in zip(before, vars(p).values(), strict=True))


@pytest.mark.parametrize("lengths", [[40], [1, 16, 0, 23]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_forgets_nothing_has_no_gradient_for_it(problem, dtype, lengths):
    """At a document's first token there is no state to forget: exactly zero, not rounding."""
    p = problem(40, dtype=dtype, decays=(-3, 0))
    p.log_decay.requires_grad_()
    cu = torch.tensor([0, *lengths]).cumsum(0)
    out = metaplastic_delta_scan(*args(p), cu_seqlens=cu, backend="torch")
    (d,) = torch.autograd.grad(out.output.square().sum() + out.state.S.sum() + out.state.J.sum(), p.log_decay)
    starts = [start for start, n in zip(cu.tolist(), lengths, strict=False) if n]
    assert not d[:, starts].any()
    assert d[:, [t for t in range(40) if t not in starts]].ne(0).all()
