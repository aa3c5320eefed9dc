"""Our mixers where a host's Mamba2 mixers stood, plain or swapped: its tensors, its names, its signature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...base.errors import UsageError
from ...kernels.common.precision import compute_dtype
from ...mixers.geometry import MIXER_FP32, GateSpec, MixerGeometry
from ...mixers.layout import sequence_layout
from ...mixers.metaplasticity import Metaplasticity
from ...mixers.mixer import Mamba2Mixer, PalimpsaMixer
from ...mixers.precision import at_least_fp32
from ...mixers.states import CACHE_NAMES, take_cache
from .hosts import HOSTS, host_type, time_step_limit


def host_geometry(mixer: nn.Module, config: Any) -> MixerGeometry:
    """The sizes of a host's mixer, which may lie on `meta`; every host names these attributes alike.

    Raises:
        UsageError: its activation is not SiLU, or its tensors are not those of a Mamba2 mixer of its sizes.
    """
    if mixer.activation not in ("silu", "swish"):
        raise UsageError(
            f"layer {mixer.layer_idx}: the convolution's activation is {mixer.activation!r}; Mamba2 has silu and "
            "nothing else is supported"
        )
    geometry = MixerGeometry(
        hidden_size=mixer.hidden_size,
        num_heads=mixer.num_heads,
        head_dim=mixer.head_dim,
        n_groups=mixer.n_groups,
        state_size=mixer.ssm_state_size,
        conv_kernel=mixer.conv_kernel_size,
        use_bias=mixer.in_proj.bias is not None,
        use_conv_bias=mixer.conv1d.bias is not None,
        norm_eps=getattr(mixer.norm, "variance_epsilon", 0.0),
        time_step_limit=time_step_limit(config),
        chunk_size=mixer.chunk_size,
    )
    found = {name: tuple(tensor.shape) for name, tensor in mixer.named_parameters()}
    for name, shape in geometry.shapes().items():
        if name in found and found[name] != shape:
            raise UsageError(
                f"layer {mixer.layer_idx}: {name} has shape {list(found[name])}; a Mamba2 mixer of these sizes has "
                f"{list(shape)}, so this release of transformers builds another mixer than the one supported"
            )
    return geometry


class HostedMixin:
    """Before `Mamba2Mixer` or a subclass: a mixer of ours on the parameters of a host's, called as the host calls it.

    The names in its state dict are those of the host's mixer. It keeps the host's norm, and so its grouping, its
    epsilon, and whether the gate comes before or after.

    Attributes:
        input_multiplier: what the host multiplies the input of `in_proj` with.
    """

    def stand_for(self, mixer: nn.Module, config: Any) -> None:
        """Takes over a host's mixer, whose parameters, submodules and buffers are shared, not copied."""
        host = HOSTS[host_type(config)]
        self.in_proj, self.norm, self.out_proj = mixer.in_proj, mixer.norm, mixer.out_proj
        self.conv1d.weight, self.conv1d.bias = mixer.conv1d.weight, mixer.conv1d.bias
        for name in MIXER_FP32:
            setattr(self, name, getattr(mixer, name))
        self.input_multiplier: float = getattr(mixer, host.input_multiplier) if host.input_multiplier else 1.0
        self._output_multiplier = host.output_multiplier
        for name, buffer in mixer.named_buffers(recurse=False):  # the host's model fills them by name
            self.register_buffer(name, buffer, persistent=False)

    def project(self, hidden: Tensor) -> Tensor:
        return self.in_proj(hidden if self.input_multiplier == 1.0 else hidden * self.input_multiplier)

    def split_projection(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Here and not in `project`: who watches `in_proj`, as measuring does, gets the parts as they are used.
        if self._output_multiplier is not None:
            projected = projected * getattr(self, self._output_multiplier)
        return super().split_projection(projected)

    def gated_norm(self, y: Tensor, z: Tensor) -> Tensor:
        if not isinstance(self.norm, nn.Identity):
            return self.norm(y, z)
        dtype = compute_dtype(y, z)
        return y.to(dtype) * nn.functional.silu(z.to(dtype))

    def forward(self, hidden_states: Tensor, cache=None, attention_mask: Tensor | None = None, **kwargs) -> Tensor:
        """Mixes along time.

        Args:
            hidden_states: [B, T, D], after the block's norm.
            cache: also under the other names in `CACHE_NAMES`, which differ by release.
            attention_mask: [B, T], zero for padding.
            kwargs: `seq_idx` [B, T] or `cu_seq_lens_q` tell packed documents; the rest is ignored.

        Returns:
            [B, T, D].

        Raises:
            UsageError: packed documents together with a cache.
        """
        cache = take_cache({"cache": cache, **{name: kwargs[name] for name in CACHE_NAMES if name in kwargs}})
        layout = sequence_layout(
            (hidden_states.shape[0], hidden_states.shape[1]),
            attention_mask=attention_mask,
            seq_idx=kwargs.get("seq_idx"),
            cu_seqlens=kwargs.get("cu_seq_lens_q"),
        )
        if layout is None or not layout.packed:
            return super().forward(hidden_states, cache, layout)
        if cache is not None:
            raise UsageError(
                "packed documents were given together with a cache; a cache carries one sequence a row, so pass "
                "use_cache=False, or the documents as rows of a padded batch"
            )
        return (
            super().forward(hidden_states.reshape(1, -1, hidden_states.shape[-1]), None, layout).view_as(hidden_states)
        )


class PlainHybridMixer(HostedMixin, Mamba2Mixer):
    """`Mamba2Mixer` in the place of a host's mixer that is not swapped; its tensors keep the types they have there.

    Args:
        mixer: the host's; it is used up.
        config: of the model, the host's or ours.
    """

    keep_fp32 = ()

    def __init__(self, mixer: nn.Module, config: Any) -> None:
        with torch.device("meta"):
            super().__init__(host_geometry(mixer, config), mixer.layer_idx)
        self.stand_for(mixer, config)


class HybridMixer(HostedMixin, PalimpsaMixer):
    """`PalimpsaMixer` in the place of a host's mixer; `metaplasticity.*` joins the names in its state dict.

    The importance gate reads the input without the host's multiplier.

    Args:
        mixer: the host's; it is used up.
        config: of the model, the host's or ours.
        gate: sizes and form of the importance gate.
    """

    def __init__(self, mixer: nn.Module, config: Any, gate: GateSpec) -> None:
        geometry = host_geometry(mixer, config)
        with torch.device("meta"):
            super().__init__(geometry, gate, mixer.layer_idx)
        self.stand_for(mixer, config)
        for name in MIXER_FP32:
            setattr(self, name, at_least_fp32(getattr(self, name)))
        with mixer.in_proj.weight.device:
            self.metaplasticity = Metaplasticity(geometry, gate)
