"""The plain Mamba2 scan, for layers that keep their mixer: torch everywhere, mamba-ssm's kernels where they work."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...base.errors import KernelUnavailableError, UsageError
from ..backends import eager, require_kernels
from ..common.documents import check_cu_seqlens
from ..common.precision import compute_dtype
from ..common.torch_blocks import (
    BlockPlan,
    before_here,
    block_decays,
    crossing,
    from_here_on,
    make_plan,
    needs_backward,
    row_lengths,
)

DEFAULT_CHUNK = 64
_MAMBA_SSM_CHUNK = 256
BACKENDS = ("mamba_ssm", "torch")


@functools.cache
def _mamba_ssm():
    """(scan, step) of mamba-ssm, or the reason why they cannot be had.

    A broken install raises anything at import: 2.3.2.post1 imports a compiled module unguarded.
    """
    try:
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except Exception as error:
        return f"mamba-ssm cannot be imported ({type(error).__name__}: {error})"
    return mamba_chunk_scan_combined, selective_state_update


def mamba_ssm_unavailable() -> str | None:
    """Why mamba-ssm's kernels cannot run here, None when they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    found = _mamba_ssm()
    return found if isinstance(found, str) else None


def resolve_ssd_backend(
    name: str, device: torch.device | str, dtype: torch.dtype, *, packed_states: bool = False, one_token: bool = False
) -> str:
    """The backend that a plain Mamba2 layer will run on.

    mamba-ssm's scan multiplies fp32 in TF32 (errors near 1e-3). "auto" takes it for fp32 only where the user allows
    that to matrix products at large, by `torch.set_float32_matmul_precision("high")`; its step has no such products.

    Args:
        name: "auto" or a name of `BACKENDS`.
        device: where the tensors are.
        dtype: theirs.
        packed_states: packed documents with states in or out.
        one_token: of `mamba2_step` instead of the scan.

    Raises:
        UsageError: unknown name.
        KernelUnavailableError: mamba_ssm was named, or kernels are required, and it cannot run.
    """
    device = torch.device(device)
    if name not in ("auto", *BACKENDS):
        raise UsageError(f"backend={name!r} is unknown for the Mamba2 scan; expected auto, {', '.join(BACKENDS)}.")
    if name == "torch":
        return name
    if device.type != "cuda":
        reason = f"the tensors are on {device}, mamba-ssm needs CUDA"
    elif dtype == torch.float64:
        reason = "mamba-ssm has no fp64"
    elif packed_states:
        reason = "mamba-ssm has no states of packed documents"
    elif name == "auto" and dtype == torch.float32 and not one_token and not _tf32_allowed():
        reason = "mamba-ssm multiplies fp32 in TF32; torch.set_float32_matmul_precision('high') allows it"
    else:
        reason = mamba_ssm_unavailable()
    if reason is None:
        return "mamba_ssm"
    if name == "mamba_ssm" or require_kernels():
        raise KernelUnavailableError(f"the Mamba2 scan cannot run on mamba-ssm's kernels here: {reason}.")
    return "torch"


def _tf32_allowed() -> bool:
    """Whether matrix products of fp32 may run in TF32, however that was said."""
    # Since torch 2.9 this knows of every switch. The older question fails once a newer switch was set, as
    # transformers' `tf32=True` does.
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return torch.get_float32_matmul_precision() != "highest" if precision is None else precision == "tf32"


