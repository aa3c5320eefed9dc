"""The operator against published recurrences and its filter; steps, padding, precision, in both backends."""

import published
import pytest
import torch
from bayesian_filter import AFTER, bayesian_filter
from palimpsa_surgery.kernels.metaplastic_delta.scan import metaplastic_delta_scan, metaplastic_delta_step

BACKENDS = ["reference", "torch"]


def each_backend(function):
    return pytest.mark.parametrize("backend", BACKENDS)(function)


def heads(p):
    """q, k, v, b, decay of every head of every sequence, alone."""
    for i in range(p.v.shape[0]):
        for h in range(p.v.shape[2]):
            group = h // (p.v.shape[2] // p.k.shape[2])
            alone = p.q[i, :, group], p.k[i, :, group], p.v[i, :, h], p.log_decay[i, :, h].exp(), p.b[i, :, h]
            yield i, h, alone


@each_backend
@pytest.mark.parametrize("per_key", [False, True], ids=["Gated DeltaNet", "Kimi Delta Attention"])
def test_without_importance_it_is_the_gated_delta_rule(problem, relative, backend, per_key):
    """The identity start, with write gates up to 2."""
    p = problem(40, B=2, per_key=per_key, decays=(-3, 0))
    one = torch.ones_like(p.prior)
    out = metaplastic_delta_scan(p.q, p.k, p.v, p.b, 0 * p.beta, p.log_decay, one, backend=backend)
    for i, h, alone in heads(p):
        assert relative(out.output[i, :, h], published.gated_delta_net(*alone)) < 1e-12
    assert not out.state.J.any()


@each_backend
def test_with_the_filters_gain_it_is_the_filter_with_the_diagonal_taken_after_the_mean(problem, relative, backend):
    """The Kalman gain is the relaxed one at the write gate b / (1 - b + b k.(k / I')), which knows importance alone."""
    p = problem(40, decays=(-3, -1))
    b = 0.05 + 0.45 * p.b
    odds, q, k = b / (1 - b), *(x.repeat_interleave(2, 2) for x in (p.q, p.k))
    forgotten, J = [], torch.zeros_like(p.J0)
    for t in range(40):
        a = p.log_decay[:, t].exp().unsqueeze(-1)
        forgotten.append(p.prior.unsqueeze(-1) + a * J)
        J = a * J + odds[:, t].unsqueeze(-1) * k[:, t].square()
    gate = b / (1 - b + b * (k.square() / torch.stack(forgotten, 1)).sum(-1))
    out = metaplastic_delta_scan(p.q, p.k, p.v, gate, odds, p.log_decay, p.prior, backend=backend)
    for h in range(4):
        one = q[0, :, h], k[0, :, h], p.v[0, :, h], p.log_decay[0, :, h].exp(), odds[0, :, h]
        output, precision = bayesian_filter(*one, AFTER, p.prior[h].item())
        assert relative(out.output[0, :, h], output) < 1e-12
        assert relative(p.prior[h] + out.state.J[0, h], precision[-1]) < 1e-12


@each_backend
def test_it_is_a_recurrence_diagonal_plus_low_rank(problem, relative, backend):
    """S = S diag(w) - (S w k) K^T + v K^T, which kernels for such recurrences run."""
    p = problem(30, H=2, G=2, decays=(-3, 0))
    out = metaplastic_delta_scan(p.q, p.k, p.v, p.b, p.beta, p.log_decay, p.prior, backend=backend)
    for h in range(2):
        S, J, outputs = torch.zeros_like(p.S0[0, h]), torch.zeros_like(p.J0[0, h]), []
        for t in range(30):
            a, k = p.log_decay[0, t, h].exp(), p.k[0, t, h]
            w = a * (p.prior[h] + J) / (p.prior[h] + a * J)
            K = p.b[0, t, h] * k / (p.prior[h] + a * J)
            S = S @ torch.diag(w) - torch.outer(S @ (w * k), K) + torch.outer(p.v[0, t, h], K)
            J = a * J + p.beta[0, t, h] * k**2
            outputs.append(S @ p.q[0, t, h])
        assert relative(out.output[0, :, h], torch.stack(outputs)) < 1e-12


@each_backend
@pytest.mark.parametrize("per_key", [False, True])
def test_steps_equal_a_scan(problem, relative, backend, per_key):
    p = problem(9, B=2, per_key=per_key)
    inputs = (p.q, p.k, p.v, p.b, p.beta, p.log_decay)
    whole = metaplastic_delta_scan(*inputs, p.prior, initial_state=(p.S0, p.J0), backend="reference")
    # The two states as views of one cache tensor with importance as one more channel.
    cache = torch.cat([p.S0, p.J0.unsqueeze(2)], 2)
    state = (cache[:, :, :-1], cache[:, :, -1])
    for t in range(9):
        y = metaplastic_delta_step(*(x[:, t] for x in inputs), p.prior, state, backend=backend)
        assert relative(y, whole.output[:, t]) < 1e-12
    assert relative(cache[:, :, :-1], whole.state.S) < 1e-12
    assert relative(cache[:, :, -1], whole.state.J) < 1e-12


@each_backend
def test_padding_leaves_the_states_as_they_are(problem, backend):
    p = problem(5, dtype=torch.float32)
    zero = [torch.zeros_like(x) for x in (p.q, p.k, p.v, p.b, p.beta, p.log_decay)]
    out = metaplastic_delta_scan(*zero, p.prior, initial_state=(p.S0, p.J0), backend=backend)
    assert torch.equal(out.state.S, p.S0)
    assert torch.equal(out.state.J, p.J0)
    S, J = p.S0.clone(), p.J0.clone()
    metaplastic_delta_step(*(x[:, 0] for x in zero), p.prior, (S, J), backend=backend)
    assert torch.equal(S, p.S0)
    assert torch.equal(J, p.J0)


@each_backend
def test_half_precision_computes_in_fp32(problem, relative, backend):
    p = problem(40, decays=(-3, 0))
    args = [x.bfloat16() for x in (p.q, p.k, p.v, p.b, p.beta)] + [p.log_decay.float(), p.prior.float()]
    out = metaplastic_delta_scan(*args, backend=backend)
    want = metaplastic_delta_scan(*(x.double() for x in args), backend="reference")
    assert out.output.dtype == torch.bfloat16
    assert out.state.S.dtype == out.state.J.dtype == torch.float32
    assert relative(out.state.S, want.state.S) < 1e-5  # fp32
    assert relative(out.output, want.output) < 3e-3  # the rounding of the output to bf16


@each_backend
def test_a_step_keeps_no_graph(problem, backend):
    p = problem(1)
    inputs = [x[:, 0].requires_grad_() for x in (p.q, p.k, p.v, p.b, p.beta, p.log_decay)]
    assert not metaplastic_delta_step(*inputs, p.prior, (p.S0, p.J0), backend=backend).requires_grad


@each_backend
def test_an_important_key_is_overwritten_less(backend):
    """What the rule is for: after evidence the same contradiction moves the memory less."""
    key, left = torch.tensor([[[[1.0, 0.0]]]]).double(), []
    for evidence in (0.0, 4.0):
        state = (torch.tensor([[[[1.0, 0.0]]]]).double(), torch.tensor([[[evidence, 0.0]]]).double())
        zero, one = torch.zeros(1, 1, 1).double(), torch.ones(1).double()
        args = (key, key, -torch.ones(1, 1, 1, 1).double(), zero + 1, zero, zero, one)
        left.append(metaplastic_delta_scan(*args, initial_state=state, backend=backend).output.item())
    assert left == pytest.approx([-1.0, 1 - 2 / 5])
