"""`docs/framework.md` as tests in fp64: the filter and the operators against each model's published recurrence."""

import published
import pytest
import torch
from bayesian_filter import AFTER, BEFORE, FULL, KEPT, RESET, bayesian_filter
from palimpsa_surgery.kernels.metaplastic.scan import metaplastic_scan
from palimpsa_surgery.kernels.metaplastic_delta.scan import metaplastic_delta_scan
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

T, N, P = 40, 8, 6
FP64, FP32 = 1e-12, 1e-6  # relative L2
_r = torch.Generator().manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, generator=_r, dtype=torch.float64)


def rand(*shape):
    return torch.rand(*shape, generator=_r, dtype=torch.float64)


q, v, any_key = randn(T, N), randn(T, P), randn(T, N)
k = any_key / any_key.norm(dim=1, keepdim=True)
a, b, beta = 0.7 + 0.3 * rand(T), 0.05 + 0.9 * rand(T), 2 * rand(T)
per_channel = rand(T, P)
one, off = torch.ones_like(a), torch.zeros_like(a)
axis = torch.eye(N, dtype=torch.float64)[torch.randint(0, N, (T,), generator=_r)]
long_axis = axis * (1 + rand(T, 1))
orthogonal = torch.linalg.qr(randn(N, N))[0]
odds = b / (1 - b)
a_key = 0.7 + 0.3 * rand(T, N)


def scan(q, k, v, beta, a, prior=1.0):
    """The metaplastic scan of one head; beta [T], or [T, P]."""
    beta = beta if beta.dim() == 2 else beta[:, None]
    inputs = (x[None, :, None] for x in (q, k, v, beta, a.log()))
    return metaplastic_scan(*inputs, torch.tensor([prior], dtype=q.dtype), backend="torch").output[0, :, 0]


def delta(b, beta, a):
    """The metaplastic delta rule of one head with prior 1; a [T], or [T, N]."""
    inputs = (x[None, :, None] for x in (q, k, v, b, beta, a.log()))
    return metaplastic_delta_scan(*inputs, one[:1], backend="torch").output[0, :, 0]


def filters_gain():
    """The write gate at which the operator's gain is the filter's: b / (1 - b + b k.(k / I')), I' after forgetting."""
    J, gates = torch.zeros_like(k[0]), []
    for t in range(T):
        gates.append(b[t] / (1 - b[t] + b[t] * (k[t].square() / (1 + a[t] * J)).sum()))
        J = a[t] * J + odds[t] * k[t].square()
    return torch.stack(gates)


def belief(kept, k=k, a=a, beta=b, prior=1.0, q=q, v=v):
    return bayesian_filter(q, k, v, a, beta, kept, prior)[0]


def transformers_rule(q, k, v, a, b):
    """transformers' own loop, in fp32; it scales the queries."""
    inputs = (x[None, :, None] for x in (q * N**0.5, k, v))
    gates = {"g": a.log()[None, :, None], "beta": b[None, :, None]}
    return qwen3_next.torch_recurrent_gated_delta_rule(*inputs, **gates)[0][0, :, 0]


