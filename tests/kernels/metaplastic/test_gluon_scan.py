"""The fast backend. What it refuses is tested everywhere; its numbers on a GPU, against the reference in fp64."""

import pytest
import torch
from palimpsa_surgery.kernels.metaplastic import scan as api

pytest.importorskip("triton.experimental.gluon")
from palimpsa_surgery.kernels.metaplastic import gluon_scan
from palimpsa_surgery.kernels.metaplastic.types import ScanProblem

PROBLEM = ScanProblem(torch.bfloat16, 64, 128, 64)
# bf16 inputs: rounding the exact output costs 1.7e-3; gradients also round partial sums and block states.
BF16 = {
    "output": 2.2e-3,
    "M": 4e-3,
    "J": 4e-3,
    "q": 6e-3,
    "k": 6e-3,
    "v": 6e-3,
    "beta": 6e-3,
    "log_decay": 1e-2,
    "prior": 6e-3,
}
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize(("change", "message"), [
    ({"dtype": torch.float32}, "bf16 and fp16, not float32"),
    ({"state_size": 48}, "state sizes 64 and 128, not 48"),
    ({"head_dim": 80}, "multiples of 32, not 80"),
    ({"variance": True}, "no variance"),
])  # fmt: skip
def test_what_it_cannot_take_is_said(change, message):
    assert gluon_scan.unsupported(PROBLEM) is None
    assert message in gluon_scan.unsupported(PROBLEM._replace(**change))


def test_it_needs_an_nvidia_gpu():
    assert api.METAPLASTIC_SCAN.reason("gluon", "cpu") == "it runs on cuda, not on cpu"


