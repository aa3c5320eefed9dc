"""The plain-Triton kernels against the reference: on a GPU where there is one, else under Triton's interpreter.

The interpreter is chosen when triton is imported, so without a GPU these run only in the process that
`test_triton_interpreter.py` starts; elsewhere they are skipped.
"""

import builtins
import itertools
import math
import os

import pytest
import torch
from palimpsa_surgery.base.errors import KernelUnavailableError
from palimpsa_surgery.kernels.metaplastic import scan as api
from palimpsa_surgery.kernels.metaplastic.types import ScanProblem

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or TRITON_INTERPRET=1"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
DEVICE = "cpu" if INTERPRETED else "cuda"
# fp32 inputs: rounding of sums of a few hundred terms, and of cumulative decays that reach -104 inside a block.
RTOL = 1e-5


class _IntMeta(type):
    def __instancecheck__(cls, x):
        return isinstance(x, builtins.int)


class _Int(metaclass=_IntMeta):
    """`int` that takes arrays of one element, which numpy 2.4 refuses and Triton 3.6's interpreter relies on."""

    def __new__(cls, x=0):
        return builtins.int(x.item() if hasattr(x, "item") else x)


@pytest.fixture(scope="module", autouse=True)
def interpreter_with_new_numpy():
    if not INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    patch = pytest.MonkeyPatch()
    patch.setattr(interpreter, "int", _Int, raising=False)
    yield
    patch.undo()


