"""The layers that mamba_ssm puts between Mamba2 mixers: causal attention behind a convolution, and a gated MLP.

[q | k | v] = conv(in_proj(h))         H heads of q, H_kv of k and v; depthwise, causal, without an activation
q, k        = turned by the position   on their first channels, halves (i, i + half) together
out         = out_proj(softmax(q k^T / sqrt(P)) v)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from ..kernels.common.precision import compute_dtype
from .attention_geometry import AttentionGeometry, mlp_width
from .attention_states import AttentionStates
from .layout import SequenceLayout, reorder
from .mixer import CausalConv1d


class Projection(nn.Linear):
    """A linear map of one of these layers.

    Args:
        closes: whether it is the last of its residual branch, which starts smaller.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, *, closes: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.closes = closes


class Attention(nn.Module):
    """mamba_ssm's multi-head attention.

    Real tokens are put before pads, so that a causal mask alone keeps pads from them; their positions count real
    tokens only.

    Args:
        geometry: sizes and settings.
        layer_idx: this layer's place in the cache.
    """

    def __init__(self, geometry: AttentionGeometry, layer_idx: int = 0) -> None:
        super().__init__()
        self.geometry = geometry
        self.layer_idx = layer_idx
        rows = sum(geometry.projection_sizes)
        self.in_proj = Projection(geometry.hidden_size, rows, geometry.qkv_proj_bias)
        taps = geometry.d_conv
        self.conv1d = CausalConv1d(rows, taps, bias=True, activation=None) if taps else None
        self.out_proj = Projection(geometry.inner_size, geometry.hidden_size, geometry.out_proj_bias, closes=True)

    def forward(self, hidden: Tensor, cache=None, layout: SequenceLayout | None = None) -> Tensor:
        """Mixes along time.

        Args:
            hidden: [B, T, D], after the block's norm.
            cache: a transformers cache; read when it holds this layer's states, and written.
            layout: padding and packing of the batch.

        Returns:
            [B, T, D].
        """
        states = None if cache is None else AttentionStates(cache, self.layer_idx)
        before = states if states is not None and states.filled else None
        channels, conv_state = self._convolve(self.in_proj(hidden), before, layout)
        padded = layout is not None and layout.order is not None
        if padded:
            channels = reorder(channels, layout.order)
        q, k, v = self._heads(channels)
        positions = self._positions(q.shape[2], q.device, before, layout)
        q, k = self._turn(q, positions), self._turn(k, positions)
        visible = None
        if states is not None:
            lengths = layout.lengths if padded else None
            k, v, visible = states.extend(k, v, conv_state, lengths)
        mixed = self._attend(q, k, v, visible, before is None, layout)
        mixed = mixed.transpose(1, 2).flatten(-2)
        if padded:
            mixed = reorder(mixed, layout.inverse)
        return self.out_proj(mixed)

    def _convolve(self, channels: Tensor, before: AttentionStates | None, layout) -> tuple[Tensor, Tensor | None]:
        if self.conv1d is None:
            return channels, None
        with torch.autocast(channels.device.type, enabled=False):
            return self.conv1d(channels, layout, before.conv if before else None)

    def _heads(self, channels: Tensor) -> tuple[Tensor, ...]:
        """q [B, H, T, P], k and v [B, H_kv, T, P]."""
        parts = channels.split(self.geometry.projection_sizes, dim=-1)
        return tuple(part.unflatten(-1, (-1, self.geometry.head_dim)).transpose(1, 2) for part in parts)

    def _positions(self, length: int, device, before: AttentionStates | None, layout) -> Tensor:
        """[T] or [B, T]: how many real tokens of its row, or document, are before each."""
        positions = torch.arange(length, device=device)
        if layout is not None and layout.packed:
            document = torch.bucketize(positions, layout.cu_seqlens[1:], right=True)
            return positions - layout.cu_seqlens[document]
        return positions if before is None else before.real_tokens + positions

    def _turn(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Rotates the first `rotary_emb_dim` channels of [B, H, T, P]; angles in fp32, or fp64."""
        size = self.geometry.rotary_emb_dim
        if not size:
            return heads
        dtype = compute_dtype(heads)
        powers = torch.arange(0, size, 2, device=heads.device, dtype=dtype) / size
        angles = positions.to(dtype).unsqueeze(-1) * self.geometry.rotary_emb_base**-powers
        if angles.dim() == 3:
            angles = angles.unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        first, second, rest = heads.to(dtype).split([size // 2, size // 2, heads.shape[-1] - size], dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(heads.dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, first: bool, layout) -> Tensor:
        """[B, H, T, P]; `visible` is which keys a query sees, where that is not all those up to its own."""
        shared = self.geometry.num_heads // self.geometry.num_heads_kv
        if shared > 1:
            k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        if layout is None or not layout.packed:
            return scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=first)
        sizes = layout.cu_seqlens.diff().tolist()
        documents = zip(*(part.split(sizes, dim=2) for part in (q, k, v)), strict=True)
        return torch.cat([scaled_dot_product_attention(*parts, is_causal=True) for parts in documents], dim=2)


class GatedMLP(nn.Module):
    """fc2(y * silu(gate)), where [y | gate] = fc1(h); no biases.

    Args:
        hidden_size: D.
        d_intermediate: hidden channels as the config says, before they are rounded up.
    """

    def __init__(self, hidden_size: int, d_intermediate: int) -> None:
        super().__init__()
        width = mlp_width(d_intermediate)
        self.fc1 = Projection(hidden_size, 2 * width, bias=False)
        self.fc2 = Projection(width, hidden_size, bias=False, closes=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, T, D] to the same shape."""
        y, gate = self.fc1(hidden).chunk(2, dim=-1)
        return self.fc2(y * silu(gate))
