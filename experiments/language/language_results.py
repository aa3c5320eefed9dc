"""Raw results of an arm as a file, and the statistics of differences between arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from language_arms import CONTROL, MAIN
from palimpsa_surgery.base.errors import DataError
from palimpsa_surgery.base.schemas import StrictModel, StrictPart, read_model
from palimpsa_surgery.base.statistics import Figure, difference, estimate
from palimpsa_surgery.recipes.evaluation.suites.suite import Measurement

LOSS = "positions"


class Row(StrictPart):
    """One measurement of a suite: a sum for every sample, and the weight that each sum is divided by.

    Attributes:
        suite, name, at: what it is; `suite` is `off` for losses with metaplasticity switched off.
        sums: of each window, sequence or prompt; row i of two arms is of the same text.
        weight: targets, questions or 1 in each.
        chance: what guessing would give.
    """

    suite: str
    name: str
    at: dict[str, int | float]
    sums: list[float]
    weight: float
    chance: float | None = None

    @property
    def samples(self) -> np.ndarray:
        """[n, 2] as for `statistics.estimate`."""
        return np.stack([np.asarray(self.sums), np.full(len(self.sums), self.weight)], axis=1)

    @property
    def value(self) -> float:
        return float(np.sum(self.sums) / (self.weight * len(self.sums)))


class Gate(StrictPart):
    """What a swapped layer learned: f(s) and I_prior of every head."""

    scale: list[float]
    prior: list[float]


class ArmResult(StrictModel):
    """Everything measured of one arm.

    Attributes:
        arm, variant, lr, lr_new, seed: which arm.
        preset, version, device: how it was run.
        source, train, held_out: names of model and text, never paths.
        palimpsa_layers, rule, init, beta_groups: the surgery; empty for the control.
        seq_len, steps, tokens: of training.
        train_seconds, seconds: of the run, and of everything.
        tokens_per_second: of training, the median over steps.
        dev: (step, loss, standard error) on the text that chooses the learning rate.
        rows: losses by position, probes, importance.
        importance: by logged step, layer to metaplasticity ratio, mean importance and spread between heads.
        windows, rates: per layer and head, in tokens and nats per token, after training.
        gates: by layer, after training.
    """

    arm: str
    variant: str
    lr: float
    lr_new: float
    seed: int
    preset: str
    version: str
    device: str
    source: str
    train: str
    held_out: str
    palimpsa_layers: list[int] = []
    rule: str | None = None
    init: str | None = None
    beta_groups: int | None = None
    seq_len: int
    steps: int = 0
    tokens: int = 0
    train_seconds: float = 0.0
    tokens_per_second: float = 0.0
    seconds: float = 0.0
    dev: list[tuple[int, float, float]] = []
    rows: list[Row] = []
    importance: list[dict[str, Any]] = []
    windows: list[list[float]] = []
    rates: list[list[float]] = []
    gates: dict[int, Gate] = {}

    def of(self, suite: str, name: str | None = None) -> list[Row]:
        """The rows of a suite, or those of one name."""
        return [row for row in self.rows if row.suite == suite and name in (None, row.name)]


def to_row(suite: str, measurement: Measurement) -> Row:
    """A measurement with equal weights as a row of the file, sums to eight digits."""
    weights = np.unique(measurement.samples[:, 1])
    if len(weights) != 1:
        raise DataError(
            f"suite {suite}: {measurement.name} has samples of unequal weight; measure windows of one length"
        )
    sums = [float(f"{value:.8g}") for value in measurement.samples[:, 0]]
    return Row(
        suite=suite,
        name=measurement.name,
        at=dict(measurement.at),
        sums=sums,
        weight=float(weights[0]),
        chance=measurement.chance,
    )


def read_results(folder: str | Path) -> dict[str, ArmResult]:
    """Every arm in a folder, by name; `DataError` when there is none."""
    found = {path.stem: read_model(ArmResult, path) for path in sorted(Path(folder).glob("*.json"))}
    if not found:
        raise DataError(f"{folder}: holds no result; run the experiment first")
    return found


def best_rates(results: Mapping[str, ArmResult]) -> dict[str, float]:
    """The learning rate of the lowest loss on the choosing text with the first seed, of control and main arm.

    Raises:
        DataError: one of the two was never run.
    """
    best = {}
    for variant in (CONTROL, MAIN):
        tried = swept(results, variant)
        if not tried:
            raise DataError(f"{variant}: has no result, so no learning rate can be chosen; run the experiment on")
        best[variant] = min(tried, key=lambda result: result.dev[-1][1]).lr
    return best


def swept(results: Mapping[str, ArmResult], variant: str) -> list[ArmResult]:
    """The runs of a variant with its first seed, by learning rate."""
    found = [result for result in results.values() if result.variant == variant]
    first = min((result.seed for result in found), default=0)
    return sorted((result for result in found if result.seed == first), key=lambda result: result.lr)


def losses(result: ArmResult, low: int = 0, high: int | None = None, suite: str = LOSS) -> np.ndarray:
    """[windows, 2] sum of losses and number of targets with at least `low` and less than `high` tokens before them.

    Whole buckets only: both bounds must lie on the border of a bucket.

    Raises:
        DataError: no bucket lies in the range.
    """
    rows = [row for row in result.of(suite) if row.at["from"] >= low and (high is None or row.at["to"] < high)]
    if not rows:
        raise DataError(f"{result.arm}: has no loss of suite {suite} from {low} to {high} tokens")
    return np.sum([row.samples for row in rows], axis=0)


def loss(result: ArmResult, low: int = 0, high: int | None = None, suite: str = LOSS) -> Figure:
    """Mean loss over those positions, with its bootstrap error over windows."""
    return estimate(losses(result, low, high, suite))


def change(result: ArmResult, other: ArmResult, low: int = 0, high: int | None = None) -> Figure:
    """Loss of `result` less that of `other`, the same windows drawn for both."""
    return difference(losses(other, low, high), losses(result, low, high))


def change_over_seeds(
    pairs: Sequence[tuple[ArmResult, ArmResult]], low: int = 0, high: int | None = None
) -> tuple[Figure, float | None]:
    """Mean over seeds of the paired difference: its error over windows, and its standard error over seeds.

    The first says how well these models are compared on this text, the second how much of it is the luck of a run;
    a claim about the method needs both.
    """
    sums = [[losses(result, low, high) for result in pair] for pair in pairs]
    mean = difference(*(np.sum([pair[side] for pair in sums], axis=0) for side in (1, 0)))
    single = [change(*pair, low, high).value for pair in pairs]
    return mean, float(np.std(single, ddof=1) / np.sqrt(len(single))) if len(single) > 1 else None


def probe(results: Sequence[ArmResult], suite: str, name: str, at: dict[str, Any]) -> np.ndarray:
    """[sequences, 2] of a probe, summed over arms (seeds)."""
    found = [row.samples for result in results for row in result.of(suite, name) if row.at == at]
    if len(found) != len(results):
        raise DataError(f"{', '.join(r.arm for r in results)}: no {suite} {name} at {at} in every one")
    return np.sum(found, axis=0)
