"""The causal depthwise convolution of a Mamba2 mixer, with its SiLU, its carried state and packed documents.

A backend is one file beside this one and one line in `CAUSAL_CONV`. Its module offers

    conv(x [B, T, C], weight [C, W], bias [C] | None, activation, history [B, C, W-1]) -> y [B, T, C]
    unavailable(device) -> str | None       optional: why it cannot run on this device
    unsupported(problem) -> str | None      optional: why it cannot run this `ConvProblem`

where `history` are the inputs before the first token (zeros included); states and documents are handled here.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

from ...base.errors import UsageError
from ..backends import TRITON_DEVICES, Backend, Operator, eager
from ..common.documents import check_cu_seqlens
from ..common.precision import compute_dtype
from ..common.torch_blocks import row_lengths
from .types import ConvProblem

CAUSAL_CONV = Operator(
    "the causal convolution",
    Backend("causal_conv1d", "conv.package_conv", ("cuda",)),
    Backend("triton", "conv.triton_conv", TRITON_DEVICES),
    Backend("torch", "conv.torch_conv", kernel=False),
)


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
        initial_state: [B, C, W-1], the inputs before the first token, oldest first; one per document with
            `cu_seqlens`; zeros when None.
        cu_seqlens: [S + 1] starts of packed documents, then T; needs a batch of 1.
        backend: "auto" or a name of `CAUSAL_CONV`.

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
    run = CAUSAL_CONV.choose(backend, x.device, ConvProblem(x.dtype, channels, past + 1)).conv
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


def _check(x, weight, bias, activation) -> None:
    if x.dim() != 3:
        raise UsageError(f"x has shape {list(x.shape)}; expected [B, T, C].")
    if weight.dim() != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] < 2:
        raise UsageError(f"weight has shape {list(weight.shape)}; expected [{x.shape[2]}, W] with W of at least 2.")
    if bias is not None and bias.shape != (x.shape[2],):
        raise UsageError(f"bias has shape {list(bias.shape)}; expected [{x.shape[2]}].")
    if activation not in ("silu", None):
        raise UsageError(f"activation is {activation!r}; expected 'silu' or None.")
