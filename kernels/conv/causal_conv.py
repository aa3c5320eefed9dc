"""The causal depthwise convolution of a Mamba2 mixer, with its SiLU, its carried state and packed documents.

A backend is one line in `_BACKENDS`. Its module offers `unavailable(device) -> str | None` and

    conv(x [B, T, C], weight [C, W], bias [C] | None, activation, history [B, C, W-1]) -> y [B, T, C]

where `history` are the inputs before the first token (zeros included); states and documents are handled here.
"""

import functools

import torch
from torch import Tensor
from torch.nn.functional import silu

from ...base.errors import KernelUnavailableError, UsageError
from ..backends import eager, kernel_module, require_kernels
from ..common.documents import check_cu_seqlens
from ..common.precision import compute_dtype
from ..common.torch_blocks import row_lengths

# Fastest first; "torch" and "causal_conv1d" live in this file, others are modules beside it.
_BACKENDS = {"causal_conv1d": None, "triton": "triton_conv", "torch": None}


@functools.cache
def _causal_conv1d():
    """The package's function, or the reason why it cannot be had: a broken install raises anything at import."""
    try:
        from causal_conv1d import causal_conv1d_fn
    except Exception as error:
        return f"causal-conv1d cannot be imported ({type(error).__name__}: {error})"
    return causal_conv1d_fn


def causal_conv1d_unavailable() -> str | None:
    """Why the causal-conv1d package cannot run here, None when it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    found = _causal_conv1d()
    return found if isinstance(found, str) else None


def why_conv_unavailable(name: str, device: torch.device) -> str | None:
    """Why backend `name` cannot run on `device`, None when it can."""
    if name == "torch":
        return None
    if name == "causal_conv1d":
        return causal_conv1d_unavailable() if device.type == "cuda" else f"the tensors are on {device}, it needs CUDA"
    try:
        return kernel_module(f"conv.{_BACKENDS[name]}").unavailable(device)
    except Exception as error:
        return f"it cannot be imported ({type(error).__name__}: {error})"


def conv_backends(device: torch.device) -> dict[str, str | None]:
    """Every backend of the convolution, the fastest first, and why it cannot run on `device`; None when it can."""
    return {name: why_conv_unavailable(name, device) for name in _BACKENDS}


def _refusal(name: str, dtype: torch.dtype, channels: int | None, width: int | None) -> str | None:
    """Why backend `name` cannot run this problem wherever it is."""
    if dtype == torch.float64:
        return "it has no fp64"
    if name == "causal_conv1d" and (channels or 8) % 8:
        return f"it needs a multiple of 8 channels, not {channels}"
    if name == "causal_conv1d" and not 2 <= (width or 4) <= 4:
        return f"it needs a width of 2 to 4, not {width}"
    return None


def resolve_conv_backend(
    name: str,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    channels: int | None = None,
    width: int | None = None,
) -> str:
    """The backend that the convolution will run on; what is not known of the problem is taken to suit.

    Raises:
        UsageError: unknown name.
        KernelUnavailableError: the named backend cannot run here, or kernels are required and none can.
    """
    device = torch.device(device)
    if name != "auto" and name not in _BACKENDS:
        raise UsageError(f"backend={name!r} is unknown for the convolution; expected auto, {', '.join(_BACKENDS)}.")
    reasons = []
    for candidate in _BACKENDS if name == "auto" else (name,):
        if candidate == "torch" and (name == "torch" or not require_kernels()):
            return candidate
        if candidate == "torch":
            break
        reason = _refusal(candidate, dtype, channels, width) or why_conv_unavailable(candidate, device)
        if reason is None:
            return candidate
        reasons.append(f"{candidate}: {reason}")
    raise KernelUnavailableError(f"the causal convolution cannot run on a kernel on {device} ({'; '.join(reasons)}).")


@eager
def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """y_t = act(bias + sum_j weight[:, W-1-j] x_{t-j}) for each channel.

    Args:
        x: [B, T, C].
        weight: [C, W], the newest token last.
        bias: [C] or None.
        activation: "silu" or None.
        initial_state: [B, C, W-1], the inputs before the first token, oldest first; one a document with
            `cu_seqlens`; zeros when None.
        cu_seqlens: [S + 1] starts of packed documents, then T; needs a batch of 1.
        backend: "auto", "torch", "causal_conv1d" or "triton".

    Returns:
        y [B, T, C] and the last W-1 inputs [B or S, C, W-1], both in x's dtype. Computed in fp32 (fp64 for fp64).

    Raises:
        UsageError: an argument has a wrong shape.
        KernelUnavailableError: the backend cannot run here.
    """
    _check(x, weight, bias, activation)
    batch, length, channels = x.shape
    if not length:
        raise UsageError(f"x has shape {list(x.shape)}; expected at least one token.")
    past = weight.shape[1] - 1
    rows = batch
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch, length)
        rows = cu_seqlens.numel() - 1
    if initial_state is None:
        initial_state = x.new_zeros(rows, channels, past)
    elif initial_state.shape != (rows, channels, past):
        raise UsageError(f"initial_state has shape {list(initial_state.shape)}; expected {[rows, channels, past]}.")
    name = resolve_conv_backend(backend, x.device, x.dtype, channels, past + 1)
    module = _BACKENDS[name]
    here = {"torch": _torch_conv, "causal_conv1d": _package_conv}
    run = kernel_module(f"conv.{module}").conv if module else here[name]
    if cu_seqlens is None:
        y = run(x, weight, bias, activation, initial_state.to(x.dtype))
        recent = torch.cat((initial_state.to(x.dtype).transpose(1, 2), x[:, max(0, length - past) :]), 1)
        return y, recent[:, recent.shape[1] - past :].transpose(1, 2).contiguous()
    return _packed(run, x, weight, bias, activation, initial_state.to(x.dtype), row_lengths(1, length, cu_seqlens))


def _packed(run, x, weight, bias, activation, initial_state, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Every document with its own W-1 earlier inputs put before it: one long row in which no document sees another."""
    past = weight.shape[1] - 1
    sizes = torch.tensor(lengths)
    ends = (sizes + past).cumsum(0)
    shift = torch.arange(1, len(lengths) + 1).repeat_interleave(sizes) * past
    token_at = torch.arange(x.shape[1]) + shift
    state_at = ((ends - sizes - past)[:, None] + torch.arange(past)).flatten()
    source = torch.empty(x.shape[1] + len(lengths) * past, dtype=torch.long)
    source[token_at] = torch.arange(x.shape[1])
    source[state_at] = torch.arange(state_at.numel()) + x.shape[1]
    last = ((ends - past)[:, None] + torch.arange(past)).flatten().to(x.device)
    both = torch.cat((x[0], initial_state.transpose(1, 2).flatten(0, 1)))
    row = both.index_select(0, source.to(x.device)).unsqueeze(0)
    y = run(row, weight, bias, activation, x.new_zeros(1, x.shape[2], past))
    final = row[0].index_select(0, last).unflatten(0, (len(lengths), past)).transpose(1, 2).contiguous()
    return y.index_select(1, token_at.to(x.device)), final


