"""The two mixers: Mamba2 with mamba_ssm's semantics, and Palimpsa-M on the same tensors plus `metaplasticity`.

in_proj(h) = [z | x B C | dt]          z and x: H P channels, head by head; B, C: G groups of N; dt: H
x B C      = silu(causal_conv(x B C))
d_t        = clamp(softplus(dt + dt_bias), time_step_limit),  log a_t = -exp(A_log) d_t
Mamba2:      y_t = SSD(d_t x, B, C)
Palimpsa-M:  y_t = metaplastic_scan(q=C, k=B, v=d_t x, beta_t, log a_t, I_prior)
out        = out_proj(norm_by_group((y + D x) * silu(z)))
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..kernels.common.precision import compute_dtype
from ..kernels.common.scaling import scale_rows
from ..kernels.conv.causal_conv import causal_conv, causal_conv_step
from ..kernels.metaplastic.scan import metaplastic_scan, metaplastic_step
from ..kernels.metaplastic.types import ScanState
from ..kernels.ssd.mamba2_scan import mamba2_scan, mamba2_step
from .geometry import MIXER_FP32, GateSpec, MixerGeometry
from .layout import SequenceLayout, reorder
from .metaplasticity import Metaplasticity
from .precision import KeepFp32Mixin
from .states import LayerStates


class CausalConv1d(nn.Conv1d):
    """Depthwise causal convolution with SiLU over [B, T, C]; a module of its own, so that hooks on its weight fire."""

    def __init__(self, channels: int, width: int, bias: bool) -> None:
        super().__init__(channels, channels, width, groups=channels, padding=width - 1, bias=bias)

    def forward(
        self, x: Tensor, layout: SequenceLayout | None = None, state: Tensor | None = None, *, step: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Convolves a piece of text.

        Args:
            x: [B, T, C], or [B, C] for one step.
            layout: padding and packing; pads neither reach a real token nor the state.
            state: [B, C, W - 1], the last inputs before this piece; written in place when `step`.
            step: one token after `state`.

        Returns:
            The output in the shape of `x`, and the state after the last real token (documents of a packed batch have
            states [S, C, W - 1]).
        """
        weight = self.weight.squeeze(1)
        if step:
            return causal_conv_step(x, state, weight, self.bias, "silu"), state
        cu_seqlens = None if layout is None else layout.cu_seqlens
        padded = layout is not None and layout.order is not None
        if padded:
            x = reorder(x, layout.order)
        y, final = causal_conv(x, weight, self.bias, activation="silu", initial_state=state, cu_seqlens=cu_seqlens)
        if padded:
            y = reorder(y, layout.inverse)
            final = final if layout.packed else self._last_inputs(x, state, layout.lengths)
        return y, final

    def _last_inputs(self, x: Tensor, state: Tensor | None, lengths: Tensor) -> Tensor:
        """The last W - 1 real inputs [B, C, W - 1] of rows that hold `lengths` real tokens first."""
        tail = self.kernel_size[0] - 1
        before = x.new_zeros(x.shape[0], tail, x.shape[2]) if state is None else state.transpose(1, 2).to(x.dtype)
        positions = lengths.unsqueeze(1) + torch.arange(tail, device=x.device)
        return reorder(torch.cat([before, x], dim=1), positions).transpose(1, 2)


class GatedRMSNorm(nn.Module):
    """RMSNorm(y * silu(z)) with a weight, over each group's channels separately (norm_before_gate=False).

    Args:
        channels: H P.
        group_size: channels a group, H P / G.
        eps: added to the mean square.
    """

    def __init__(self, channels: int, group_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.group_size = group_size
        self.eps = eps

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """y, z [B, T, H P]; the result has the type of `z`."""
        dtype = compute_dtype(y, z)
        gated = (y.to(dtype) * nn.functional.silu(z.to(dtype))).unflatten(-1, (-1, self.group_size))
        normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.eps)
        return (normed.flatten(-2) * self.weight.to(dtype)).to(z.dtype)


