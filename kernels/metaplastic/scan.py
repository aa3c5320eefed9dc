"""The operator's front door: `metaplastic_scan` and `metaplastic_step` validate, choose a backend and run it.

A backend is one file beside this one and one line in `_BACKENDS`. Its module offers

    scan(q, k, v, beta, log_decay, prior, *, initial_state, cu_seqlens, chunk_size, variance) -> ScanOutput
    step(q, k, v, beta, log_decay, prior, state, *, variance) -> (output, variance or None)
    unavailable(device) -> str | None                why it cannot run on this device, None when it can
    unsupported(shape) -> str | None                 optional: why it cannot run this `ScanShape`
"""

import functools

import torch
from torch import Tensor

from ...base.errors import KernelUnavailableError, UsageError
from ..backends import eager, kernel_module, require_kernels
from ..common.documents import check_cu_seqlens
from .types import ScanOutput, ScanShape, ScanState

# Fastest first: "auto" takes the first that can run on the device.
_BACKENDS = {
    "gluon": "gluon_scan",
    "triton": "triton_scan",
    "numba": "numba_scan",
    "torch": "torch_chunk",
    "reference": "reference",
}
_AUTO = {"cuda": ("gluon", "triton", "torch"), "cpu": ("numba", "torch"), "other": ("triton", "torch")}
_KERNELS = frozenset({"gluon", "triton", "numba"})


@functools.cache
def _import(module: str):
    """The module, or the error that its import raised (a broken triton raises more than ImportError); tried once."""
    try:
        return kernel_module(f"metaplastic.{module}")
    except Exception as error:
        return error


def load_backend(name: str):
    """Import one backend's module.

    Raises:
        UsageError: the name is not in the registry.
        KernelUnavailableError: the module cannot be imported here.
    """
    if name not in _BACKENDS:
        raise UsageError(f"backend={name!r} is unknown; expected auto, {', '.join(_BACKENDS)}.")
    module = _import(_BACKENDS[name])
    if isinstance(module, Exception):
        raise KernelUnavailableError(f"backend {name!r} cannot be imported here: {module}; use backend='auto'.")
    return module


def why_unavailable(name: str, device: torch.device | str, shape: ScanShape | None = None) -> str | None:
    """The reason why backend `name` cannot run on `device` (and `shape`), or None when it can."""
    if name in _BACKENDS and isinstance(_import(_BACKENDS[name]), Exception):
        return f"it cannot be imported ({_import(_BACKENDS[name])})"
    module = load_backend(name)
    reason = module.unavailable(torch.device(device))
    if reason is None and shape is not None and hasattr(module, "unsupported"):
        reason = module.unsupported(shape)
    return reason


def backends(device: torch.device | str = "cpu") -> dict[str, str | None]:
    """Every backend's name with the reason why it cannot run on `device`, or None when it can."""
    return {name: why_unavailable(name, device) for name in _BACKENDS}


def resolve_backend(name: str, device: torch.device | str, shape: ScanShape | None = None) -> str:
    """The backend that will run.

    Args:
        name: "auto" or a name of the registry.
        device: where the tensors are.
        shape: sizes of the problem, when known.

    Raises:
        KernelUnavailableError: the named backend cannot run here, or kernels are required and none can.
        UsageError: the name is unknown.
    """
    device = torch.device(device)
    if name != "auto":
        reason = why_unavailable(name, device, shape)
        if reason is not None:
            raise KernelUnavailableError(f"backend {name!r} cannot run on {device}: {reason}; use backend='auto'.")
        return name
    reasons = []
    for candidate in _AUTO.get(device.type, _AUTO["other"]):
        if candidate not in _KERNELS:
            if require_kernels():
                break
            return candidate
        reason = why_unavailable(candidate, device, shape)
        if reason is None:
            return candidate
        reasons.append(f"{candidate}: {reason}")
    raise KernelUnavailableError(
        f"kernels are required but none can run the metaplastic scan on {device} "
        f"({'; '.join(reasons)}); install what is missing or drop --require-kernels."
    )


