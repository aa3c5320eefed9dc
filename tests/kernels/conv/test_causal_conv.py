"""The causal convolution against torch's own, its states at every short length, documents, and its backends."""

import itertools
import sys
import types

import pytest
import torch
from palimpsa_surgery.base.errors import KernelUnavailableError, UsageError
from palimpsa_surgery.kernels import backends
from palimpsa_surgery.kernels.conv.causal_conv import CAUSAL_CONV, causal_conv, causal_conv_step
from palimpsa_surgery.kernels.conv.types import ConvProblem
from torch.nn.functional import conv1d, silu

LENGTHS = [1, 2, 3, 4, 5, 64, 65]


def inputs(T, *, batch=2, C=6, W=4, rows=None, seed=0):
    r = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, T, C, generator=r, dtype=torch.float64)
    weight, bias = (torch.randn(*s, generator=r, dtype=torch.float64) for s in ((C, W), (C,)))
    return x, weight, bias, torch.randn(rows or batch, C, W - 1, generator=r, dtype=torch.float64)


def direct(x, weight, bias, state, activation="silu"):
    """torch's convolution over the earlier inputs and x; the last W - 1 of both."""
    row = torch.cat((state, x.transpose(1, 2)), -1)
    y = conv1d(row, weight.unsqueeze(1), bias, groups=weight.shape[0])
    return (silu(y) if activation else y).transpose(1, 2), row[..., row.shape[2] - weight.shape[1] + 1 :]


def test_every_backend_says_why_it_cannot_run():
    found = CAUSAL_CONV.unavailable("cpu")
    assert list(found) == ["causal_conv1d", "triton", "torch"]
    assert found.pop("torch") is None
    assert all(found.values()), "the others need a GPU"


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("W", [2, 4])
def test_equals_torch_at_every_length_with_its_state(T, W):
    """Shorter than the window too: the final state then keeps some of the initial one."""
    x, weight, bias, state = inputs(T, W=W)
    y, final = causal_conv(x, weight, bias, initial_state=state)
    want, want_final = direct(x, weight, bias, state)
    assert torch.allclose(y, want, rtol=1e-12, atol=1e-12)
    assert torch.equal(final, want_final)
    assert final.is_contiguous()


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("with_bias", [True, False])
def test_bias_and_activation_are_optional(activation, with_bias):
    x, weight, bias, state = inputs(9)
    bias = bias if with_bias else None
    y, _ = causal_conv(x, weight, bias, activation=activation)
    assert torch.allclose(y, direct(x, weight, bias, torch.zeros_like(state), activation)[0], rtol=1e-12, atol=1e-12)


def test_gradients_of_everything():
    x, weight, bias, state = (t.requires_grad_() for t in inputs(5, C=2))
    run = lambda x, w, b, s: causal_conv(x, w, b, initial_state=s)  # noqa: E731
    assert torch.autograd.gradcheck(run, (x, weight, bias, state))


@pytest.mark.parametrize("cuts", [[1], [2, 3], [7, 8, 20]])
def test_pieces_and_steps_equal_one_pass(cuts):
    x, weight, bias, state = inputs(23)
    want, want_final = direct(x, weight, bias, state)
    carried, ys = state, []
    for a, b in itertools.pairwise([0, *cuts, 23]):
        y, carried = causal_conv(x[:, a:b], weight, bias, initial_state=carried)
        ys.append(y)
    assert torch.allclose(torch.cat(ys, 1), want, rtol=1e-12, atol=1e-12)
    assert torch.equal(carried, want_final)
    stepped = state.clone()
    ys = [causal_conv_step(x[:, t], stepped, weight, bias) for t in range(23)]
    assert torch.allclose(torch.stack(ys, 1), want, rtol=1e-12, atol=1e-12)
    assert torch.equal(stepped, want_final)


