"""The mixers of a host as our own, so that there is one kind of mixer to watch and to run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...mixers.geometry import GateSpec
from ...mixers.mixer import Mamba2Mixer
from ...modeling.hybrids.mixer_hybrid import HybridMixer
from ..families.registry import mixers

_NO_GATE = GateSpec(rank=1, groups=1, scale_form="abs", train_prior=False)


class PlainHybridMixer(HybridMixer):
    """A host's Mamba2 mixer that is not swapped, with our scan: the host's own, without mamba-ssm, takes gigabytes.

    Args:
        mixer: the host's; its parameters, submodules and buffers are shared, not copied.
        config: of the model.
    """

    _gate, _scan, _one_step = Mamba2Mixer._gate, Mamba2Mixer._scan, Mamba2Mixer._one_step

    def __init__(self, mixer: nn.Module, config: Any) -> None:
        super().__init__(mixer, config, _NO_GATE)
        del self.metaplasticity


@contextmanager
def our_mixers(model: nn.Module) -> Iterator[dict[int, Mamba2Mixer]]:
    """The mixers of a model by layer. While the block runs, those of a host have our own in their places."""
    found = mixers(model)
    names = {module: name for name, module in model.named_modules()}
    views = {
        mixer: PlainHybridMixer(mixer, model.config) for mixer in found.values() if not isinstance(mixer, Mamba2Mixer)
    }
    try:
        for mixer, view in views.items():
            model.set_submodule(names[mixer], view.train(mixer.training))
        yield {layer: views.get(mixer, mixer) for layer, mixer in found.items()}
    finally:
        for mixer in views:
            model.set_submodule(names[mixer], mixer)
