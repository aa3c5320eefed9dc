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
    if initial_state is not None:
        initial_state = _with_importance(initial_state.to(compute_dtype(x, B, C)))
    options = {"initial_state": initial_state, "cu_seqlens": cu_seqlens, "chunk_size": chunk_size}
    output, state, _ = metaplastic_scan(*_operands(x, dt, A, B, C), **options)
    return output, state.M


def step(x, dt, A, B, C, state) -> Tensor:
    """`mamba2_scan.mamba2_step` with the importance at 1."""
    return metaplastic_step(*_operands(x, dt, A, B, C), _with_importance(state))


def _operands(x, dt, A, B, C) -> tuple[Tensor, ...]:
    """q, k, v, beta, log_decay and prior, of a sequence or of one token."""
    v = (x * dt.unsqueeze(-1)).to(x.dtype)
    return C.to(x.dtype), B.to(x.dtype), v, x.new_zeros(*dt.shape, 1), dt * A, torch.ones_like(A)


def _with_importance(M: Tensor) -> ScanState:
    """The state [rows, H, P, N], and as its importance beyond the prior zeros [rows, H, 1, N]."""
    return ScanState(M, torch.zeros_like(M[:, :, :1]))