def make_inputs(B, T, H, P, N, G=1, g=None, rows=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *s: torch.randn(*s, generator=generator)  # noqa: E731
    rand = lambda *s: torch.rand(*s, generator=generator)  # noqa: E731
    g, rows = g or P, rows or B
    log_decay = -rand(B, T, H) * 0.5
    log_decay[:, T // 2] = -1e4
    log_decay[:, T // 3] = -1e-8
    inputs = [
        randn(B, T, G, N),
        randn(B, T, G, N),
        randn(B, T, H, P) * 0.3,
        rand(B, T, H, g) * 0.3,
        log_decay,
        rand(H) + 0.5,
    ]
    return inputs, [randn(rows, H, P, N), rand(rows, H, g, N)]


def outputs_and_gradients(backend, inputs, state, dtype, *, cu=None, variance=False, final=True, device=DEVICE):
    inputs = [x.to(device, dtype).requires_grad_() for x in inputs]
    state = [x.to(device, dtype).requires_grad_() for x in state]
    cu = None if cu is None else torch.tensor(cu, device=device)
    result = api.metaplastic_scan(
        *inputs, initial_state=state or None, cu_seqlens=cu, backend=backend, variance=variance
    )
    shown = [result.output, *(result.state if final else ()), *([result.variance] if variance else [])]
    generator = torch.Generator().manual_seed(7)
    loss = sum((x * torch.randn(x.shape, generator=generator).to(x)).sum() for x in shown)
    return [x.detach().cpu() for x in (*shown, *torch.autograd.grad(loss, inputs + state))]


def relative(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


CASES = {
    "groups, ragged sizes": ({"B": 2, "T": 17, "H": 4, "P": 4, "N": 12, "G": 2}, {}),
    "packed, one document empty, shared betas": (
        {"B": 1, "T": 23, "H": 1, "P": 8, "N": 16, "g": 2, "rows": 3},
        {"cu": [0, 5, 5, 23]},
    ),
    "one beta per head": ({"B": 1, "T": 19, "H": 2, "P": 8, "N": 12, "g": 1}, {}),
    "over a chunk's end": ({"B": 1, "T": 130, "H": 1, "P": 2, "N": 4}, {}),
    "variance": ({"B": 1, "T": 9, "H": 1, "P": 4, "N": 20, "g": 2}, {"variance": True}),
    "one token": ({"B": 1, "T": 1, "H": 1, "P": 4, "N": 16}, {}),
    "wide": ({"B": 1, "T": 3, "H": 1, "P": 20, "N": 40}, {"final": False}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case):
    sizes, options = CASES[case]
    inputs, state = make_inputs(**sizes)
    actual = outputs_and_gradients("triton", inputs, state, torch.float32, **options)
    expected = outputs_and_gradients("reference", inputs, state, torch.float64, device="cpu", **options)
    errors = [relative(a, e) for a, e in zip(actual, expected, strict=True)]
    assert max(errors) < RTOL, errors


def test_without_an_initial_state():
    inputs, _ = make_inputs(1, 5, 2, 4, 8)
    actual = outputs_and_gradients("triton", inputs, [], torch.float32)
    expected = outputs_and_gradients("reference", inputs, [], torch.float64, device="cpu")
    assert max(relative(a, e) for a, e in zip(actual, expected, strict=True)) < RTOL


@pytest.mark.parametrize(("g", "cu"), [(8, [0, 5, 5, 18, 19, 19]), (1, None)], ids=str)
def test_the_decay_of_a_token_without_a_past_has_no_gradient(g, cu):
    """Exactly none where no state precedes a token; every other token's stays right."""
    inputs, _ = make_inputs(1 if cu else 2, 19, 2, 8, 12, g=g)
    actual, expected = (
        outputs_and_gradients(backend, inputs, [], dtype, cu=cu, device=device)[-2]
        for backend, dtype, device in (("triton", torch.float32, DEVICE), ("reference", torch.float64, "cpu"))
    )
    first = [0, 5, 18] if cu else [0]
    assert not actual[:, first].any()
    assert actual.ne(0).sum() > actual.numel() // 2
    assert relative(actual, expected) < RTOL


def test_a_second_derivative_is_refused():
    inputs, _ = make_inputs(1, 2, 1, 4, 8)
    v = inputs[2].to(DEVICE).requires_grad_()
    others = [x.to(DEVICE) for x in (*inputs[:2], *inputs[3:])]
    output = api.metaplastic_scan(*others[:2], v, *others[2:], backend="triton").output
    (grad,) = torch.autograd.grad((output**2).sum(), v, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_slabs_of_heads_change_nothing(monkeypatch):
    from palimpsa_surgery.kernels.metaplastic import triton_backward

    inputs, state = make_inputs(1, 3, 4, 4, 8, G=2)
    whole = outputs_and_gradients("triton", inputs, state, torch.float32)
    monkeypatch.setattr(triton_backward, "SLAB_BYTES", 1)
    assert triton_backward.slab_heads(4, 2, 100) == [(0, 1), (1, 1), (2, 1), (3, 1)]
    for a, b in zip(whole, outputs_and_gradients("triton", inputs, state, torch.float32), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("heads", "groups", "room", "expected"), [
    (8, 2, 100, [(0, 8)]),
    (8, 2, 5, [(0, 4), (4, 4)]),
    (6, 2, 2, [(0, 2), (2, 1), (3, 2), (5, 1)]),
        (80, 1, 60, [(0, 40), (40, 40)]),
])  # fmt: skip
def test_a_slab_holds_whole_groups_or_one(heads, groups, room, expected, monkeypatch):
    from palimpsa_surgery.kernels.metaplastic import triton_backward

    monkeypatch.setattr(triton_backward, "SLAB_BYTES", room * 10)
    assert triton_backward.slab_heads(heads, groups, 10) == expected


@pytest.mark.parametrize("g", [8, 2, 1])
@pytest.mark.parametrize("variance", [False, True])
def test_step_writes_strided_states_in_place(g, variance):
    inputs, state = make_inputs(2, 1, 4, 8, 12, G=2, g=g)
    one = [x[:, 0] for x in inputs[:5]]
    expected_state = [x.double() for x in state]
    expected = api.metaplastic_step(
        *(x.double() for x in one), inputs[5].double(), expected_state, backend="reference", variance=True
    )
    # One tensor holds both states of a layer, so J is a strided view of it.
    both = torch.zeros(2, 2, 4, 8, 12, device=DEVICE)
    M, J = both[:, 0], both[:, 1, :, :g]
    M.copy_(state[0])
    J.copy_(state[1])
    result = api.metaplastic_step(
        *(x.to(DEVICE) for x in one), inputs[5].to(DEVICE), (M, J), backend="triton", variance=variance
    )
    output, var = result if variance else (result, None)
    assert relative(output.cpu(), expected[0]) < 1e-6
    assert relative(M.cpu(), expected_state[0]) < 1e-6
    assert relative(J.cpu(), expected_state[1]) < 1e-6
    if variance:
        assert relative(var.cpu(), expected[1]) < 1e-6
    assert both[:, 1, :, g:].eq(0).all()


def test_what_it_cannot_take_is_said():
    problem = ScanProblem(torch.float32, 4, 300, 4)
    with pytest.raises(KernelUnavailableError, match="state sizes up to 256, not 300"):
        api.METAPLASTIC_SCAN.resolve("triton", DEVICE, problem)
    with pytest.raises(KernelUnavailableError, match="not float64"):
        api.METAPLASTIC_SCAN.resolve("triton", DEVICE, problem._replace(state_size=16, dtype=torch.float64))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e9])
def test_segments_undo_no_more_than_rounding_bears(scale):
    gluon_backward = pytest.importorskip("palimpsa_surgery.kernels.metaplastic.gluon_backward")
    T, H, G, N, P, nats = 50, 3, 1, 8, 4, 11.0
    torch.manual_seed(0)
    log_decay = -torch.rand(T, H, device=DEVICE) * torch.tensor([1e-4, 0.5, 20.0], device=DEVICE)
    k = torch.randn(T, G, N, device=DEVICE) * scale**0.5
    beta, prior = torch.rand(T, H, P, device=DEVICE), torch.rand(H, device=DEVICE)
    growth, within, entry = (torch.full(s, float("nan"), device=DEVICE) for s in ((T, H), (T, H), (1, H, T + 2)))
    cuts = torch.zeros(1, H, T + 2, dtype=torch.int32, device=DEVICE)
    table = torch.tensor([[0, T, 0]], dtype=torch.int32, device=DEVICE)
    gluon_backward.growth_kernel[(T,)](k, beta, growth, H, G, N, P, 4, N, P)
    expected = k.square().amax(2) * beta.amax(2)
    torch.testing.assert_close(growth, expected)
    gluon_backward.segments_kernel[(1,)](
        log_decay, growth, prior, within, entry, cuts, table, H, T, nats, math.exp(nats), 4
    )
    for h in range(H):
        n, *edges = cuts[0, h].tolist()
        edges = edges[: n + 1]
        assert edges[0] == 0
        assert edges[-1] == T
        assert n == T if scale == 1e9 else n < T
        for first, last in itertools.pairwise(edges):
            assert last > first
            total = log_decay[first + 1 : last, h].double().cumsum(0)
            assert (total >= -nats * (1 + 1e-6)).all()
            undone = (growth[first + 1 : last, h].double() * (-total).exp()).sum()
            assert undone <= prior[h] * math.exp(nats) * (1 + 1e-6)
            torch.testing.assert_close(within[first + 1 : last, h].double(), total, rtol=1e-5, atol=1e-5)
