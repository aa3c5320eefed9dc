"""Rules that choose the layers to swap. A new rule is one function and one line in `RULES`.

A rule ranks the layers of a profile: it returns (layer, reason) pairs, the first the best candidate. Equal figures
are ranked by layer index, so that a rule gives the same layers on every machine.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable
from dataclasses import dataclass

from ...base.console import counted
from ...base.errors import UsageError
from ..measure.profile import LayerProfile, Profile

Ranking = list[tuple[int, str]]
DEFAULT_RULE = "window"


@dataclass(frozen=True)
class Choice:
    """Layers a rule chose, best first, and one line for each that says why."""

    rule: str
    layers: tuple[int, ...]
    reasons: dict[int, str]


def _ranked(layers: list[LayerProfile], key: Callable[[LayerProfile], float], reason: str) -> Ranking:
    ordered = sorted(layers, key=lambda layer: (key(layer), layer.layer))
    return [
        (layer.layer, reason.format(window=layer.window, rate=layer.rate, rank=rank, total=len(ordered)))
        for rank, layer in enumerate(ordered, start=1)
    ]


def by_window(layers: list[LayerProfile], seed: int) -> Ranking:
    """Longest mean window first: the paper's "weakest forgetting"."""
    return _ranked(layers, lambda layer: -layer.window, "window {window:.4g} tokens, {rank} of {total} by window")


def by_rate(layers: list[LayerProfile], seed: int) -> Ranking:
    """Smallest mean forget rate first."""
    return _ranked(layers, lambda layer: layer.rate, "rate {rate:.4g} nats per token, {rank} of {total} by rate")


def by_strongest(layers: list[LayerProfile], seed: int) -> Ranking:
    """Shortest window first: the opposite of the default, for experiments."""
    return _ranked(layers, lambda layer: layer.window, "window {window:.4g} tokens, {rank} of {total} from below")


def by_chance(layers: list[LayerProfile], seed: int) -> Ranking:
    """A seeded draw: the control of an experiment."""
    order = sorted(layers, key=lambda layer: layer.layer)
    random.Random(seed).shuffle(order)
    return [(layer.layer, f"drawn with seed {seed}, window {layer.window:.4g} tokens") for layer in order]


def by_position(layers: list[LayerProfile], seed: int) -> Ranking:
    """Every layer, in order; the count is not used."""
    return _ranked(layers, lambda layer: layer.layer, "every layer, window {window:.4g} tokens")


RULES: dict[str, Callable[[list[LayerProfile], int], Ranking]] = {
    "window": by_window,
    "rate": by_rate,
    "strongest": by_strongest,
    "random": by_chance,
    "all": by_position,
}


def check_rule(rule: str) -> None:
    """Raises `UsageError` for a rule that does not exist, with the nearest one that does."""
    if rule not in RULES:
        near = difflib.get_close_matches(str(rule), RULES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(RULES)}"
        raise UsageError(f"--rule {rule}: there is no such rule; {hint}")


def choose_layers(profile: Profile, count: int, rule: str = DEFAULT_RULE, *, seed: int = 0) -> Choice:
    """Applies a rule to the layers that are not swapped yet.

    Args:
        profile: the measured or static figures.
        count: how many layers; the rule `all` takes every one.
        rule: a key of `RULES`.
        seed: for the rule `random`.

    Raises:
        UsageError: unknown rule, or fewer layers than asked for.
    """
    check_rule(rule)
    candidates = [layer for layer in profile.layers if not layer.swapped]
    if rule == "all":
        count = len(candidates)
    if not 1 <= count <= len(candidates):
        swapped = f" ({len(profile.swapped)} of {len(profile.layers)} are swapped already)" if profile.swapped else ""
        raise UsageError(f"--layers {count}: the model has {counted(len(candidates), 'layer')} to choose from{swapped}")
    ranking = RULES[rule](candidates, seed)[:count]
    return Choice(rule=rule, layers=tuple(layer for layer, _ in ranking), reasons=dict(ranking))