@eager
def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
    final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """y_t = M_t C_t with M_t = exp(A dt_t) M_{t-1} + dt_t x_t (x) B_t, per head; D x is not included.

    Args:
        x: [B, T, H, P].
        dt: [B, T, H] fp32, after bias, softplus and clamp.
        A: [H] fp32, negative.
        B: [B, T, G, N] keys; head i uses group i // (H / G).
        C: [B, T, G, N] queries.
        initial_state: [B, H, P, N], one a document with `cu_seqlens`; zeros when None.
        cu_seqlens: [S + 1] starts of packed documents, then T; needs a batch of 1.
        chunk_size: tokens a chunk, a power of two; at most 64 in torch.
        backend: "auto", "torch" or "mamba_ssm". mamba-ssm's kernels take packed documents only without initial and
            final states; "auto" falls back to torch for those.
        final_state: False when the state is not needed, None is then returned for it.

    Returns:
        y [B, T, H, P] in x's dtype and the final state [B or S, H, P, N] in fp32 (fp64 for fp64 inputs).

    Raises:
        UsageError: an argument has a wrong shape.
        KernelUnavailableError: the backend cannot run here.
    """
    _check(x, dt, A, B, C, initial_state, cu_seqlens)
    dtype = compute_dtype(x, B, C)
    packed_states = cu_seqlens is not None and (final_state or initial_state is not None)
    known = dtype if dtype == torch.float64 else x.dtype
    if resolve_ssd_backend(backend, x.device, known, packed_states=packed_states) == "mamba_ssm":
        y, state = _mamba_ssm_scan(x, dt, A, B, C, initial_state, cu_seqlens, chunk_size or _MAMBA_SSM_CHUNK)
    else:
        dt = dt.to(dtype)
        chunk_size = min(chunk_size or DEFAULT_CHUNK, DEFAULT_CHUNK)
        y, state = linear_scan(C, B, x * dt.unsqueeze(-1), dt * A.to(dtype), initial_state, cu_seqlens, chunk_size)
    return y.to(x.dtype), state if final_state else None


@eager
def mamba2_step(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, *, backend: str = "auto"
) -> Tensor:
    """One token of `mamba2_scan`: x [B, H, P], dt [B, H], B and C [B, G, N]; `state` [B, H, P, N] is updated in place.

    Not differentiable.
    """
    if x.dim() != 3 or state.shape != (*x.shape, B.shape[-1]):
        raise UsageError(
            f"state has shape {list(state.shape)} beside x {list(x.shape)}; expected [B, H, P, {B.shape[-1]}]."
        )
    if resolve_ssd_backend(backend, x.device, compute_dtype(x, B, C), one_token=True) == "mamba_ssm":
        return _mamba_ssm_step(x, dt, A, B, C, state)
    return _torch_step(x, dt, A, B, C, state)


@torch.no_grad()
def _torch_step(x, dt, A, B, C, state):
    dtype, per_group = state.dtype, x.shape[1] // B.shape[1]
    k, q = (y.to(dtype).repeat_interleave(per_group, 1).unsqueeze(2) for y in (B, C))
    dt = dt.to(dtype)
    state.mul_((dt * A.to(dtype)).exp()[..., None, None])
    state.addcmul_((x.to(dtype) * dt.unsqueeze(-1)).unsqueeze(-1), k)
    return torch.matmul(state, q.transpose(2, 3)).squeeze(-1).to(x.dtype)


def _mamba_ssm_scan(x, dt, A, B, C, initial_state, cu_seqlens, chunk_size):
    scan, _ = _mamba_ssm()
    with torch.cuda.device(x.device):
        if cu_seqlens is None:
            y, state = scan(x, dt, A, B, C, chunk_size, initial_states=initial_state, return_final_states=True)
            return y, state.float()
        token = torch.arange(x.shape[1], device=x.device)
        document = torch.searchsorted(cu_seqlens.to(x.device, token.dtype)[1:], token, right=True)
        return scan(x, dt, A, B, C, chunk_size, seq_idx=document.int().unsqueeze(0)), None


@torch.no_grad()
def _mamba_ssm_step(x, dt, A, B, C, state):
    _, update = _mamba_ssm()
    heads, head_dim, size = state.shape[1:]
    dt, A = dt.unsqueeze(-1).expand(-1, -1, head_dim), A[:, None, None].expand(heads, head_dim, size)
    # Up to 2.3.2 it reads the strides of the bias and of D even where none is given.
    zero = A.new_zeros(heads, 1).expand(heads, head_dim)
    with torch.cuda.device(x.device):
        return update(state, x, dt, A, B, C, D=zero, dt_bias=zero)


def _check(x, dt, A, B, C, initial_state, cu_seqlens) -> None:
    if x.dim() != 4 or 0 in x.shape:
        raise UsageError(f"x has shape {list(x.shape)}; expected [B, T, H, P] with at least one token.")
    batch, length, heads, head_dim = x.shape
    if B.dim() != 4 or not B.shape[2] or heads % B.shape[2]:
        raise UsageError(f"B has shape {list(B.shape)}; expected [B, T, G, N] with G dividing the {heads} heads of x.")
    rows = batch
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch, length)
        rows = cu_seqlens.numel() - 1
    wanted = {"B": (B, (batch, length, *B.shape[2:])), "C": (C, tuple(B.shape)), "dt": (dt, (batch, length, heads))}
    wanted["A"] = (A, (heads,))
    if initial_state is not None:
        wanted["initial_state"] = (initial_state, (rows, heads, head_dim, B.shape[3]))
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape:
            raise UsageError(f"{name} has shape {list(tensor.shape)}; expected {list(shape)} beside x {list(x.shape)}.")
        if tensor.device != x.device:
            raise UsageError(f"{name} is on {tensor.device} while x is on {x.device}; expected one device.")