@pytest.mark.parametrize("lengths", [[9], [1] * 5, [1, 0, 2, 3, 4, 11], [0, 3, 0]], ids=str)
def test_packed_documents_equal_separate_ones(lengths):
    """Outputs, final states and gradients; a document shorter than the window keeps some of its initial state."""
    x, weight, bias, state = (t.requires_grad_() for t in inputs(sum(lengths), batch=1, rows=len(lengths)))
    cu = torch.tensor([0, *lengths]).cumsum(0)
    got = causal_conv(x, weight, bias, initial_state=state, cu_seqlens=cu)
    parts = [
        direct(x[:, a:b], weight, bias, state[i : i + 1]) if b > a else (x[:, :0], state[i : i + 1])
        for i, (a, b) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True))
    ]
    want = torch.cat([y for y, _ in parts], 1), torch.cat([s for _, s in parts])
    back = [torch.randn_like(y) for y in want]
    grads = [torch.autograd.grad(out, (x, weight, bias, state), back) for out in (got, want)]
    for a, b in zip((*got, *grads[0]), (*want, *grads[1]), strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-11)


def test_a_document_sees_nothing_of_its_neighbors():
    x, weight, bias, _ = inputs(10, batch=1)
    cu = torch.tensor([0, 4, 10])
    clean, _ = causal_conv(x, weight, bias, cu_seqlens=cu)
    x[:, :4] = float("nan")
    dirty, final = causal_conv(x, weight, bias, cu_seqlens=cu)
    assert torch.equal(clean[:, 4:], dirty[:, 4:])
    assert torch.isfinite(final[1]).all()


def test_half_precision_computes_in_fp32():
    x, weight, bias, state = (t.bfloat16() for t in inputs(40))
    y, final = causal_conv(x, weight, bias, initial_state=state)
    want, want_final = direct(*(t.double() for t in (x, weight, bias, state)))
    assert y.dtype == final.dtype == torch.bfloat16
    assert torch.allclose(y.double(), want, rtol=4e-3, atol=1e-3)  # one rounding to bf16
    assert torch.equal(final.double(), want_final)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again, _ = causal_conv(x.float(), weight.float(), bias.float(), initial_state=state.float())
    assert torch.allclose(again.double(), want, rtol=1e-5, atol=1e-5)


def test_a_step_writes_a_strided_state_and_keeps_its_dtype():
    x, weight, bias, state = inputs(1)
    cache = torch.zeros(2, 6, 8, dtype=torch.float32)
    view = cache[:, :, 2:5]
    view.copy_(state)
    causal_conv_step(x[:, 0].float(), view, weight.float(), bias.float())
    assert torch.equal(view[..., -1], x[:, 0].float())
    assert not cache[:, :, :2].any()
    assert not cache[:, :, 5:].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(5, 6)}, r"x has shape \[5, 6\]; expected \[B, T, C\]"),
        ({"x": torch.zeros(2, 0, 6)}, r"x has shape \[2, 0, 6\]; expected at least one token"),
        ({"weight": torch.zeros(6, 1, 4)}, r"weight has shape \[6, 1, 4\]; expected \[6, W\]"),
        ({"weight": torch.zeros(5, 4)}, r"weight has shape \[5, 4\]; expected \[6, W\]"),
        ({"weight": torch.zeros(6, 1)}, r"weight has shape \[6, 1\]; expected \[6, W\] with W of at least 2"),
        ({"bias": torch.zeros(5)}, r"bias has shape \[5\]; expected \[6\]"),
        ({"activation": "gelu"}, r"activation is 'gelu'; expected 'silu' or None"),
        ({"initial_state": torch.zeros(2, 6, 4)}, r"initial_state has shape \[2, 6, 4\]; expected \[2, 6, 3\]"),
        ({"cu_seqlens": torch.tensor([0, 5])}, r"cu_seqlens was given with a batch of 2"),
    ],
)
def test_a_wrong_input_is_named_with_both_shapes(change, message):
    x, weight, bias, _ = inputs(5)
    given = {"x": x, "weight": weight, "bias": bias, **change}
    with pytest.raises(UsageError, match=message):
        causal_conv(given.pop("x"), given.pop("weight"), given.pop("bias"), **given)


def test_a_step_needs_its_state():
    x, weight, bias, state = inputs(1)
    with pytest.raises(UsageError, match=r"state has shape \[2, 6, 2\] beside x \[2, 6\]; expected \[B, C, 3\]"):
        causal_conv_step(x[:, 0], state[..., :2], weight, bias)


