"""The plain Mamba2 scan, for layers that keep their mixer: mamba-ssm's kernels where they work, else those of the
metaplastic scan with the importance at 1, else torch.

A backend is one file beside this one and one line in `MAMBA2_SCAN`. Its module offers

    scan(x, dt, A, B, C, initial_state, cu_seqlens, chunk_size) -> (y, final state, or None where it has none)
    step(x, dt, A, B, C, state) -> y
    unavailable(device) -> str | None       optional: why it cannot run on this device
    unsupported(problem) -> str | None      optional: why it cannot run this `SsdProblem`
"""

import torch
from torch import Tensor

from ...base.errors import UsageError
from ..backends import Backend, Operator, eager
from ..common.documents import check_cu_seqlens
from ..common.precision import compute_dtype
from .types import SsdProblem

MAMBA2_SCAN = Operator(
    "the Mamba2 scan",
    Backend("mamba_ssm", "ssd.package_scan", ("cuda",)),
    Backend("metaplastic", "ssd.metaplastic_scan", ("cuda", "xpu")),
    Backend("torch", "ssd.torch_scan", kernel=False),
)


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
        initial_state: [B, H, P, N], one per document with `cu_seqlens`; zeros when None.
        cu_seqlens: [S + 1] starts of packed documents, then T; needs a batch of 1.
        chunk_size: tokens a chunk, a power of two; a backend's own choice when None; at most 64 in torch.
        backend: "auto" or a name of `MAMBA2_SCAN`. mamba-ssm's kernels take packed documents only without initial and
            final states; "auto" takes the next for those.
        final_state: False when the state is not needed, None is then returned for it.

    Returns:
        y [B, T, H, P] in x's dtype and the final state [B or S, H, P, N] in fp32 (fp64 for fp64 inputs).

    Raises:
        UsageError: an argument has a wrong shape.
        KernelUnavailableError: the backend cannot run here.
    """
    _check(x, dt, A, B, C, initial_state, cu_seqlens)
    packed_states = cu_seqlens is not None and (final_state or initial_state is not None)
    dtype = torch.float64 if compute_dtype(x, B, C) == torch.float64 else x.dtype
    problem = SsdProblem(dtype, B.shape[3], packed_states, exact=backend == "auto")
    run = MAMBA2_SCAN.choose(backend, x.device, problem).scan
    y, state = run(x, dt, A, B, C, initial_state, cu_seqlens, chunk_size)
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
    problem = SsdProblem(compute_dtype(x, B, C), B.shape[-1], one_token=True)
    return MAMBA2_SCAN.choose(backend, x.device, problem).step(x, dt, A, B, C, state)


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