@eager
def metaplastic_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    prior: Tensor,
    *,
    initial_state: ScanState | tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
    variance: bool = False,
) -> ScanOutput:
    """Palimpsa-M over a whole sequence.

    Per head, with a_t = exp(log_decay_t), I_t = prior + J_t and M the product of importance and memory:
        M_t = a_t M_{t-1} + v_t (x) k_t      J_t = a_t J_{t-1} + beta_t (x) k_t^2      o_t = sum_k q_t M_t / I_t
    All inputs and the initial state are differentiable, through the output, the final state and the variance.

    Args:
        q: [B, T, G, N] queries; head i uses group i // (H / G).
        k: [B, T, G, N] keys.
        v: [B, T, H, P] values, already times the step size.
        beta: [B, T, H, g] >= 0, already times the step size; g divides P and channel c uses beta[..., c // (P / g)].
        log_decay: [B, T, H] <= 0, nats a token.
        prior: [H] > 0.
        initial_state: (M [B, H, P, N], J [B, H, g, N]); zeros when None. With `cu_seqlens` one state a document.
        cu_seqlens: [S + 1] integers, where each packed document starts, then T; needs B = 1.
        chunk_size: tokens between stored states; a backend's own choice when None.
        backend: "auto" or a name of `backends`.
        variance: also return sum_k q_t^2 / I_t.

    Returns:
        output [B, T, H, P] in v's dtype; state in fp32 (fp64 for fp64 inputs), leading size B, or S when packed;
        variance [B, T, H, g] in the state's dtype, or None.

    Raises:
        UsageError: an argument has a wrong shape, dtype, device or value.
        KernelUnavailableError: the backend cannot run here.
    """
    _check_scan(q, k, v, beta, log_decay, prior, cu_seqlens, chunk_size)
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if initial_state is not None:
        initial_state = ScanState(*initial_state)
        _check_state("initial_state", initial_state, rows, v, k, beta)
    shape = _scan_shape(k, v, beta, cu_seqlens is not None, variance)
    module = load_backend(resolve_backend(backend, v.device, shape))
    return module.scan(
        q,
        k,
        v,
        beta,
        log_decay,
        prior,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        variance=variance,
    )