@pytest.fixture
def backend(monkeypatch, import_anew):
    """Modules over a stand-in for the causal-conv1d package and for the Triton kernels, and the list of their calls."""
    calls = []

    def package(x, weight, bias, *, initial_states, activation):
        calls.append("causal_conv1d")
        assert x.stride(1) == initial_states.stride(1) == 1  # channels last in memory, as it demands
        return direct(x.transpose(1, 2), weight, bias, initial_states, activation)[0].transpose(1, 2)

    def kernel(x, weight, bias, activation, history):
        calls.append("triton")
        return direct(x, weight, bias, history, activation)[0]

    monkeypatch.setitem(sys.modules, "causal_conv1d", types.SimpleNamespace(causal_conv1d_fn=package))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    modules = {"causal_conv1d": import_anew("conv.package_conv"), "triton": types.SimpleNamespace(conv=kernel)}
    return modules, calls


@pytest.mark.parametrize("name", ["causal_conv1d", "triton"])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 1, 1, 3, 9]])
def test_other_backends_get_the_same_meaning(monkeypatch, backend, name, cu_seqlens):
    modules, calls = backend
    rows = 1 if cu_seqlens is None else 4
    x, weight, bias, state = inputs(9, batch=1, rows=rows)
    cu = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    want = causal_conv(x, weight, bias, initial_state=state, cu_seqlens=cu, backend="torch")
    monkeypatch.setattr(CAUSAL_CONV, "choose", lambda *a: modules[name])
    got = causal_conv(x, weight, bias, initial_state=state, cu_seqlens=cu)
    assert calls == [name]
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_which_backend_runs_where(backend, imported):
    pytest.importorskip("triton")
    imported["conv.package_conv"] = backend[0]["causal_conv1d"]
    half = ConvProblem(torch.bfloat16)
    for problem, chosen in (
        (None, "causal_conv1d"),
        (half, "causal_conv1d"),
        (half._replace(dtype=torch.float64), "torch"),
        (half._replace(channels=12), "triton"),
        (half._replace(channels=16, width=5), "triton"),
    ):
        assert CAUSAL_CONV.resolve("auto", "cuda", problem) == chosen
    assert CAUSAL_CONV.resolve("auto", "cpu") == "torch"
    with pytest.raises(KernelUnavailableError, match="'causal_conv1d': it needs a multiple of 8 channels, not 12"):
        CAUSAL_CONV.resolve("causal_conv1d", "cuda", half._replace(channels=12))
    with pytest.raises(UsageError, match="'fft' is unknown for the causal convolution; expected auto, causal_conv1d"):
        CAUSAL_CONV.resolve("fft", "cpu")


def test_a_broken_package_never_stops_the_tool(imported):
    broken = OSError("undefined symbol")
    imported |= {"conv.package_conv": broken, "conv.triton_conv": broken}
    assert CAUSAL_CONV.resolve("auto", "cuda") == "torch"
    reason = "it cannot be imported (OSError: undefined symbol)"
    assert CAUSAL_CONV.unavailable("cuda") == {"causal_conv1d": reason, "triton": reason, "torch": None}


def test_required_kernels_are_never_replaced():
    x, weight, bias, _ = inputs(5)
    backends.set_require_kernels(True)
    try:
        with pytest.raises(KernelUnavailableError, match="none can run the causal convolution on cpu"):
            causal_conv(x, weight, bias)
        assert causal_conv(x, weight, bias, backend="torch")[0].shape == x.shape
    finally:
        backends.set_require_kernels(False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal_conv1d", "triton", "torch"])
def test_every_backend_on_a_gpu(name):
    if CAUSAL_CONV.reason(name, "cuda"):
        pytest.skip(f"{name} cannot run here")
    x, weight, bias, state = (t.float().cuda() for t in inputs(77, C=64))
    y, final = causal_conv(x, weight, bias, initial_state=state, backend=name)
    want, want_final = direct(x, weight, bias, state)
    assert torch.allclose(y, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(final, want_final)
