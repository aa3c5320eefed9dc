"""What stands where a host's mixers stood.

Every Mamba2 mixer is replaced by ours, swapped or not. The host's own bounds step sizes in prefill alone, lets pads
through the bias of the projection, hands weights to a fused kernel that calls no module, and without mamba-ssm and
causal-conv1d has slow code and cannot keep packed documents apart. Of a layer of a Gated DeltaNet the rule is replaced,
where it is swapped.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ...mixers.delta_geometry import DeltaGeometry
from ...mixers.geometry import GateSpec, MixerGeometry
from .hosts import is_delta, time_step_limit
from .mixer_delta import delta_geometry, swap_rule
from .mixer_hybrid import HybridMixer, PlainHybridMixer, host_geometry


def mixer_geometry(mixer: nn.Module, config: Any) -> MixerGeometry | DeltaGeometry:
    """The sizes of a host's mixer, which may lie on `meta`; raises as `host_geometry`."""
    return delta_geometry(mixer) if is_delta(config) else host_geometry(mixer, config)


def swapped_mixer(mixer: nn.Module, config: Any, gate: GateSpec) -> nn.Module:
    """What stands in the place of a host's mixer; it shares or keeps the tensors of `mixer`, which is used up."""
    return swap_rule(mixer, gate) if is_delta(config) else HybridMixer(mixer, config, gate)


def plain_mixer(mixer: nn.Module, config: Any) -> nn.Module:
    """As `swapped_mixer`, in a layer that is not swapped."""
    return mixer if is_delta(config) else PlainHybridMixer(mixer, config)


def bound_step_sizes(mixer: nn.Module, config: Any) -> None:
    """Gives a host's own mixer the bounds that its model was trained with, for who compares ours with it.

    Of a Gated DeltaNet there are none.
    """
    if not is_delta(config):
        mixer.time_step_limit = time_step_limit(config)
