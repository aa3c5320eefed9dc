"""The causal convolution in plain torch."""

import torch
from torch.nn.functional import silu

from ..common.precision import compute_dtype


def conv(x, weight, bias, activation, history):
    """See `causal_conv.py`."""
    dtype, length = compute_dtype(x), x.shape[1]
    with torch.autocast(x.device.type, enabled=False):
        window = torch.cat((history.transpose(1, 2), x), 1).to(dtype)
        weight = weight.to(dtype)
        y = None if bias is None else bias.to(dtype)
        for j in range(weight.shape[1]):
            term = window[:, j : j + length]
            y = term * weight[:, j] if y is None else torch.addcmul(y, term, weight[:, j])
        return (silu(y) if activation else y).to(x.dtype)