@eager
def metaplastic_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    prior: Tensor,
    state: ScanState | tuple[Tensor, Tensor],
    *,
    backend: str = "auto",
    variance: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """One token: `state` is updated in place. Not differentiable: a scan of one token is.

    Args:
        q: [B, G, N].
        k: [B, G, N].
        v: [B, H, P].
        beta: [B, H, g].
        log_decay: [B, H].
        prior: [H].
        state: (M [B, H, P, N], J [B, H, g, N]) in fp32; strided views are fine when the last dimension is contiguous.
        backend: as in `metaplastic_scan`.
        variance: also return sum_k q^2 / I.

    Returns:
        output [B, H, P] in v's dtype; with `variance` a pair (output, variance [B, H, g]).

    Raises:
        UsageError: an argument has a wrong shape, dtype, device or value.
        KernelUnavailableError: the backend cannot run here.
    """
    lifted = {"q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay}
    for name, rank in (("q", 3), ("k", 3), ("v", 3), ("beta", 3), ("log_decay", 2)):
        if lifted[name].dim() != rank:
            raise UsageError(
                f"{name} of one step has shape {_dims(lifted[name])}; expected {rank} dimensions, no time."
            )
    q1, k1, v1, beta1, log_decay1 = (x.unsqueeze(1) for x in lifted.values())
    _check_scan(q1, k1, v1, beta1, log_decay1, prior, None, None)
    state = ScanState(*state)
    _check_state("state", state, v.shape[0], v1, k1, beta1)
    if state.M.stride(-1) != 1 or state.J.stride(-1) != 1:
        raise UsageError("state has a last dimension that is not contiguous; expected M and J with stride 1 over N.")
    shape = _scan_shape(k1, v1, beta1, False, variance)
    module = load_backend(resolve_backend(backend, v.device, shape))
    output, var = module.step(q, k, v, beta, log_decay, prior, state, variance=variance)
    return (output, var) if variance else output


def _dims(x: Tensor) -> str:
    return str(list(x.shape))


def _scan_shape(k: Tensor, v: Tensor, beta: Tensor, packed: bool, variance: bool) -> ScanShape:
    dtype = torch.float64 if torch.float64 in (k.dtype, v.dtype, beta.dtype) else v.dtype
    return ScanShape(*k.shape[:3], *v.shape[2:], k.shape[3], beta.shape[3], dtype, packed, variance)


def _check_scan(q, k, v, beta, log_decay, prior, cu_seqlens, chunk_size) -> None:
    named = {"q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay, "prior": prior}
    for name, rank in (("q", 4), ("k", 4), ("v", 4), ("beta", 4), ("log_decay", 3), ("prior", 1)):
        x = named[name]
        if x.dim() != rank:
            raise UsageError(f"{name} has shape {_dims(x)}; expected {rank} dimension{'s' * (rank > 1)}.")
        if not x.is_floating_point():
            raise UsageError(f"{name} has dtype {x.dtype}; expected a floating dtype.")
        if x.device != v.device:
            raise UsageError(f"{name} is on {x.device} while v is on {v.device}; expected one device for all inputs.")
    batch, length, heads, head_dim = v.shape
    groups, state_size = k.shape[2:]
    if 0 in (length, groups, state_size, heads, head_dim, batch):
        raise UsageError(f"v has shape {_dims(v)} and k {_dims(k)}; expected no empty dimension, at least one token.")
    if heads % groups:
        raise UsageError(
            f"v has {heads} heads and k {groups} groups; expected a number of groups that divides the heads."
        )
    expected = {
        "k": (batch, length, groups, state_size),
        "q": (batch, length, groups, state_size),
        "beta": (batch, length, heads, beta.shape[3]),
        "log_decay": (batch, length, heads),
        "prior": (heads,),
    }
    for name, wanted in expected.items():
        if named[name].shape != wanted:
            raise UsageError(f"{name} has shape {_dims(named[name])}; expected {list(wanted)} beside v {_dims(v)}.")
    if not beta.shape[3] or head_dim % beta.shape[3]:
        raise UsageError(f"beta has {beta.shape[3]} groups; expected a divisor of the {head_dim} channels of a head.")
    if chunk_size is not None and chunk_size < 1:
        raise UsageError(f"chunk_size is {chunk_size}; expected a positive number of tokens.")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch, length)
    _check_values(log_decay, prior)


def _check_values(log_decay: Tensor, prior: Tensor) -> None:
    if prior.device.type != "cpu":  # reading values of a CUDA tensor would stall the stream
        return
    if not bool((prior.detach() > 0).all()):
        raise UsageError(f"prior holds {prior.min().item():g}; expected every head's prior to be positive and finite.")
    if bool((log_decay.detach() > 0).any()):
        raise UsageError(f"log_decay holds {log_decay.max().item():g}; expected values of at most 0 (decays up to 1).")


def _check_state(name: str, state: ScanState, rows: int, v: Tensor, k: Tensor, beta: Tensor) -> None:
    heads, head_dim, state_size, groups = v.shape[2], v.shape[3], k.shape[3], beta.shape[3]
    wanted = {"M": (rows, heads, head_dim, state_size), "J": (rows, heads, groups, state_size)}
    for part, shape in wanted.items():
        x = getattr(state, part)
        if x.shape != shape:
            raise UsageError(f"{name}.{part} has shape {_dims(x)}; expected {list(shape)}.")
        if not x.is_floating_point():
            raise UsageError(f"{name}.{part} has dtype {x.dtype}; expected a floating dtype.")
        if x.device != v.device:
            raise UsageError(f"{name}.{part} is on {x.device} while v is on {v.device}; expected one device.")
