"""The fast backend for NVIDIA GPUs: time loops with explicit layouts in Gluon, matrix products around them."""

import torch
import triton

from ..backends import interpreted
from ..common.precision import dtype_name
from ..common.triton_blocks import make_blocks
from . import gluon_backward, gluon_forward, triton_forward, triton_scan
from .types import ScanInputs, ScanOutput, ScanProblem

CHUNK = 256
SHARED_BYTES = 112 * 1024
TRITON = (3, 6)


def unavailable(device: torch.device) -> str | None:
    """Needs an NVIDIA GPU with the shared memory of a Hopper one, and the Triton release it was written for."""
    if torch.version.hip is not None:
        return "it needs an NVIDIA GPU, not an AMD one"
    if interpreted():
        return "Triton's interpreter does not run Gluon"
    if tuple(int(x) for x in triton.__version__.split(".")[:2]) != TRITON:
        return f"it is written for Triton {TRITON[0]}.{TRITON[1]}, and {triton.__version__} is installed"
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    if shared < SHARED_BYTES:
        return f"it needs {SHARED_BYTES // 1024} KB of shared memory a block, and this GPU has {shared // 1024}"
    return None


def unsupported(problem: ScanProblem) -> str | None:
    """Why these sizes cannot run, or None."""
    if problem.head_dim // problem.beta_groups >= triton_scan.SHARED_CHANNELS:
        return triton_scan.unsupported(problem)  # shared betas have their own kernels, with fewer limits
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bf16 and fp16, not {dtype_name(problem.dtype)}"
    if problem.state_size not in (64, 128):
        return f"it takes state sizes 64 and 128, not {problem.state_size}"
    if problem.head_dim % 32:
        return f"it takes head dims that are multiples of 32, not {problem.head_dim}"
    if problem.variance:
        return "it gives no variance"
    return None


def scan(x: ScanInputs) -> ScanOutput:
    """`scan.metaplastic_scan` by the fast kernels."""
    return triton_scan.run_scan(x, triton_scan.Passes(_forward, gluon_backward.fast_inside))


step = triton_scan.step


def _forward(x: ScanInputs):
    chunk = max(64, min(1024, triton.next_power_of_2(x.chunk_size or CHUNK)))
    blocks = make_blocks(*x.v.shape[:2], chunk, x.v.device, x.cu_seqlens)
    flat, prior = [triton_scan.flat_tokens(y) for y in x[:5]], x.prior.contiguous()
    out = torch.empty_like(flat[2])
    starts = triton_scan.block_starts(x, flat, blocks)
    steep = gluon_forward.forward(*flat, prior, starts, blocks, out)
    triton_forward.forward(*flat, prior, starts, blocks, out, None, None, only=steep)
    return out.view(x.v.shape), *(y[blocks.count :].clone() for y in starts), None
