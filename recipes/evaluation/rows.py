"""The rows of eval.json from the measurements of one model, or of two on the same questions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...base.errors import EvaluationError
from ...base.statistics import Figure, difference, estimate
from .report import EvalFigure, EvalRow
from .suites.suite import Measurement


def compare(
    suite: str,
    first: Sequence[Measurement],
    second: Sequence[Measurement] | None,
    names: Sequence[str],
) -> list[EvalRow]:
    """Rows of both models' measurements, in the order of the first; what only the second has comes last.

    Raises:
        EvaluationError: a figure is not finite.
    """
    mine = {measurement.key: measurement for measurement in first}
    theirs = {measurement.key: measurement for measurement in second or ()}
    rows = []
    for key in dict.fromkeys([*mine, *theirs]):
        rows.append(_row(suite, mine.get(key), theirs.get(key), names))
    return rows


def _row(suite: str, mine: Measurement | None, theirs: Measurement | None, names: Sequence[str]) -> EvalRow:
    shown = mine or theirs
    figures = [None if m is None else _figure(m, f"{names[i]}, suite {suite}") for i, m in enumerate((mine, theirs))]
    return EvalRow(
        name=shown.name,
        at=dict(shown.at),
        unit=shown.unit,
        better=shown.better,
        chance=shown.chance,
        samples=len(shown.samples),
        model=figures[0],
        against=figures[1],
        difference=None if mine is None or theirs is None else _difference(mine, theirs, figures),
        detail=shown.detail,
    )


def _figure(measurement: Measurement, where: str) -> EvalFigure:
    found = estimate(measurement.samples, exponential=measurement.exponential)
    if not np.isfinite(found.value):
        raise EvaluationError(
            f"{where}: {measurement.name} at {dict(measurement.at)} is {found.value}, not a number to report; look for "
            f"weights that are not finite, or try --dtype float32"
        )
    return EvalFigure(value=found.value, error=found.error if measurement.error is None else measurement.error)


def _difference(mine: Measurement, theirs: Measurement, figures: Sequence[EvalFigure]) -> EvalFigure:
    paired = mine.paired and len(mine.samples) == len(theirs.samples)
    found = difference(theirs.samples, mine.samples, exponential=mine.exponential, paired=paired)
    if mine.error is not None and theirs.error is not None:
        found = Figure(found.value, float(np.hypot(mine.error, theirs.error)))
    return EvalFigure(value=found.value, error=found.error)
