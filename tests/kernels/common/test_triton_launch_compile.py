"""Kernels whose lanes share the place of a sum, compiled for a GPU that need not be here."""

import os

import pytest

pytest.importorskip("triton")
import triton
import triton.language as tl
from palimpsa_surgery.kernels.common.triton_launch import UNFUSED_SUMS
from palimpsa_surgery.kernels.conv.triton_conv import conv_backward_kernel
from palimpsa_surgery.kernels.metaplastic.triton_shared import shared_backward_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, nothing compiles")

INT, FLOAT = "i32", "*fp32"
CONV = (
    conv_backward_kernel,
    {"W": 4, "BT": 8, "BC": 32, "SILU": True, "HAS_BIAS": False},
    {"d_weight": FLOAT, **dict.fromkeys(("T", "C", "sxb", "sxt"), INT)},
)
SHARED = (
    shared_backward_kernel,
    {"H": 4, "G": 1, "N": 64, "P": 64, "S": 16, "BN": 16, "BV": 16, "DOT": tl.bfloat16, "PREC": "ieee"},
    {**dict.fromkeys(("log_decay", "prior", "J0", "dJ", "dla", "s_out"), FLOAT), "n_blocks": INT}
    | dict.fromkeys(("table", "documents"), "*i32"),
)


def compiled(kernel, constants, types, options):
    """The code of a kernel for a Hopper GPU; what `types` does not name points to bf16."""
    signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


@pytest.mark.parametrize("problem", [CONV, SHARED], ids=["conv", "shared"])
def test_no_product_is_fused_into_a_sum_over_lanes(problem):
    """Lanes that round differently would race for the place of the sum."""
    assert "fma.rn.f32" not in compiled(*problem, UNFUSED_SUMS)
    assert "fma.rn.f32" in compiled(*problem, {**UNFUSED_SUMS, "enable_fp_fusion": True})
