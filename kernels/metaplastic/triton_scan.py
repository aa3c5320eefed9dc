"""The plain-Triton backend of the operator, for every GPU that Triton runs on; `scan.py` has shapes and meaning."""

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..common.triton_blocks import make_blocks
from ..common.triton_launch import on_device_of, unavailable, uses_assembly
from . import triton_backward, triton_forward, triton_states, triton_step
from .kept import kept
from .triton_shared import SharedScan
from .types import ScanOutput, ScanShape, ScanState

__all__ = ["PlainScan", "run_scan", "scan", "step", "unavailable", "unsupported"]

CHUNK = 128
MAX_STATE_SIZE = 256
SHARED_CHANNELS = 8  # from so many channels a beta on, a vector of importances beats one a channel


def unsupported(shape: ScanShape) -> str | None:
    """Why these sizes cannot run, or None."""
    if shape.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it takes fp32, bf16 and fp16, not {str(shape.dtype).removeprefix('torch.')}"
    if shape.state_size > MAX_STATE_SIZE:
        return f"it takes state sizes up to {MAX_STATE_SIZE}, not {shape.state_size}"
    return None


def flat_tokens(x: Tensor) -> Tensor:
    """[B, T, ...] -> [B * T, ...], contiguous."""
    return x.contiguous().flatten(0, 1)


@torch.compiler.disable
def scan(q, k, v, beta, log_decay, prior, *, initial_state=None, cu_seqlens=None, chunk_size=None, variance=False):
    """`metaplastic_scan` in plain Triton."""
    return run_scan(PlainScan, q, k, v, beta, log_decay, prior, initial_state, cu_seqlens, chunk_size, variance)


