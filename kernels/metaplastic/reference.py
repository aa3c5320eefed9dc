"""The oracle: one token at a time, under plain autograd, in any dtype up to fp64. Clear before fast."""

import itertools

import torch

from ..common.precision import compute_dtype
from .types import ScanInputs, ScanOutput, ScanState


def scan(x: ScanInputs) -> ScanOutput:
    """`scan.metaplastic_scan` by the recurrence itself."""
    with torch.autocast(x.v.device.type, enabled=False):
        if x.cu_seqlens is None:
            return _scan_rows(x)
        parts = []
        for i, (start, stop) in enumerate(itertools.pairwise(x.cu_seqlens.tolist())):
            state = None if x.initial_state is None else ScanState(*(y[i : i + 1] for y in x.initial_state))
            parts.append(
                _scan_rows(ScanInputs(*(y[:, start:stop] for y in x[:5]), x.prior, state, variance=x.variance))
            )
        return ScanOutput(
            torch.cat([p.output for p in parts], 1),
            ScanState(*(torch.cat(y) for y in zip(*(p.state for p in parts), strict=True))),
            torch.cat([p.variance for p in parts], 1) if x.variance else None,
        )


def _scan_rows(x: ScanInputs) -> ScanOutput:
    v, batch, heads = x.v, x.v.shape[0], x.v.shape[2]
    size, groups, dtype = x.k.shape[3], x.beta.shape[3], compute_dtype(x.q, x.k, x.v, x.beta)
    zeros = (v.new_zeros(batch, heads, rows, size, dtype=dtype) for rows in (v.shape[3], groups))
    M, J = (y.to(dtype) for y in x.initial_state or zeros)
    outputs, variances = [v.new_zeros(batch, 0, *v.shape[2:], dtype=dtype)], [J.new_zeros(batch, 0, heads, groups)]
    for t in range(v.shape[1]):
        M, J, output, var = _one_token(*(y[:, t] for y in x[:5]), x.prior, M, J)
        outputs.append(output.unsqueeze(1))
        variances.append(var.unsqueeze(1))
    return ScanOutput(
        torch.cat(outputs, 1).to(v.dtype), ScanState(M, J), torch.cat(variances, 1) if x.variance else None
    )


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
def step(x: ScanInputs):
    """`scan.metaplastic_step` by the same equations."""
    dtype = compute_dtype(x.q, x.k, x.v, x.beta, *x.initial_state)
    with torch.autocast(x.v.device.type, enabled=False):
        M, J, output, var = _one_token(*x[:6], *(y.to(dtype) for y in x.initial_state))
    x.initial_state.M.copy_(M)
    x.initial_state.J.copy_(J)
    return output.to(x.v.dtype), var if x.variance else None
