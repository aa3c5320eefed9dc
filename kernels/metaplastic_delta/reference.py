"""The oracle: one token at a time, under plain autograd, in any dtype up to fp64. Clear before fast."""

import itertools

import torch

from ..common.precision import compute_dtype
from .types import DeltaInputs, DeltaOutput, DeltaState


def scan(x: DeltaInputs) -> DeltaOutput:
    """`scan.metaplastic_delta_scan` by the recurrence itself."""
    with torch.autocast(x.v.device.type, enabled=False):
        if x.cu_seqlens is None:
            return _scan_rows(x)
        parts = []
        for i, (start, stop) in enumerate(itertools.pairwise(x.cu_seqlens.tolist())):
            state = None if x.initial_state is None else DeltaState(*(y[i : i + 1] for y in x.initial_state))
            parts.append(_scan_rows(DeltaInputs(*(y[:, start:stop] for y in x[:6]), x.prior, state)))
        states = DeltaState(*(torch.cat(y) for y in zip(*(p.state for p in parts), strict=True)))
        return DeltaOutput(torch.cat([p.output for p in parts], 1), states)


def _scan_rows(x: DeltaInputs) -> DeltaOutput:
    v, batch, heads, size, dtype = x.v, x.v.shape[0], x.v.shape[2], x.k.shape[3], compute_dtype(*x[:5])
    zeros = (v.new_zeros(batch, heads, *rows, size, dtype=dtype) for rows in ((v.shape[3],), ()))
    S, J = (y.to(dtype) for y in x.initial_state or zeros)
    outputs = [v.new_zeros(batch, 0, *v.shape[2:], dtype=dtype)]
    for t in range(v.shape[1]):
        S, J, output = _one_token(*(y[:, t] for y in x[:6]), x.prior, S, J)
        outputs.append(output.unsqueeze(1))
    return DeltaOutput(torch.cat(outputs, 1).to(v.dtype), DeltaState(S, J))


def _one_token(q, k, v, b, beta, log_decay, prior, S, J):
    """The equations of the operator for one token, out of place: S, J and output."""
    dtype, heads = S.dtype, v.shape[1]
    q, k = (x.to(dtype).repeat_interleave(heads // x.shape[1], 1) for x in (q, k))  # [B, H, N]
    v, b, beta, prior = v.to(dtype), b.to(dtype)[..., None], beta.to(dtype)[..., None], prior.to(dtype)[:, None]
    a = log_decay.to(dtype).exp()
    a = a[..., None] if a.dim() == 2 else a
    forgotten = prior + a * J
    S = S * (a * (prior + J) / forgotten)[:, :, None]
    error = v - (S * k[:, :, None]).sum(-1)
    S = S + error[..., None] * (b * k / forgotten)[:, :, None]
    J = a * J + beta * k**2
    return S, J, (S * q[:, :, None]).sum(-1)


@torch.no_grad()
def step(x: DeltaInputs):
    """`scan.metaplastic_delta_step` by the same equations."""
    dtype = compute_dtype(*x[:5], *x.initial_state)
    with torch.autocast(x.v.device.type, enabled=False):
        S, J, output = _one_token(*x[:7], *(y.to(dtype) for y in x.initial_state))
    x.initial_state.S.copy_(S)
    x.initial_state.J.copy_(J)
    return output.to(x.v.dtype)
