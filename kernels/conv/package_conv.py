"""The causal convolution by the package causal-conv1d."""

import torch
from causal_conv1d import causal_conv1d_fn

from .types import ConvProblem


def unsupported(problem: ConvProblem) -> str | None:
    """Why this problem cannot run, or None."""
    if problem.dtype == torch.float64:
        return "it has no fp64"
    if problem.channels % 8:
        return f"it needs a multiple of 8 channels, not {problem.channels}"
    if not 2 <= problem.width <= 4:
        return f"it needs a width of 2 to 4, not {problem.width}"
    return None


def conv(x, weight, bias, activation, history):
    """See `causal_conv.py`."""
    # The package wants channels last in memory for x and the state alike.
    states = history.transpose(1, 2).contiguous().transpose(1, 2)
    bias = None if bias is None else bias.to(weight.dtype)
    with torch.cuda.device(x.device):
        y = causal_conv1d_fn(x.contiguous().transpose(1, 2), weight, bias, initial_states=states, activation=activation)
    return y.transpose(1, 2)