def linear_scan(q, k, v, log_decay, initial_state=None, cu_seqlens=None, chunk_size=None) -> tuple[Tensor, Tensor]:
    """o_t = M_t q_t, M_t = exp(log_decay_t) M_{t-1} + v_t (x) k_t, in blocks with the backward pass by hand.

    Saved for backward are the inputs and the state at each block's start of S = 64 tokens.

    Args:
        q: [B, T, G, N].
        k: [B, T, G, N].
        v: [B, T, H, P].
        log_decay: [B, T, H] <= 0.
        initial_state: [B or S, H, P, N].
        cu_seqlens: see `mamba2_scan`.
        chunk_size: S.

    Returns:
        o [B, T, H, P] and the final state, in fp32 (fp64 for fp64 inputs).
    """
    lengths = row_lengths(v.shape[0], v.shape[1], cu_seqlens)
    plan = make_plan(lengths, min(chunk_size or DEFAULT_CHUNK, max(lengths)), len(lengths), v.device)
    keep = needs_backward(q, k, v, log_decay, initial_state)
    return _LinearScan.apply(q, k, v, log_decay, initial_state, plan, compute_dtype(q, k, v), keep)


class _Step(NamedTuple):
    """Blocks of one step's rows: q, k [n, G, S, N]; v [n, G, Hg, S, P]; decays L [..., S, S], e [n, G, Hg, S]."""

    q: Tensor
    k: Tensor
    v: Tensor
    L: Tensor
    e: Tensor


def _steps(plan: BlockPlan, dtype, q, k, v, log_decay):
    """A function from (offset, count) to `_Step`."""
    groups = k.shape[2]
    q, k, v, log_decay = (plan.to_blocks(x.flatten(0, 1)) for x in (q, k, v, log_decay))

    def take(step: tuple[int, int]) -> _Step:
        s = slice(step[0], step[0] + step[1])
        L, e = block_decays(log_decay[s].to(dtype).permute(0, 2, 1).unflatten(1, (groups, -1)))
        return _Step(_heads(q[s], dtype), _heads(k[s], dtype), by_group(v[s], groups, dtype), L, e)

    return take


def _heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, S, G, N] -> [n, G, S, N]."""
    return x.to(dtype).transpose(1, 2)


def by_group(x: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[n, S, H, P] -> [n, G, Hg, S, P]."""
    return x.to(dtype).transpose(1, 2).unflatten(1, (groups, -1))


class _LinearScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, log_decay, initial, plan: BlockPlan, dtype: torch.dtype, keep: bool):
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.dtype = plan, dtype
        with torch.autocast(v.device.type, enabled=False):
            out, state, saved = _linear_forward(q, k, v, log_decay, initial, plan, dtype, keep)
        ctx.save_for_backward(q, k, v, log_decay, initial, saved)
        return out, state

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_state):
        saved = ctx.saved_tensors  # once: activation checkpointing lets no tensor be unpacked twice
        with torch.autocast(saved[0].device.type, enabled=False):
            return *_linear_backward(*saved, d_out, d_state, ctx.plan, ctx.dtype), None, None, None


def _sorted_rows(x: Tensor | None, plan: BlockPlan, v: Tensor, k: Tensor, dtype) -> Tensor:
    """A state by group, [rows, G, Hg, P, N] in sorted order; a fresh copy, zeros for None."""
    shape = (plan.order.numel(), v.shape[2], v.shape[3], k.shape[3])
    x = v.new_zeros(shape, dtype=dtype) if x is None else x.to(dtype).index_select(0, plan.order)
    return x.unflatten(1, (k.shape[2], -1))