@eager
def causal_conv_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = "silu"
) -> Tensor:
    """One token x [B, C] of `causal_conv`; `state` [B, C, W-1] is updated in place. Not differentiable.

    Raises:
        UsageError: an argument has a wrong shape.
    """
    _check(x.unsqueeze(1) if x.dim() == 2 else x, weight, bias, activation)
    if x.dim() != 2 or state.shape != (*x.shape, weight.shape[1] - 1):
        raise UsageError(
            f"state has shape {list(state.shape)} beside x {list(x.shape)}; expected [B, C, {weight.shape[1] - 1}]."
        )
    return _step(x, state, weight, bias, activation)


@torch.no_grad()
def _step(x, state, weight, bias, activation):
    window = torch.cat((state.to(x.dtype), x.unsqueeze(-1)), -1)
    dtype = compute_dtype(x)
    y = (window.to(dtype) * weight.to(dtype)).sum(-1)
    y = y if bias is None else y + bias.to(dtype)
    state.copy_(window[..., 1:])
    return (silu(y) if activation else y).to(x.dtype)


def _torch_conv(x, weight, bias, activation, history):
    dtype, length = compute_dtype(x), x.shape[1]
    with torch.autocast(x.device.type, enabled=False):
        window = torch.cat((history.transpose(1, 2), x), 1).to(dtype)
        weight = weight.to(dtype)
        y = None if bias is None else bias.to(dtype)
        for j in range(weight.shape[1]):
            term = window[:, j : j + length]
            y = term * weight[:, j] if y is None else torch.addcmul(y, term, weight[:, j])
        return (silu(y) if activation else y).to(x.dtype)


def _package_conv(x, weight, bias, activation, history):
    # The package wants channels last in memory for x and the state alike.
    states = history.transpose(1, 2).contiguous().transpose(1, 2)
    bias = None if bias is None else bias.to(weight.dtype)
    with torch.cuda.device(x.device):
        y = _causal_conv1d()(x.contiguous().transpose(1, 2), weight, bias, initial_states=states, activation=activation)
    return y.transpose(1, 2)


def _check(x, weight, bias, activation) -> None:
    if x.dim() != 3:
        raise UsageError(f"x has shape {list(x.shape)}; expected [B, T, C].")
    if weight.dim() != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] < 2:
        raise UsageError(f"weight has shape {list(weight.shape)}; expected [{x.shape[2]}, W] with W of at least 2.")
    if bias is not None and bias.shape != (x.shape[2],):
        raise UsageError(f"bias has shape {list(bias.shape)}; expected [{x.shape[2]}].")
    if activation not in ("silu", None):
        raise UsageError(f"activation is {activation!r}; expected 'silu' or None.")
