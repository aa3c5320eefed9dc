"""The oracle: one token at a time, under plain autograd, in any dtype up to fp64. Clear before fast."""

import itertools

import torch

from ..common.precision import compute_dtype
from .types import ScanOutput, ScanState


def unavailable(device: torch.device) -> str | None:
    """Runs everywhere."""
    return None


def scan(q, k, v, beta, log_decay, prior, *, initial_state=None, cu_seqlens=None, chunk_size=None, variance=False):
    """`metaplastic_scan` by the recurrence itself; see `scan.metaplastic_scan` for shapes."""
    with torch.autocast(v.device.type, enabled=False):
        if cu_seqlens is None:
            return _scan_rows(q, k, v, beta, log_decay, prior, initial_state, variance)
        bounds = cu_seqlens.tolist()
        parts = []
        for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
            state = None if initial_state is None else ScanState(*(x[i : i + 1] for x in initial_state))
            rows = [x[:, start:stop] for x in (q, k, v, beta, log_decay)]
            parts.append(_scan_rows(*rows, prior, state, variance))
        return ScanOutput(
            torch.cat([p.output for p in parts], 1),
            ScanState(*(torch.cat(x) for x in zip(*(p.state for p in parts), strict=True))),
            torch.cat([p.variance for p in parts], 1) if variance else None,
        )


def _scan_rows(q, k, v, beta, log_decay, prior, initial_state, variance) -> ScanOutput:
    batch, length, heads, head_dim = v.shape
    groups, size = beta.shape[3], k.shape[3]
    dtype = compute_dtype(q, k, v, beta)
    state = initial_state or (
        v.new_zeros(batch, heads, head_dim, size, dtype=dtype),
        v.new_zeros(batch, heads, groups, size, dtype=dtype),
    )
    M, J = (x.to(dtype) for x in state)
    outputs, variances = [], []
    for t in range(length):
        M, J, o, var = _one_token(q[:, t], k[:, t], v[:, t], beta[:, t], log_decay[:, t], prior, M, J)
        outputs.append(o)
        variances.append(var)
    empty_output = v.new_zeros(batch, 0, heads, head_dim, dtype=dtype)
    empty_variance = v.new_zeros(batch, 0, heads, groups, dtype=dtype)
    output = torch.stack(outputs, 1) if outputs else empty_output
    var = (torch.stack(variances, 1) if variances else empty_variance) if variance else None
    return ScanOutput(output.to(v.dtype), ScanState(M, J), var)


def _one_token(q, k, v, beta, log_decay, prior, M, J):
    """The two equations of the operator for one token, out of place: M, J, output and variance."""
    dtype, heads = M.dtype, v.shape[1]
    q, k = (x.to(dtype).repeat_interleave(heads // x.shape[1], 1) for x in (q, k))  # [B, H, N]
    a = log_decay.to(dtype).exp()[..., None, None]
    M = a * M + v.to(dtype)[..., None] * k[:, :, None]
    J = a * J + beta.to(dtype)[..., None] * k[:, :, None] ** 2
    importance = prior.to(dtype)[:, None, None] + J  # [B, H, g, N]
    per_channel = importance.repeat_interleave(v.shape[2] // beta.shape[2], 2)
    output = (M / per_channel * q[:, :, None]).sum(-1)
    return M, J, output, (q[:, :, None] ** 2 / importance).sum(-1)


@torch.no_grad()
def step(q, k, v, beta, log_decay, prior, state, *, variance=False):
    """`metaplastic_step` by the same equations; `state` is written in place."""
    dtype = compute_dtype(q, k, v, beta, *state)
    with torch.autocast(v.device.type, enabled=False):
        M, J, output, var = _one_token(q, k, v, beta, log_decay, prior, state[0].to(dtype), state[1].to(dtype))
    state[0].copy_(M)
    state[1].copy_(J)
    return output.to(v.dtype), var if variance else None
