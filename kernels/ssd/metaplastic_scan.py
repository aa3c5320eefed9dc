"""The plain Mamba2 scan by the kernels of the metaplastic scan, for GPUs without mamba-ssm.

With a prior of 1 and no beta the importance of everything stays 1, and what is left is the plain scan. One beta per
head, so it takes the kernels whose inner sums are matrix products.
"""

import torch
from torch import Tensor

from ..common.precision import compute_dtype
from ..metaplastic.scan import METAPLASTIC_SCAN, metaplastic_scan, metaplastic_step
from ..metaplastic.types import ScanProblem, ScanState
from .types import SsdProblem


def unavailable(device: torch.device) -> str | None:
    """Needs that scan's kernels."""
    return METAPLASTIC_SCAN.reason("triton", device)


def unsupported(problem: SsdProblem) -> str | None:
    """What those kernels cannot run."""
    size = ScanProblem(problem.dtype, head_dim=64, state_size=problem.state_size, beta_groups=1)
    return METAPLASTIC_SCAN.reason("triton", "cuda", size)


def scan(x, dt, A, B, C, initial_state, cu_seqlens, chunk_size) -> tuple[Tensor, Tensor]:
    """`mamba2_scan.mamba2_scan` with the importance at 1."""
    state = None if initial_state is None else initial_state.to(compute_dtype(x, B, C))
    out = metaplastic_scan(
        C.to(x.dtype),
        B.to(x.dtype),
        (x * dt.unsqueeze(-1)).to(x.dtype),
        x.new_zeros(*dt.shape, 1),
        dt * A,
        torch.ones_like(A),
        initial_state=None if state is None else ScanState(state, _nothing(state)),
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
    )
    return out.output, out.state.M


def step(x, dt, A, B, C, state) -> Tensor:
    """`mamba2_scan.mamba2_step` with the importance at 1."""
    beta, v = x.new_zeros(*dt.shape, 1), (x * dt.unsqueeze(-1)).to(x.dtype)
    q, k = C.to(x.dtype), B.to(x.dtype)
    return metaplastic_step(q, k, v, beta, dt * A, torch.ones_like(A), ScanState(state, _nothing(state)))


def _nothing(state: Tensor) -> Tensor:
    """Zeros [rows, H, 1, N] beside a state [rows, H, P, N]."""
    return torch.zeros_like(state[:, :, :1])
