"""The plain Mamba2 scan by the package mamba-ssm; its import fails where it was built without its CUDA part."""

import torch
from mamba_ssm.ops.triton.selective_state_update import selective_state_update
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from torch import Tensor

from .types import SsdProblem

DEFAULT_CHUNK = 256


def unsupported(problem: SsdProblem) -> str | None:
    """Its scan multiplies fp32 in TF32 (errors near 1e-3), its step does not."""
    if problem.dtype == torch.float64:
        return "it has no fp64"
    if problem.packed_states:
        return "it has no states of packed documents"
    if problem.exact and problem.dtype == torch.float32 and not problem.one_token and not _tf32_allowed():
        return "it multiplies fp32 in TF32; torch.set_float32_matmul_precision('high') allows it"
    return None


def _tf32_allowed() -> bool:
    """Whether matrix products of fp32 may run in TF32, however that was said."""
    # Since torch 2.9 this knows of every switch. The older question fails once a newer switch was set, as
    # transformers' `tf32=True` does.
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return torch.get_float32_matmul_precision() != "highest" if precision is None else precision == "tf32"


def scan(x, dt, A, B, C, initial_state, cu_seqlens, chunk_size) -> tuple[Tensor, Tensor | None]:
    """`mamba2_scan.mamba2_scan` by mamba-ssm; packed documents leave no state."""
    chunk_size = chunk_size or DEFAULT_CHUNK
    with torch.cuda.device(x.device):
        if cu_seqlens is None:
            y, state = mamba_chunk_scan_combined(
                x, dt, A, B, C, chunk_size, initial_states=initial_state, return_final_states=True
            )
            return y, state.float()
        token = torch.arange(x.shape[1], device=x.device)
        document = torch.searchsorted(cu_seqlens.to(x.device, token.dtype)[1:], token, right=True)
        return mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, seq_idx=document.int().unsqueeze(0)), None


@torch.no_grad()
def step(x, dt, A, B, C, state):
    """`mamba2_scan.mamba2_step` by mamba-ssm."""
    heads, head_dim, size = state.shape[1:]
    dt, A = dt.unsqueeze(-1).expand(-1, -1, head_dim), A[:, None, None].expand(heads, head_dim, size)
    # Up to 2.3.2 it reads the strides of the bias and of D even where none is given.
    zero = A.new_zeros(heads, 1).expand(heads, head_dim)
    with torch.cuda.device(x.device):
        return selective_state_update(state, x, dt, A, B, C, D=zero, dt_bias=zero)
