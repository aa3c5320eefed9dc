"""The fast backend for NVIDIA GPUs: time loops with explicit layouts in Gluon, matrix products around them."""

import torch
import triton
from torch.autograd.function import once_differentiable

from ..common.triton_blocks import make_blocks
from ..common.triton_launch import interpreted, on_device_of
from . import gluon_backward, gluon_forward, triton_backward, triton_forward, triton_scan, triton_states
from .kept import kept
from .triton_scan import flat_tokens, last_gradients, run_scan, shaped_gradients
from .types import ScanShape

CHUNK = 256
SHARED_BYTES = 112 * 1024
TRITON = (3, 6)


def unavailable(device: torch.device) -> str | None:
    """Needs an NVIDIA GPU with the shared memory of a Hopper one, and the Triton release it was written for."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"it needs an NVIDIA GPU, not {device.type if device.type != 'cuda' else 'an AMD one'}"
    if interpreted():
        return "Triton's interpreter does not run Gluon"
    if tuple(int(x) for x in triton.__version__.split(".")[:2]) != TRITON:
        return f"it is written for Triton {TRITON[0]}.{TRITON[1]}, and {triton.__version__} is installed"
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    if shared < SHARED_BYTES:
        return f"it needs {SHARED_BYTES // 1024} KB of shared memory a block, and this GPU has {shared // 1024}"
    return None


def unsupported(shape: ScanShape) -> str | None:
    """Why these sizes cannot run, or None."""
    if shape.head_dim // shape.beta_groups >= triton_scan.SHARED_CHANNELS:
        return triton_scan.unsupported(shape)  # shared betas have their own kernels, with fewer limits
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bf16 and fp16, not {str(shape.dtype).removeprefix('torch.')}"
    if shape.state_size not in (64, 128):
        return f"it takes state sizes 64 and 128, not {shape.state_size}"
    if shape.head_dim % 32:
        return f"it takes head dims that are multiples of 32, not {shape.head_dim}"
    if shape.variance:
        return "it gives no variance"
    return None


@torch.compiler.disable
def scan(q, k, v, beta, log_decay, prior, *, initial_state=None, cu_seqlens=None, chunk_size=None, variance=False):
    """`metaplastic_scan` by the fast kernels."""
    return run_scan(FastScan, q, k, v, beta, log_decay, prior, initial_state, cu_seqlens, chunk_size, variance)


step = triton_scan.step


class FastScan(torch.autograd.Function):
    """The scan with one beta a channel. Saves its inputs only: the states are derived again."""

    @staticmethod
    def forward(ctx, q, k, v, beta, log_decay, prior, M0, J0, cu_seqlens, chunk_size, variance):
        ctx.save_for_backward(q, k, v, beta, log_decay, prior, M0, J0, cu_seqlens)
        ctx.set_materialize_grads(False)
        return kept(lambda: FastScan._run(q, k, v, beta, log_decay, prior, M0, J0, cu_seqlens, chunk_size))

    @staticmethod
    def _run(q, k, v, beta, log_decay, prior, M0, J0, cu_seqlens, chunk_size):
        batch, length, H, P = v.shape
        flat = [flat_tokens(x) for x in (q, k, v, beta, log_decay)]
        prior = prior.contiguous()
        initial = None if M0 is None else (M0, J0)
        chunk = max(64, min(1024, triton.next_power_of_2(chunk_size or CHUNK)))
        blocks = make_blocks(batch, length, chunk, v.device, cu_seqlens)
        out = torch.empty_like(flat[2])
        with on_device_of(v):
            states = torch.empty(2, blocks.count + blocks.rows, H, P, k.shape[3], dtype=torch.float32, device=v.device)
            starts = (states[0], states[1])
            triton_states.block_states(*flat[1:], blocks, initial, starts)
            steep = gluon_forward.forward(*flat, prior, starts, blocks, out)
            triton_forward.forward(*flat, prior, starts, blocks, out, None, None, only=steep)
        return out.view(v.shape), *(x[blocks.count :].clone() for x in starts), None

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dM, dJ, _):
        q, k, v, beta, log_decay, prior, M0, J0, cu_seqlens = ctx.saved_tensors
        flat = [flat_tokens(x) for x in (q, k, v, beta, log_decay)]
        do = torch.zeros_like(v) if do is None else do
        with on_device_of(v):
            grads = triton_backward.backward(
                *flat,
                prior,
                None if M0 is None else (M0, J0),
                flat_tokens(do),
                last_gradients(dM, dJ),
                gluon_backward.fast_inside(flat[1], flat[2]),
                batch=v.shape[0],
                length=v.shape[1],
                cu_seqlens=cu_seqlens,
            )
        return *shaped_gradients(grads, (q, k, v, beta, log_decay, prior)), *grads[6:], None, None, None
