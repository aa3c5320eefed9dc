"""Gated DeltaNets as measuring watches them: by what they give their rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...modeling.hybrids.mixer_delta import rules_of, run_with_rules


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