def make_inputs(B, T, H, P, N, G=1, g=None, rows=None, dtype=torch.bfloat16, steep=True, seed=0):
    """Decays like a trained layer's, a third of the heads mild; with `steep` some tokens forget everything."""
    torch.manual_seed(seed)
    kw = {"device": "cuda"}
    step = torch.nn.functional.softplus(torch.randn(B, T, H, **kw) * 0.8 - 3.0)
    A = torch.rand(H, **kw) * 15 + 1
    A[::3] *= 0.02
    log_decay = -A * step
    if steep:
        log_decay[:, T // 2] = -200.0
        log_decay[:, T // 4 : T // 4 + 3] = -30.0
        log_decay[:, :, -1] = -1e4
        log_decay[:, T // 3] = -1e-8
    q, k = (torch.randn(B, T, G, N, **kw).to(dtype) for _ in range(2))
    v = (torch.randn(B, T, H, P, **kw) * step[..., None]).to(dtype)
    beta = (torch.rand(B, T, H, g or P, **kw) * step[..., None]).to(dtype)
    state = torch.randn(rows or B, H, P, N, **kw), torch.rand(rows or B, H, g or P, N, **kw)
    return (q, k, v, beta, log_decay, torch.rand(H, **kw) + 0.5), state


def run(backend, inputs, state, dtype=None, cu=None, chunk_size=None):
    """Named outputs and gradients of a loss over the output and the final states."""
    inputs, state = ([x.detach().to(dtype or x.dtype).requires_grad_() for x in xs] for xs in (inputs, state))
    result = api.metaplastic_scan(
        *inputs, initial_state=state or None, cu_seqlens=cu, backend=backend, chunk_size=chunk_size
    )
    shown = (result.output, *result.state)
    generator = torch.Generator("cuda").manual_seed(7)
    scale = (1.0, 0.1, 0.1)
    weights = [
        c * torch.randn(x.shape, generator=generator, device="cuda").bfloat16()
        for c, x in zip(scale, shown, strict=True)
    ]
    loss = sum((x.double() * w).sum() for x, w in zip(shown, weights, strict=True))
    grads = torch.autograd.grad(loss, inputs + state)
    names = ("q", "k", "v", "beta", "log_decay", "prior", "dM0", "dJ0")
    return dict(zip(("output", "M", "J", *names), (*(x.detach() for x in shown), *grads), strict=False))


def errors(actual, expected):
    """Relative L2; what a steep decay has erased to nothing is compared with nothing."""
    return {
        n: ((actual[n].double() - e.double()).norm() / e.double().norm().clamp_min(1e-20)).item()
        for n, e in expected.items()
    }


def too_large(found, shared=False):
    """The errors over their limits; with shared betas q / I is rounded to bf16 once more."""
    limits = {**BF16, "output": 4e-3} if shared else BF16
    return {n: e for n, e in found.items() if not e < limits.get(n, 6e-3)}


CASES = {
    "one head": {"B": 1, "T": 130, "H": 1, "P": 64, "N": 128, "steep": False},
    "ragged, groups": {"B": 2, "T": 333, "H": 6, "P": 64, "N": 128, "G": 2},
    "narrow": {"B": 1, "T": 97, "H": 3, "P": 32, "N": 64},
    "wide": {"B": 1, "T": 65, "H": 2, "P": 96, "N": 128},
    "one token": {"B": 1, "T": 1, "H": 2, "P": 64, "N": 128, "steep": False},
    "few channels per beta": {"B": 1, "T": 70, "H": 2, "P": 64, "N": 128, "g": 16},
    "many channels per beta": {"B": 2, "T": 200, "H": 4, "P": 64, "N": 128, "g": 4, "G": 2},
    "one beta per head": {"B": 2, "T": 200, "H": 4, "P": 64, "N": 128, "g": 1},
    "half precision": {"B": 1, "T": 70, "H": 2, "P": 64, "N": 128, "dtype": torch.float16},
}


class TestNumbers:
    pytestmark = gpu

    @pytest.mark.parametrize("backend", ["gluon", "triton"])
    @pytest.mark.parametrize("case", CASES)
    def test_equals_the_reference(self, case, backend):
        inputs, state = make_inputs(**CASES[case])
        found = errors(run(backend, inputs, state), run("reference", inputs, state, torch.float64))
        failed = too_large(found, shared=case in ("many channels per beta", "one beta per head"))
        assert not failed, failed

    @pytest.mark.parametrize("backend", ["gluon", "triton"])
    def test_packed_documents_equal_separate_ones(self, backend):
        cu = torch.tensor([0, 3, 3, 260, 261, 400], device="cuda", dtype=torch.int32)
        inputs, state = make_inputs(1, 400, 2, 64, 128, rows=5)
        found = errors(run(backend, inputs, state, cu=cu), run("reference", inputs, state, torch.float64, cu=cu))
        assert not too_large(found), too_large(found)

    @pytest.mark.parametrize("cu", [None, [0, 3, 3, 260, 261, 400]], ids=str)
    @pytest.mark.parametrize("g", [64, 1])
    @pytest.mark.parametrize("backend", ["gluon", "triton"])
    def test_the_decay_of_a_token_without_a_past_has_no_gradient(self, backend, g, cu):
        inputs, _ = make_inputs(1, 400, 2, 64, 128, g=g, steep=False)
        bounds = None if cu is None else torch.tensor(cu, device="cuda")
        decays = [
            run(name, inputs, [], dtype, cu=bounds)["log_decay"]
            for name, dtype in ((backend, None), ("reference", torch.float64))
        ]
        assert not decays[0][:, [0, 3, 260, 261] if cu else [0]].any()
        found = errors(*({"log_decay": d} for d in decays))
        assert not too_large(found), too_large(found)

    def test_many_steep_segments(self):
        inputs, state = make_inputs(1, 200, 2, 64, 128)
        inputs[4][:] = inputs[4] * 40 - 3.0
        found = errors(run("gluon", inputs, state), run("reference", inputs, state, torch.float64))
        # All is forgotten at once: the exact gradient of the decays is next to nothing, what is left of it is rounding.
        found.pop("log_decay")
        assert not too_large(found), too_large(found)

    @pytest.mark.parametrize("backend", ["gluon", "triton"])
    @pytest.mark.parametrize("T", [63, 130])
    def test_importance_that_grows_many_millionfold(self, T, backend):
        (q, k, v, beta, log_decay, prior), _ = make_inputs(2, T, 3, 64, 128, steep=False)
        k[:, T // 3] *= 100
        k[:, T // 2 :] *= 10
        inputs = (q, k, v, beta * 50, log_decay, prior * 1e-3)
        none = tuple(torch.zeros(2, 3, 64, 128, device="cuda") for _ in range(2))
        found = errors(run(backend, inputs, none), run("reference", inputs, none, torch.float64))
        # A few synapses of next to no importance are nearly all of the prior's gradient, and the plain kernels round
        # each term's three factors to bf16 before they are summed.
        plain_prior = found.pop("prior") if backend == "triton" else 0.0
        assert plain_prior < 3e-2
        assert not too_large(found), too_large(found)

    def test_a_segment_of_one_token_after_which_nothing_can_be_undone(self):
        inputs, _ = make_inputs(1, 64, 4, 64, 64, steep=False)
        q, k, v, beta, log_decay, prior = inputs
        log_decay[:, 1::3] = -14.0
        k[:, 1::3] *= 40
        none = tuple(torch.zeros(1, 4, 64, 64, device="cuda") for _ in range(2))
        inputs = (q, k, v, beta * 20, log_decay, prior * 1e-2)
        found = errors(run("gluon", inputs, none), run("reference", inputs, none, torch.float64))
        # Next to nothing passes a decay of 14 nats: its exact gradient is next to nothing, what is left is rounding.
        assert found.pop("log_decay") < 1.0
        # Tiles that decay by 70 nats go to the plain kernel, which rounds decayed v and beta and k^2 to bf16. One token
        # in three outweighs the others, so nothing averages: with the output's own, three roundings of 1.7e-3.
        assert found.pop("output") < 3e-3
        assert not too_large(found), too_large(found)

    def test_two_halves_equal_the_whole(self):
        inputs, state = make_inputs(1, 1024, 2, 64, 128, steep=False)
        whole = api.metaplastic_scan(*inputs, initial_state=state, backend="gluon")
        first = api.metaplastic_scan(
            *(x[:, :600] if x.dim() > 1 else x for x in inputs), initial_state=state, backend="gluon"
        )
        second = api.metaplastic_scan(
            *(x[:, 600:] if x.dim() > 1 else x for x in inputs), initial_state=first.state, backend="gluon"
        )
        both = torch.cat((first.output, second.output), 1)
        assert ((both - whole.output).norm() / whole.output.norm()).item() < 4e-3
        assert ((second.state.M - whole.state.M).norm() / whole.state.M.norm()).item() < 4e-3

    def test_more_blocks_than_a_grid_axis_holds(self):
        documents, heads = 520, 128
        cu = torch.arange(documents + 1, device="cuda", dtype=torch.int32) * 8
        inputs, state = make_inputs(1, documents * 8, heads, 32, 64, rows=documents, steep=False)
        result = api.metaplastic_scan(*inputs, initial_state=state, cu_seqlens=cu, backend="gluon")
        last = [x[:, -8:] if x.dim() > 1 else x for x in inputs]
        alone = api.metaplastic_scan(*last, initial_state=[x[-1:] for x in state], backend="reference")
        assert ((result.output[:, -8:] - alone.output).norm() / alone.output.norm()).item() < 3e-3

    @pytest.mark.parametrize("g", [64, 1])
    def test_a_step_can_be_captured_in_a_graph(self, g):
        inputs, state = make_inputs(2, 1, 4, 64, 128, g=g, steep=False)
        one = [x[:, 0].contiguous() for x in inputs[:5]]
        api.metaplastic_step(*one, inputs[5], tuple(x.clone() for x in state), backend="gluon")
        torch.cuda.synchronize()
        captured, eager = (tuple(x.clone() for x in state) for _ in range(2))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = api.metaplastic_step(*one, inputs[5], captured, backend="gluon")
        for x, y in zip(captured, state, strict=True):
            x.copy_(y)
        graph.replay()
        expected = api.metaplastic_step(*one, inputs[5], eager, backend="gluon")
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(captured[0], eager[0])

    def test_gradients_do_not_change_from_run_to_run(self):
        inputs, state = make_inputs(1, 300, 3, 64, 128)
        a, b = (run("gluon", inputs, state) for _ in range(2))
        assert all(torch.equal(a[n], b[n]) for n in a)
