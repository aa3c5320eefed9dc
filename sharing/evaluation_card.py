"""The evaluation part of a model card: the table of eval.json for people, and the same as `model-index` metadata."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import EvalResult

from ..base.console import shortened
from ..recipes.evaluation.report import EvalFigure, EvalReport, EvalRow, seen_sentence

EVAL_FILE = "eval.json"
_HARNESS = "lm_eval"
_MOST_ROWS = 15
_NOT_IN_TABLE = ("importance",)  # several rows for each layer: the picture shows them, eval.json has the figures


@dataclass(frozen=True)
class CardEvaluation:
    """What a card shows of an evaluation.

    Attributes:
        fingerprint: of the model that was evaluated.
        against: name of the model it is compared with.
        data: name of the text.
        device: what it ran on.
        rows: suite, measured, place, unit, and the figures of the model, the other one, and their difference; at most
            `_MOST_ROWS`.
        total: how many there are in the file.
        seen: what of the text the models were trained on, a sentence each.
        pictures: names of the pictures beside the file, by suite.
        metrics: entries of `model-index`: data set, metric, its place, value. Those of the rows, and all losses and
            benchmarks.
    """

    fingerprint: str
    against: str | None
    data: str
    device: str
    rows: tuple[tuple[str, ...], ...]
    total: int
    seen: tuple[str, ...]
    pictures: dict[str, str]
    metrics: tuple[tuple[str, str, str, float], ...]

    def table(self) -> str:
        """The rows as a Markdown table, with what they are."""
        headers = ["suite", "measured", "at", "unit", "this model"]
        headers += [] if self.against is None else [f"`{self.against}`", "difference"]
        lines = ["| " + " | ".join(headers) + " |", "| --- " * len(headers) + "|"]
        lines += ["| " + " | ".join(row[: len(headers)]) + " |" for row in self.rows]
        lines += ["", f"On {self.data} ({self.device}); ± is the bootstrap standard error."]
        if self.against is not None:
            lines[-1] += " Differences are this model minus the other, on the same text."
        if len(self.rows) < self.total:
            lines[-1] += f" These are {len(self.rows)} of {self.total} rows; [{EVAL_FILE}]({EVAL_FILE}) has them all."
        lines += [line for sentence in self.seen for line in ("", f"**Not held out:** {sentence}.")]
        return "\n".join(lines)

    def section(self) -> str:
        """The part of a model's card: the table and the pictures."""
        pictures = [f"![{suite}]({name})" for suite, name in self.pictures.items()]
        return "\n".join([self.table(), *(["", *pictures] if pictures else [])])

    def results(self) -> list[EvalResult]:
        """The figures for the card's metadata."""
        return [
            EvalResult(
                task_type="text-generation",
                task_name="Text generation",
                dataset_type=_slug(data),
                dataset_name=data,
                metric_type=_slug(metric),
                metric_value=value,
                metric_name=f"{metric} ({place})" if place else metric,
            )
            for data, metric, place, value in self.metrics
        ]


def card_evaluation(report: EvalReport) -> CardEvaluation:
    """What a card shows of eval.json."""
    listed = [(suite, row) for suite, row in _rows(report) if suite not in _NOT_IN_TABLE]
    listed.sort(key=lambda entry: entry[0] != _HARNESS)  # public benchmarks first
    shown = shortened(listed, lambda entry: (entry[0], entry[1].name), _MOST_ROWS)
    return CardEvaluation(
        fingerprint=report.model.fingerprint,
        against=None if report.against is None else report.against.name,
        data=report.data.name,
        device=report.device,
        rows=tuple(_table_row(suite, row) for suite, row in shown),
        total=len(listed),
        seen=tuple(_seen(report)),
        pictures={suite: Path(part.plot).name for suite, part in report.suites.items() if part.plot},
        metrics=tuple(_metrics(report, [row for _, row in shown])),
    )


def _rows(report: EvalReport) -> Iterator[tuple[str, EvalRow]]:
    for suite, part in report.suites.items():
        yield from ((suite, row) for row in part.rows if not row.detail)


def _table_row(suite: str, row: EvalRow) -> tuple[str, ...]:
    figures = _figure(row.model), _figure(row.against), _figure(row.difference, sign=True)
    return (suite, row.name, row.place, row.unit, *figures)


def _figure(figure: EvalFigure | None, *, sign: bool = False) -> str:
    if figure is None:
        return ""
    text = f"{figure.value:+.4g}" if sign else f"{figure.value:.5g}"
    return text if figure.error is None else f"{text} ± {figure.error:.2g}"


def _seen(report: EvalReport) -> Iterator[str]:
    for model, subject in ((report.model, "this model"), (report.against, "the other model")):
        if model is not None and model.seen is not None:
            yield seen_sentence(model.seen, subject)


def _metrics(report: EvalReport, shown: Sequence[EvalRow]) -> Iterator[tuple[str, str, str, float]]:
    """Figures where one direction is better. A harness task is its own data set; speed is not a quality."""
    for suite, row in _rows(report):
        if row.model is None or row.better is None or suite == "speed":
            continue
        if suite not in ("loss", _HARNESS) and row not in shown:
            continue
        data, metric = report.data.name, row.name
        if suite == _HARNESS:
            data, _, metric = metric.partition(" ")
        yield data, metric, row.place, row.model.value


def _slug(text: str) -> str:
    """A name as metadata types have it: `embedded:sqlite-docs` becomes `sqlite-docs`, spaces become underscores."""
    return re.sub(r"[^\w.\-/]+", "_", text.removeprefix("embedded:")).strip("_") or "text"