# Which model: what this framework gives, what its paper says.
EXACT = {
    "Mamba2": lambda: (
        scan(q, k, b[:, None] * v, off, torch.exp(-0.4 * b)),
        published.mamba2(v, b, torch.tensor(-0.4, dtype=torch.float64), k, q),
    ),
    "simple gated linear attention": lambda: (
        scan(q, k, v, off, a),
        published.gated_linear_attention(q, k, v, a),
    ),
    "RetNet": lambda: (scan(q, k, v, off, 0.9 * one), published.retention(q, k, v, 0.9)),
    "lightning attention": lambda: (
        scan(q, k, v, off, torch.exp(-0.2 * one)),
        published.lightning(q, k, v, torch.tensor(0.2, dtype=torch.float64)),
    ),
    "linear attention": lambda: (scan(q, k, v, off, one), published.linear_attention(q, k, v)),
    "Palimpsa, operator": lambda: (
        scan(q, any_key, v, per_channel, a, 0.6),
        published.palimpsa(q, any_key, v, a, per_channel, 0.6),
    ),
    "Palimpsa, filter": lambda: (
        belief(BEFORE, any_key, prior=0.6),
        published.palimpsa(q, any_key, b[:, None] * v, a, b[:, None].expand(T, P), 0.6),
    ),
    "MesaNet": lambda: (belief(FULL, any_key, prior=0.6), published.mesa(q, any_key, v, a, b, 0.6)),
    "Palimpsa = MesaNet, keys on axes": lambda: (
        scan(q, long_axis, b[:, None] * v, b, a, 0.6),
        published.mesa(q, long_axis, v, a, b, 0.6),
    ),
    "Gated DeltaNet": lambda: (belief(RESET, beta=odds), published.gated_delta_net(q, k, v, a, b)),
    "DeltaNet": lambda: (belief(RESET, a=one, beta=odds), published.delta_net(q, k, v, b)),
    "Longhorn, implicit update": lambda: (
        belief(RESET, any_key, one, beta),
        published.longhorn_implicit(q, any_key, v, beta),
    ),
    "Longhorn as published, keys on axes": lambda: (
        belief(RESET, long_axis, one, beta),
        published.longhorn(q, long_axis, v, beta),
    ),
    "delta rule with importance, the filter's gain": lambda: (
        delta(filters_gain(), odds, a),
        belief(AFTER, beta=odds),
    ),
    "delta rule with importance off = Gated DeltaNet": lambda: (
        delta(b, off, a),
        published.gated_delta_net(q, k, v, a, b),
    ),
    "delta rule with importance off = Kimi Delta Attention": lambda: (
        delta(b, off, a_key),
        published.gated_delta_net(q, k, v, a_key, b),
    ),
    "Palimpsa-D off = Gated DeltaNet, orthogonal keys": lambda: (
        scan(q[:N], orthogonal, b[:N, None] * v[:N], off[:N], a[:N]),
        published.gated_delta_net(q[:N], orthogonal, v[:N], a[:N], b[:N]),
    ),
}


@pytest.mark.parametrize("model", EXACT)
def test_a_special_case_is_exact(relative, model):
    ours, theirs = EXACT[model]()
    assert relative(ours, theirs) < FP64


def test_the_rule_of_transformers_is_a_special_case_to_its_own_precision(relative):
    assert relative(transformers_rule(q, k, v, a, b), belief(RESET, beta=odds)) < FP32


# Which model: what approximates it, what it is, how far apart they are on these inputs (the figures of the page).
APPROXIMATE = {
    "Palimpsa for MesaNet": lambda: (belief(BEFORE), published.mesa(q, k, v, a, b, 1.0), 0.26),
    "Longhorn as published for its implicit update": lambda: (
        published.longhorn(q, any_key, v, beta),
        published.longhorn_implicit(q, any_key, v, beta),
        0.59,
    ),
    "Palimpsa-D off for Gated DeltaNet": lambda: (
        scan(q, k, b[:, None] * v, off, a),
        published.gated_delta_net(q, k, v, a, b),
        0.23,
    ),
    "diagonal before the mean, for the full filter at a strong gate": lambda: (
        belief(BEFORE, beta=odds),
        belief(FULL, beta=odds),
        1.03,
    ),
    "diagonal after the mean, for the full filter at a strong gate": lambda: (
        belief(AFTER, beta=odds),
        belief(FULL, beta=odds),
        0.46,
    ),
}


@pytest.mark.parametrize("model", APPROXIMATE)
def test_an_approximation_is_as_far_off_as_the_page_says(relative, model):
    ours, theirs, distance = APPROXIMATE[model]()
    assert relative(ours, theirs) == pytest.approx(distance, abs=0.01)


@pytest.mark.parametrize("kept", KEPT)
def test_without_evidence_the_filter_stays_at_the_prior(kept):
    output, precision = bayesian_filter(q, k, v, a, off, kept, 0.6)
    assert not output.any()
    assert torch.allclose(precision, torch.full_like(precision, 0.6), rtol=FP64)