def run_scan(function, q, k, v, beta, log_decay, prior, initial_state, cu_seqlens, chunk_size, variance) -> ScanOutput:
    """Run the scan; `function` is the autograd function for a beta of every channel's own."""
    P, g = v.shape[3], beta.shape[3]
    M0, J0 = (None, None) if initial_state is None else (x.float().contiguous() for x in initial_state)
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, beta, log_decay, prior))
    now = variance and not differentiable
    more = (cu_seqlens, chunk_size, now)
    if P // g >= SHARED_CHANNELS:
        output, M, J, var = _shared_scan(q, k, v, beta, log_decay, prior, M0, J0, *more)
    elif g < P:
        wide = beta.repeat_interleave(P // g, 3)
        J_wide = None if J0 is None else J0.repeat_interleave(P // g, 2)
        output, M, J, var = function.apply(q, k, v, wide, log_decay, prior, M0, J_wide, *more)
        J, var = J[:, :, :: P // g], None if var is None else var[..., :: P // g]
    else:
        output, M, J, var = function.apply(q, k, v, beta, log_decay, prior, M0, J0, *more)
    if variance and differentiable:
        var = _differentiable_variance(q, k, v, beta, log_decay, prior, M0, J0, cu_seqlens, chunk_size)
    return ScanOutput(output, ScanState(M, J), var)


def _shared_scan(q, k, v, beta, log_decay, prior, M0, J0, cu_seqlens, chunk_size, variance):
    """Channels that share a beta: every beta group of a head is a head of its own, and its importance a vector."""
    B, T, H, P = v.shape
    g, N = beta.shape[3], k.shape[3]
    heads = H * g
    flat = [flat_tokens(x) for x in (q, k, v.reshape(B, T, heads, P // g), beta.reshape(B, T, heads))]
    wide = flat_tokens(log_decay.repeat_interleave(g, 2) if g > 1 else log_decay)
    prior = prior.repeat_interleave(g) if g > 1 else prior
    state = (None, None) if M0 is None else (M0.reshape(-1, heads, P // g, N), J0.reshape(-1, heads, N))
    with on_device_of(v):
        out, M, J, var = SharedScan.apply(*flat, wide, prior, *state, B, cu_seqlens, variance)
    var = None if var is None else var.view(B, T, H, g)
    return out.view(B, T, H, P), M.view(-1, H, P, N), J.view(-1, H, g, N), var


def _differentiable_variance(q, k, v, beta, log_decay, prior, M0, J0, cu_seqlens, chunk_size) -> Tensor:
    # Rare (a training loss on the variance), so it takes the slow way: the torch backend differentiates it.
    from . import torch_chunk

    state = None if J0 is None else ScanState(M0.detach(), J0)
    more = {"initial_state": state, "cu_seqlens": cu_seqlens, "chunk_size": chunk_size, "variance": True}
    return torch_chunk.scan(q, k, v.detach(), beta, log_decay, prior, **more).variance


class PlainScan(torch.autograd.Function):
    """The scan with one beta a channel. Saves its inputs only: the states are derived again."""

    @staticmethod
    def forward(ctx, q, k, v, beta, log_decay, prior, M0, J0, cu_seqlens, chunk_size, variance):
        ctx.save_for_backward(q, k, v, beta, log_decay, prior, M0, J0, cu_seqlens)
        ctx.set_materialize_grads(False)
        found = kept(lambda: PlainScan._run(q, k, v, beta, log_decay, prior, M0, J0, cu_seqlens, chunk_size, variance))
        if variance:
            ctx.mark_non_differentiable(found[3])
        return found

    @staticmethod
    def _run(q, k, v, beta, log_decay, prior, M0, J0, cu_seqlens, chunk_size, variance):
        batch, length, H, P = v.shape
        N = k.shape[3]
        flat = [flat_tokens(x) for x in (q, k, v, beta, log_decay)]
        initial = None if M0 is None else (M0, J0)
        chunk = max(16, triton.next_power_of_2(chunk_size or CHUNK))
        blocks = make_blocks(batch, length, chunk, v.device, cu_seqlens)
        out = torch.empty_like(flat[2])
        var = torch.empty(flat[2].shape, dtype=torch.float32, device=v.device) if variance else None
        final = final_states(initial, blocks.rows, H, P, N, v.device)
        with on_device_of(v):
            starts = initial
            if cu_seqlens is not None or length > chunk:
                starts = tuple(
                    torch.empty(blocks.count + blocks.rows, H, P, N, dtype=torch.float32, device=v.device)
                    for _ in range(2)
                )
                triton_states.block_states(*flat[1:], blocks, initial, starts)
            triton_forward.forward(*flat, prior, starts, blocks, out, var, final)
        return out.view(v.shape), *final, None if var is None else var.view(v.shape)

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
                triton_backward.plain_inside(flat[1], flat[2], uses_assembly(v.device)),
                batch=v.shape[0],
                length=v.shape[1],
                cu_seqlens=cu_seqlens,
            )
        return *shaped_gradients(grads, (q, k, v, beta, log_decay, prior)), *grads[6:], None, None, None


def final_states(initial, rows: int, H: int, P: int, N: int, device) -> tuple[Tensor, Tensor]:
    """Where the final states go; an empty document keeps what is put here."""
    if initial is not None:
        return tuple(x.clone() for x in initial)
    return tuple(torch.zeros(rows, H, P, N, dtype=torch.float32, device=device) for _ in range(2))


def last_gradients(dM: Tensor | None, dJ: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The gradients of the final states as fp32 tensors, None when there are none."""
    if dM is None and dJ is None:
        return None
    dM = torch.zeros_like(dJ) if dM is None else dM
    dJ = torch.zeros_like(dM) if dJ is None else dJ
    return dM.float().contiguous(), dJ.float().contiguous()


def shaped_gradients(grads, inputs) -> list[Tensor]:
    """The gradients of q, k, v, beta, log_decay and prior in the shapes and dtypes of the inputs."""
    return [g.view(x.shape).to(x.dtype) for g, x in zip(grads, inputs, strict=False)]


@torch.compiler.disable
@torch.no_grad()
def step(q, k, v, beta, log_decay, prior, state, *, variance=False):
    """`metaplastic_step` in one kernel; `state` is written in place."""
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    var = torch.empty(beta.shape, dtype=torch.float32, device=v.device) if variance else None
    inputs = [x.contiguous() for x in (q, k, v, beta, log_decay, prior)]
    with on_device_of(v):
        triton_step.step(*inputs, *state, out, var)
    return out, var