class Mamba2Mixer(KeepFp32Mixin, nn.Module):
    """A plain Mamba2 mixer.

    `A_log`, `dt_bias` and `D` stay in fp32 when the model is cast to a shorter type.

    Args:
        geometry: sizes and limits.
        layer_idx: this layer's place in the cache.

    Attributes:
        backend: which kernels run the scan, "auto" by default.
    """

    keep_fp32 = MIXER_FP32

    def __init__(self, geometry: MixerGeometry, layer_idx: int = 0) -> None:
        super().__init__()
        self.geometry = geometry
        self.layer_idx = layer_idx
        self.backend = "auto"
        heads = geometry.num_heads
        self.in_proj = nn.Linear(geometry.hidden_size, geometry.projection_size, bias=geometry.use_bias)
        self.conv1d = CausalConv1d(geometry.conv_channels, geometry.conv_kernel, bias=geometry.use_conv_bias)
        self.dt_bias = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        self.A_log = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        self.D = nn.Parameter(torch.ones(heads, dtype=torch.float32))
        self.norm = GatedRMSNorm(geometry.inner_size, geometry.inner_size // geometry.n_groups, geometry.norm_eps)
        self.out_proj = nn.Linear(geometry.inner_size, geometry.hidden_size, bias=geometry.use_bias)

    def project(self, hidden: Tensor) -> Tensor:
        """The input projection [B, T, 2 H P + 2 G N + H] of `hidden` [B, T, D]."""
        return self.in_proj(hidden)

    def gated_norm(self, y: Tensor, z: Tensor) -> Tensor:
        """The norm over y gated by z, both [B, T, H P]."""
        return self.norm(y, z)

    def split_projection(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z [.., H P], x B C [.., H P + 2 G N] and dt before bias [.., H], from the output of `in_proj`."""
        return projected.split(self.geometry.projection_sizes, dim=-1)

    def split_channels(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [.., H, P], B and C [.., G, N], from the output of the convolution."""
        geometry = self.geometry
        keys = geometry.n_groups * geometry.state_size
        x, B, C = convolved.split([geometry.inner_size, keys, keys], dim=-1)
        groups = (geometry.n_groups, geometry.state_size)
        return (
            x.unflatten(-1, (geometry.num_heads, geometry.head_dim)),
            B.unflatten(-1, groups),
            C.unflatten(-1, groups),
        )

    def step_size(self, dt_raw: Tensor) -> Tensor:
        """d_t: bias, softplus, clamp to `time_step_limit`; fp32 (fp64 in an fp64 model).

        Prefill, decode and measuring all take it from here. Bias and softplus are in fp32 whatever the weights are.
        """
        dtype = compute_dtype(dt_raw, self.dt_bias)
        step = nn.functional.softplus(dt_raw.to(dtype) + self.dt_bias.to(dtype))
        low, high = self.geometry.time_step_limit
        return step if low <= 0.0 and high == float("inf") else step.clamp(low, high)

    def decay_rate(self) -> Tensor:
        """A = exp(A_log) > 0, [H], nats a unit of step size; fp32 (fp64 in an fp64 model)."""
        return self.A_log.to(compute_dtype(self.A_log)).exp()

    def forward(self, hidden: Tensor, cache=None, layout: SequenceLayout | None = None) -> Tensor:
        """Mixes along time.

        Args:
            hidden: [B, T, D], after the block's norm.
            cache: a transformers cache; read when it holds this layer's states, and written.
            layout: padding and packing of the batch.

        Returns:
            [B, T, D].
        """
        states = None if cache is None else LayerStates(cache, self.layer_idx)
        z, channels, dt_raw = self.split_projection(self.project(hidden))
        step = self.step_size(dt_raw)
        if layout is not None and layout.mask is not None:
            # A pad has step size 0: no decay, no value and no importance, so that no state moves.
            step = step * layout.mask.unsqueeze(-1)
        one_more = states is not None and states.filled and hidden.shape[1] == 1 and layout is None
        # A step writes states in place, which autograd cannot follow: with gradients on, one token is a scan of one.
        run = self._decode if one_more and not torch.is_grad_enabled() else self._mix
        y = run(hidden, channels, step, states, layout)
        return self.out_proj(self.gated_norm(y.flatten(-2), z).to(hidden.dtype))

    def _mix(self, hidden, channels, step, states, layout) -> Tensor:
        """y [B, T, H, P] of a whole piece; the states after it go to the cache."""
        before = states if states is not None and states.filled else None
        gate = self._gate(hidden, step)
        with torch.autocast(channels.device.type, enabled=False):
            convolved, conv_state = self.conv1d(channels, layout, before.conv if before else None)
            x, B, C = self.split_channels(convolved)
            y, recurrent = self._scan(x, B, C, step, gate, before.recurrent if before else None, layout)
            y = self._skip(y, x)
        if states is not None:
            states.store(conv_state, recurrent)
        return y

    def _decode(self, hidden, channels, step, states, layout) -> Tensor:
        """y [B, 1, H, P] of one token; the states in the cache are updated in place."""
        gate = self._gate(hidden, step)
        with torch.autocast(channels.device.type, enabled=False):
            convolved, _ = self.conv1d(channels[:, 0], state=states.conv, step=True)
            x, B, C = self.split_channels(convolved)
            return self._skip(self._one_step(x, B, C, step[:, 0], gate, states.recurrent), x).unsqueeze(1)

    def _skip(self, y: Tensor, x: Tensor) -> Tensor:
        dtype = compute_dtype(x, self.D)
        return y.to(dtype) + x.to(dtype) * self.D.to(dtype).unsqueeze(-1)

    def _gate(self, hidden: Tensor, step: Tensor):
        """What the scan needs beside the channels and the step; nothing in plain Mamba2."""
        return None

    def _scan(self, x, B, C, step, gate, state, layout) -> tuple[Tensor, Tensor | None]:
        cu_seqlens = None if layout is None else layout.cu_seqlens
        return mamba2_scan(
            x,
            step,
            -self.decay_rate(),
            B,
            C,
            initial_state=state,
            cu_seqlens=cu_seqlens,
            chunk_size=self.geometry.chunk_size,
            backend=self.backend,
            final_state=cu_seqlens is None,  # no cache takes the states of packed documents
        )

    def _one_step(self, x, B, C, step, gate, state) -> Tensor:
        return mamba2_step(x, step, -self.decay_rate(), B, C, state)


class PalimpsaMixer(Mamba2Mixer):
    """Palimpsa-M: the tensors of Mamba2, and the importance gate of `metaplasticity`.

    Its recurrent state is one tensor [B, H, P + g, N]: M in the first P rows of a head, J in the last g.

    Args:
        geometry: sizes and limits.
        gate: sizes and form of the importance gate.
        layer_idx: this layer's place in the cache.

    Attributes:
        importance_observer: called with (layer index, final J, prior) after each scan while statistics are recorded.
    """

    def __init__(self, geometry: MixerGeometry, gate: GateSpec, layer_idx: int = 0) -> None:
        super().__init__(geometry, layer_idx)
        self.metaplasticity = Metaplasticity(geometry, gate)
        self.importance_observer: Callable[[int, Tensor, Tensor], None] | None = None

    def split_state(self, recurrent: Tensor) -> ScanState:
        """M [B, H, P, N] and J [B, H, g, N] as views of this layer's recurrent state."""
        return ScanState(*recurrent.split([self.geometry.head_dim, self.metaplasticity.spec.groups], dim=2))

    def _gate(self, hidden: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        return self.metaplasticity(hidden, step)

    def _scan(self, x, B, C, step, gate, state, layout) -> tuple[Tensor, Tensor]:
        beta, prior = gate
        out = metaplastic_scan(
            C,
            B,
            _value(x, step),
            beta,
            -self.decay_rate() * step,
            prior,
            initial_state=None if state is None else self.split_state(state),
            cu_seqlens=None if layout is None else layout.cu_seqlens,
            backend=self.backend,
        )
        if self.importance_observer is not None:
            self.importance_observer(self.layer_idx, out.state.J.detach(), prior.detach())
        return out.output, torch.cat(out.state, dim=2)

    def _one_step(self, x, B, C, step, gate, state) -> Tensor:
        beta, prior = gate
        decay = -self.decay_rate() * step
        views = self.split_state(state)
        return metaplastic_step(C, B, _value(x, step), beta[:, 0], decay, prior, views, backend=self.backend)


def _value(x: Tensor, step: Tensor) -> Tensor:
    """v = d_t x: the product in fp32, in the type of `x`."""
    return scale_rows(x, step, x.dtype)
