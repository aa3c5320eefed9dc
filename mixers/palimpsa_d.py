"""Palimpsa-D: the projections of a Gated DeltaNet around the recurrence of Palimpsa-M; nothing is erased along keys.

    q, k   = l2norm(silu(conv(W_q h))), l2norm(silu(conv(W_k h)))      x = silu(conv(W_v h))
    d_t    = softplus(W_dt h + dt_bias)      log a_t = -exp(A_log) d_t
    b_t    = sigmoid(W_bs h)                 write gate, one number a head
    beta_t = sigmoid(W_up W_down h) f(s) b_t
    o_t    = metaplastic_scan(N^-0.5 q, k, b x, beta, log a, I_prior) + D x
    out    = W_o( rmsnorm_by_head(o) * silu(W_g h) )

Equations and names from the authors' public code. The epsilon of the l2 norm is that of the common kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..kernels.common.precision import compute_dtype
from ..kernels.common.scaling import scale_rows
from ..kernels.metaplastic.scan import metaplastic_scan, metaplastic_step
from ..kernels.metaplastic.types import ScanState
from .geometry import GATE, MIXER_FP32, GateSpec, HeadGeometry
from .layout import SequenceLayout
from .metaplasticity import Metaplasticity
from .mixer import CausalConv1d
from .precision import KeepFp32Mixin
from .states import LayerStates

L2_EPS = 1e-6


@dataclass(frozen=True)
class PalimpsaDGeometry(HeadGeometry):
    """The sizes of a Palimpsa-D mixer."""

    norm_eps: float

    @property
    def key_size(self) -> int:
        """Channels of all keys, G N."""
        return self.n_groups * self.state_size

    def shapes(self, gate: GateSpec) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a mixer's parameters, those of its gate included."""
        D, H, keys, values = self.hidden_size, self.num_heads, self.key_size, self.inner_size
        sizes = {"q": keys, "k": keys, "v": values}
        return {
            **{f"{name}_proj.weight": (size, D) for name, size in (sizes | {"g": values, "bs": H, "dt": H}).items()},
            **{f"{name}_conv1d.weight": (size, 1, self.conv_kernel) for name, size in sizes.items()},
            **dict.fromkeys(MIXER_FP32, (H,)),
            "o_norm.weight": (self.head_dim,),
            "o_proj.weight": (D, values),
            **{f"{GATE}.{name}": shape for name, shape in gate.shapes(D, H).items()},
        }


class HeadNorm(nn.Module):
    """RMSNorm of each head's channels with a weight that heads share, then times silu(z)."""

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.eps = eps

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """y, z [B, T, H, P]; the result has the type of `z`."""
        dtype = compute_dtype(y, z)
        wide = y.to(dtype)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight.to(dtype)
        return (normed * nn.functional.silu(z.to(dtype))).to(z.dtype)


