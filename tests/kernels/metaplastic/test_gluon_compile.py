"""The fast kernels compiled for a Hopper GPU without one: they build, and two programs fit a multiprocessor."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
import triton
from palimpsa_surgery.kernels.metaplastic import gluon_backward, gluon_forward
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

pytestmark = pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="they are written for Triton 3.6")
SHAPE = {"H": 4, "G": 1, "N": 128, "P": 64}
POINTERS = {
    **dict.fromkeys(("q", "k", "v", "beta", "do", "out", "dM_out", "dJ_out", "dq", "dk", "dv", "db"), "*bf16"),
    **dict.fromkeys(("within", "entry", "prior", "s_out", "scratch"), "*fp32"),
    **dict.fromkeys(("steep", "table", "cuts"), "*i32"),
    **dict.fromkeys(("total", "head0", "heads", "n_tokens"), "i32"),
}


def compiled(kernel, states, constants, warps):
    """Compile a kernel for compute capability 9.0; `states` is the type of M0 and J0."""
    types = {**POINTERS, "M0": states, "J0": states}
    signature = {n: types.get(n, "constexpr") for n in kernel.arg_names}
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if types.get(n, "")[:1] == "*"
    }
    source = GluonASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


@pytest.mark.parametrize("N", [64, 128])
def test_the_forward_loop_builds(N):
    constants = {**SHAPE, "N": N, "NW": 4, "S": gluon_forward.TILE}
    kernel = compiled(gluon_forward.time_loop_kernel, "*fp32", constants, 4)
    assert "wgmma" not in kernel.asm["ptx"]
    assert "rcp.approx.ftz.f32" in kernel.asm["ptx"]
    assert kernel.metadata.shared < 40 * 1024


@pytest.mark.parametrize("N", [64, 128])
def test_the_backward_loop_builds_and_fits_twice(N):
    constants = {**SHAPE, "N": N, "C": gluon_backward.BLOCK, "NW": N // 32, "SLOTS": gluon_backward.SLOTS}
    kernel = compiled(gluon_backward.inside_loop_kernel, "*bf16", constants, N // 32)
    shared = kernel.metadata.shared
    # 227 KB a multiprocessor of which every program reserves one.
    assert gluon_backward.PROGRAMS * (shared + 1024) <= 227 * 1024


def test_the_limit_of_a_segment_keeps_rounding_small():
    for dtype, nats in gluon_backward.MAX_NATS.items():
        assert (
            torch.finfo(torch.float32).eps / 2 * torch.tensor(nats).exp().item() < 4 * torch.finfo(torch.bfloat16).eps
        ), dtype
