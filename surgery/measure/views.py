"""The mixers of a host as measuring watches them: those of Mamba2 as our own, Gated DeltaNets by their rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...mixers.geometry import GateSpec
from ...mixers.mixer import Mamba2Mixer
from ...modeling.hybrids.hosts import is_delta
from ...modeling.hybrids.mixer_delta import rules_of, run_with_rules
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
def our_mixers(model: nn.Module) -> Iterator[dict[int, nn.Module]]:
    """The mixers of a model by layer. While the block runs, Mamba2 mixers of a host have our own in their places."""
    found = mixers(model)
    names = {module: name for name, module in model.named_modules()}
    theirs = [mixer for mixer in found.values() if not isinstance(mixer, Mamba2Mixer)]
    views = {} if is_delta(model.config) else {mixer: PlainHybridMixer(mixer, model.config) for mixer in theirs}
    try:
        for mixer, view in views.items():
            model.set_submodule(names[mixer], view.train(mixer.training))
        yield {layer: views.get(mixer, mixer) for layer, mixer in found.items()}
    finally:
        for mixer in views:
            model.set_submodule(names[mixer], mixer)


@contextmanager
def watching_rules(layers: dict[int, nn.Module], sums: dict[int, Any]) -> Iterator[None]:
    """While the block runs, the log decays that delta layers give their rules go into their `ForgettingSums`."""
    own = {layer: vars(layer).get("forward") for layer in layers.values()}  # as hooks of accelerate leave it
    try:
        for number, layer in layers.items():
            layer.forward = partial(_watched, layer, sums[number])
        yield
    finally:
        for layer, forward in own.items():
            vars(layer).pop("forward", None)
            if forward is not None:
                layer.forward = forward


def _watched(layer: nn.Module, sums: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    def watched(rule: Callable[..., Any], *inputs: Any, g: Tensor, **options: Any) -> Any:
        sums.add(-g, torch.ones(g.shape[-1], device=g.device))
        return rule(*inputs, g=g, **options)

    rules = {name: partial(watched, rule) for name, rule in rules_of(layer, hidden_states).items()}
    return run_with_rules(layer, rules, hidden_states, *args, **kwargs)