class PalimpsaDMixer(KeepFp32Mixin, nn.Module):
    """The mixer. `A_log`, `dt_bias` and `D` stay in fp32 when the model is cast to a shorter type.

    Its recurrent state is one tensor [B, H, P + g, N], as in `PalimpsaMixer`; its convolutional one holds the inputs
    of q, k and v, in this order.

    Args:
        geometry: sizes.
        gate: sizes and form of the importance gate.
        layer_idx: this layer's place in the cache.

    Attributes:
        backend: which kernels run the scan, "auto" by default.
        importance_observer: called with (layer index, final J, prior) after each scan while statistics are recorded.
    """

    keep_fp32 = MIXER_FP32

    def __init__(self, geometry: PalimpsaDGeometry, gate: GateSpec, layer_idx: int = 0) -> None:
        super().__init__()
        self.geometry, self.layer_idx, self.backend = geometry, layer_idx, "auto"
        hidden, heads = geometry.hidden_size, geometry.num_heads
        keys, values, width = geometry.key_size, geometry.inner_size, geometry.conv_kernel
        self.q_proj = nn.Linear(hidden, keys, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, values, bias=False)
        self.g_proj = nn.Linear(hidden, values, bias=False)
        self.bs_proj = nn.Linear(hidden, heads, bias=False)
        self.dt_proj = nn.Linear(hidden, heads, bias=False)
        self.q_conv1d = CausalConv1d(keys, width, bias=False)
        self.k_conv1d = CausalConv1d(keys, width, bias=False)
        self.v_conv1d = CausalConv1d(values, width, bias=False)
        self.A_log = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        self.D = nn.Parameter(torch.ones(heads, dtype=torch.float32))
        self.o_norm = HeadNorm(geometry.head_dim, geometry.norm_eps)
        self.o_proj = nn.Linear(values, hidden, bias=False)
        self.metaplasticity = Metaplasticity(geometry, gate)
        self.importance_observer: Callable[[int, Tensor, Tensor], None] | None = None

    def step_size(self, dt_raw: Tensor) -> Tensor:
        """d_t [B, T, H] from the output of `dt_proj`; fp32 (fp64 in an fp64 model)."""
        dtype = compute_dtype(dt_raw, self.dt_bias)
        return nn.functional.softplus(dt_raw.to(dtype) + self.dt_bias.to(dtype))

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
        step, write = self.step_size(self.dt_proj(hidden)), self._write_gate(hidden)
        if layout is not None and layout.mask is not None:
            # A pad neither forgets nor writes, so that no state moves.
            step, write = (x * layout.mask.unsqueeze(-1) for x in (step, write))
        beta, prior = self.metaplasticity(hidden, write)
        channels = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        one_more = states is not None and states.filled and hidden.shape[1] == 1 and layout is None
        # A step writes states in place, which autograd cannot follow: with gradients on, one token is a scan of one.
        run = self._decode if one_more and not torch.is_grad_enabled() else self._mix
        with torch.autocast(hidden.device.type, enabled=False):
            y = run(channels, write, beta, -self.decay_rate() * step, prior, states, layout)
        z = self.g_proj(hidden).unflatten(-1, (self.geometry.num_heads, -1))
        return self.o_proj(self.o_norm(y, z).flatten(-2).to(hidden.dtype))

    def split_state(self, recurrent: Tensor) -> ScanState:
        """M [B, H, P, N] and J [B, H, g, N] as views of this layer's recurrent state."""
        return ScanState(*recurrent.split([self.geometry.head_dim, self.metaplasticity.spec.groups], dim=2))

    def _write_gate(self, hidden: Tensor) -> Tensor:
        """b_t [B, T, H]; fp32 (fp64 in an fp64 model)."""
        raw = self.bs_proj(hidden)
        return raw.to(compute_dtype(raw)).sigmoid()

    def _mix(self, channels, write, beta, log_decay, prior, states, layout) -> Tensor:
        """y [B, T, H, P] of a whole piece; the states after it go to the cache."""
        before = states if states is not None and states.filled else None
        convolved, conv_states = self._convolve(channels, before.conv if before else None, layout)
        q, k, x = self._split(*convolved)
        out = metaplastic_scan(
            q,
            k,
            scale_rows(x, write, x.dtype),
            beta,
            log_decay,
            prior,
            initial_state=self.split_state(before.recurrent) if before else None,
            cu_seqlens=None if layout is None else layout.cu_seqlens,
            backend=self.backend,
        )
        if self.importance_observer is not None:
            self.importance_observer(self.layer_idx, out.state.J.detach(), prior.detach())
        if states is not None:
            states.store(torch.cat(conv_states, 1), torch.cat(out.state, dim=2))
        return self._skip(out.output, x)

    def _decode(self, channels, write, beta, log_decay, prior, states, layout) -> Tensor:
        """y [B, 1, H, P] of one token; the states in the cache are updated in place."""
        convolved, _ = self._convolve([x[:, 0] for x in channels], states.conv, None, step=True)
        q, k, x = self._split(*convolved)
        gates = scale_rows(x, write[:, 0], x.dtype), beta[:, 0], log_decay[:, 0]
        views = self.split_state(states.recurrent)
        y = metaplastic_step(q, k, *gates, prior, views, backend=self.backend)
        return self._skip(y, x).unsqueeze(1)

    def _convolve(self, channels, state: Tensor | None, layout, *, step: bool = False):
        """The three convolutions, and their states; `state` [B, 2 G N + H P, W - 1] is written in place by a step."""
        sizes = [x.shape[-1] for x in channels]
        parts = (None, None, None) if state is None else state.split(sizes, dim=1)
        convolutions = zip((self.q_conv1d, self.k_conv1d, self.v_conv1d), channels, parts, strict=True)
        return zip(*(conv(x, layout, part, step=step) for conv, x, part in convolutions), strict=True)

    def _split(self, q: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k [.., G, N] of norm N^-0.5 and 1, x [.., H, P]."""
        q, k = (y.unflatten(-1, (self.geometry.n_groups, -1)) for y in (q, k))
        x = x.unflatten(-1, (self.geometry.num_heads, -1))
        return _unit(q, self.geometry.state_size**-0.5), _unit(k), x

    def _skip(self, y: Tensor, x: Tensor) -> Tensor:
        dtype = compute_dtype(x, self.D)
        return y.to(dtype) + x.to(dtype) * self.D.to(dtype).unsqueeze(-1)


def _unit(x: Tensor, scale: float = 1.0) -> Tensor:
    """x over its norm along the last dimension, times `scale`; computed in fp32, in the type of `x`."""
    wide = x.to(compute_dtype(x))
    return (wide * (scale * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPS))).to(x.dtype)