def _linear_forward(q, k, v, log_decay, initial, plan, dtype, keep):
    M = _sorted_rows(initial, plan, v, k, dtype)
    take = _steps(plan, dtype, q, k, v, log_decay)
    steps = plan.tiles[0].steps
    blocks = steps[-1][0] + steps[-1][1]
    out = v.new_empty(blocks, plan.size, *v.shape[2:], dtype=dtype)
    kept = blocks - steps[0][1] if keep else 0  # the first block starts from the initial state
    saved = M.new_empty(kept, *M.shape[1:])
    for i, step in enumerate(steps):
        offset, n = step
        x, m = take(step), M[:n]
        if i and keep:
            saved[offset - steps[0][1] : offset - steps[0][1] + n] = m
        scores = torch.matmul(x.q, x.k.transpose(2, 3)).unsqueeze(2)  # [n, G, 1, S, S]
        o = torch.matmul(scores * x.L, x.v)
        o += torch.matmul(x.q.unsqueeze(2), m.transpose(3, 4)) * x.e.unsqueeze(-1)
        out[offset : offset + n] = o.flatten(1, 2).transpose(1, 2)
        weighted = x.v * x.L[..., -1, :].unsqueeze(-1)
        m.mul_(x.e[..., -1, None, None]).add_(torch.matmul(weighted.transpose(3, 4), x.k.unsqueeze(2)))
    return plan.from_blocks(out).view_as(v), M.flatten(1, 2).index_select(0, plan.rank), saved


def _linear_backward(q, k, v, log_decay, initial, saved, d_out, d_state, plan, dtype):
    first = _sorted_rows(initial, plan, v, k, dtype)
    dM = _sorted_rows(d_state, plan, v, k, dtype)
    d_out = torch.zeros_like(v) if d_out is None else d_out
    take = _steps(plan, dtype, q, k, v, log_decay)
    d_out = plan.to_blocks(d_out.flatten(0, 1))
    steps = plan.tiles[0].steps
    shape = (steps[-1][0] + steps[-1][1], plan.size)
    dq, dk, dv, dla = (x.new_empty(*shape, *x.shape[2:], dtype=dtype) for x in (q, k, v, log_decay))
    for i, step in reversed(list(enumerate(steps))):
        s = slice(step[0], step[0] + step[1])
        at = step[0] - steps[0][1]
        m = saved[at : at + step[1]] if i else first[: step[1]]
        x = take(step)
        do = by_group(d_out[s], k.shape[2], dtype)
        grads = _linear_block_backward(x, do, m, dM[: step[1]])
        dq[s], dk[s] = (g.transpose(1, 2) for g in grads[:2])
        dv[s], dla[s] = (g.flatten(1, 2).transpose(1, 2) for g in grads[2:])
    named = ((dq, q), (dk, k), (dv, v), (dla, log_decay))
    back = [plan.from_blocks(g).view_as(x).to(x.dtype) for g, x in named]
    d_initial = None if initial is None else dM.flatten(1, 2).index_select(0, plan.rank).to(initial.dtype)
    return *back, d_initial


def _linear_block_backward(x: _Step, do: Tensor, M: Tensor, dM: Tensor):
    """Gradients of one block; dM goes from the block's end to its start in place. What crosses a token gives dla."""
    q, k, w = x.q.unsqueeze(2), x.k.unsqueeze(2), x.L[..., -1, :]
    A = x.e[..., -1]
    do_e = do * x.e.unsqueeze(-1)
    a = torch.matmul(do, x.v.transpose(3, 4)) * x.L  # [n, G, Hg, S, S]
    scores = torch.matmul(x.q, x.k.transpose(2, 3)).unsqueeze(2)
    pairs = a * scores
    a = a.sum(2)
    from_start = torch.matmul(do_e, M)  # [n, G, Hg, S, N]
    to_end = torch.matmul(x.v * w.unsqueeze(-1), dM)
    dq = torch.matmul(a, x.k) + from_start.sum(2)
    dk = torch.matmul(a.transpose(2, 3), x.q) + to_end.sum(2)
    dv = torch.matmul((scores * x.L).transpose(3, 4), do)
    dv += torch.matmul(k, dM.transpose(3, 4)) * w.unsqueeze(-1)
    carried, leaving = (from_start * q).sum(-1), (to_end * k).sum(-1)
    through = A * (dM * M).sum((3, 4))
    dla = crossing(pairs) + from_here_on(carried) + before_here(leaving) + through.unsqueeze(-1)
    dM.mul_(A[..., None, None]).add_(torch.matmul(do_e.transpose(3, 4), q))
    return dq, dk, dv, dla
