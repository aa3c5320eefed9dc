"""The oracle against the equations of the paper, here in their first form (importance and memory)."""

import pytest
import torch
from palimpsa_surgery.kernels.metaplastic.scan import metaplastic_scan, metaplastic_step


def paper(p):
    """I and mu as the paper writes them, in fp64, from an empty memory: outputs and final (M, J)."""
    (B, T, H, P), N, g = p.v.shape, p.k.shape[3], p.beta.shape[3]
    prior = p.prior.view(1, H, 1, 1)
    importance, mu = prior.expand(B, H, P, N), p.v.new_zeros(B, H, P, N)
    outputs = []
    for t in range(T):
        q, k = (x[:, t].repeat_interleave(H // x.shape[2], 1).unsqueeze(2) for x in (p.q, p.k))
        a = p.log_decay[:, t].exp().view(B, H, 1, 1)
        beta = p.beta[:, t].repeat_interleave(P // g, 2).unsqueeze(3)
        new = a * importance + (1 - a) * prior + beta * k**2
        mu = a * importance / new * mu + p.v[:, t].unsqueeze(3) * k / new
        importance = new
        outputs.append((mu * q).sum(-1))
    return torch.stack(outputs, 1), mu * importance, importance - prior


@pytest.mark.parametrize("g", [1, 2, 8])
@pytest.mark.parametrize("G", [1, 4])
def test_follows_the_equations_of_the_paper(problem, relative, g, G):
    p = problem(19, B=2, G=G, g=g, decays=(-3, 1))
    out = metaplastic_scan(p.q, p.k, p.v, p.beta, p.log_decay, p.prior, backend="reference")
    output, M, J = paper(p)
    assert relative(out.output, output) < 1e-12
    assert relative(out.state.M, M) < 1e-12
    assert relative(out.state.J.repeat_interleave(8 // g, 2), J) < 1e-12  # a group's channels share it


def test_without_importance_it_is_mamba2(problem, relative):
    p = problem(11, decays=(-3, 1))
    out = metaplastic_scan(p.q, p.k, p.v, 0 * p.beta, p.log_decay, torch.ones_like(p.prior), backend="reference")
    M, outputs = p.v.new_zeros(1, 4, 8, 6), []
    for t in range(11):
        q, k = (x[:, t].repeat_interleave(2, 1).unsqueeze(2) for x in (p.q, p.k))
        M = p.log_decay[:, t].exp().view(1, 4, 1, 1) * M + p.v[:, t].unsqueeze(3) * k
        outputs.append((M * q).sum(-1))
    assert relative(out.output, torch.stack(outputs, 1)) < 1e-14
    assert not out.state.J.any()


@pytest.mark.parametrize("g", [1, 2, 8])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_steps_equal_a_scan(problem, relative, backend, g):
    p = problem(9, B=2, g=g)
    inputs = (p.q, p.k, p.v, p.beta, p.log_decay)
    whole = metaplastic_scan(*inputs, p.prior, initial_state=(p.M0, p.J0), variance=True, backend="reference")
    # The two states as views of one cache tensor, as a model keeps them.
    cache = p.M0.new_zeros(2, 2, *p.M0.shape[1:])
    state = (cache[:, 0], cache[:, 1, :, :g])
    state[0].copy_(p.M0)
    state[1].copy_(p.J0)
    for t in range(9):
        y, var = metaplastic_step(*(x[:, t] for x in inputs), p.prior, state, backend=backend, variance=True)
        assert relative(y, whole.output[:, t]) < 1e-12
        assert relative(var, whole.variance[:, t]) < 1e-12
    assert relative(state[0], whole.state.M) < 1e-12
    assert relative(state[1], whole.state.J) < 1e-12
    assert torch.equal(cache[:, 1, :, g:], torch.zeros_like(cache[:, 1, :, g:]))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_padding_leaves_the_states_as_they_are(problem, backend):
    p = problem(5, dtype=torch.float32)
    zero = [torch.zeros_like(x) for x in (p.q, p.k, p.v, p.beta, p.log_decay)]
    out = metaplastic_scan(*zero, p.prior, initial_state=(p.M0, p.J0), backend=backend)
    assert torch.equal(out.state.M, p.M0)
    assert torch.equal(out.state.J, p.J0)
    assert not out.output.any()
    M, J = p.M0.clone(), p.J0.clone()
    metaplastic_step(*(x[:, 0] for x in zero), p.prior, (M, J), backend=backend)
    assert torch.equal(M, p.M0)
    assert torch.equal(J, p.J0)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_half_precision_computes_in_fp32(problem, cast, relative, backend):
    p = cast(problem(40, g=8, decays=(-3, 0)), torch.bfloat16)
    exact = cast(p, torch.float64)
    args = (p.q, p.k, p.v, p.beta, p.log_decay.float(), p.prior.float())
    out = metaplastic_scan(*args, backend=backend)
    want = metaplastic_scan(*(x.double() for x in args), backend="reference")
    assert exact.q.dtype == torch.float64
    assert out.output.dtype == torch.bfloat16
    assert out.state.M.dtype == out.state.J.dtype == torch.float32
    assert relative(out.state.M, want.state.M) < 1e-6  # fp32
    assert relative(out.output, want.output) < 3e-3  # the rounding of the output to bf16


@pytest.mark.parametrize("cu", [None, [0, 17, 17, 69, 70, 70]], ids=str)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_the_decay_of_a_token_without_a_past_has_no_gradient(problem, cast, backend, cu):
    p = cast(problem(70, B=1 if cu else 2, decays=(-3, 0)), torch.float32)
    p.log_decay.requires_grad_()
    bounds = None if cu is None else torch.tensor(cu)
    out = metaplastic_scan(p.q, p.k, p.v, p.beta, p.log_decay, p.prior, cu_seqlens=bounds, backend=backend)
    loss = out.output.square().sum() + out.state.M.sum() + out.state.J.sum()
    found = torch.autograd.grad(loss, p.log_decay)[0]
    first = torch.zeros(70, dtype=torch.bool)
    first[[0, 17, 69] if cu else [0]] = True
    assert not found[:, first].any()
    assert found[:, ~first].all()
