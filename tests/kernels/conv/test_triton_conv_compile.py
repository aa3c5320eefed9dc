"""The convolution's backward kernel, compiled for a GPU that need not be here."""

import os

import pytest

pytest.importorskip("triton")
import triton
from palimpsa_surgery.kernels.conv import triton_conv
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, nothing compiles")


def compiled(options):
    """Its code for a Hopper GPU, 32 x 64 tokens and channels a program."""
    kernel = triton_conv.conv_backward_kernel
    constants = {"W": 4, "BT": 32, "BC": 64, "SILU": True, "HAS_BIAS": False}
    types = {"d_weight": "*fp32", **dict.fromkeys(("T", "C", "sxb", "sxt"), "i32")}
    signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def test_no_product_is_fused_into_a_sum_over_lanes():
    """Lanes that round differently would race for the place of the sum."""
    assert "fma.rn.f32" not in compiled(triton_conv.BACKWARD_OPTIONS)
    assert "fma.rn.f32" in compiled({**triton_conv.BACKWARD_OPTIONS, "enable_fp_fusion": True})
