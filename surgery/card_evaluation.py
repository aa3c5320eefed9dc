"""The evaluation part of a model card: the table of eval.json for people, and the same as `model-index` metadata.

eval.json is written by a later stage, so it is read here as plain JSON: only what a card shows is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.console import counted, shortened
from ..base.errors import SchemaError
from ..base.files import load_json

EVAL_FILE = "eval.json"
_TASK = {"type": "text-generation", "name": "Text generation"}
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

    def model_index(self, name: str) -> list[dict[str, Any]]:
        """`model-index` of the card's metadata; [] when there is no figure for it."""
        results: dict[str, list[dict[str, Any]]] = {}
        for data, metric, place, value in self.metrics:
            label = f"{metric} ({place})" if place else metric
            results.setdefault(data, []).append({"type": _slug(metric), "value": value, "name": label})
        entries = [
            {"task": dict(_TASK), "dataset": {"type": _slug(data), "name": data}, "metrics": metrics}
            for data, metrics in results.items()
        ]
        return [{"name": name, "results": entries}] if entries else []


def read_evaluation(path: str | Path) -> CardEvaluation:
    """Reads eval.json for a card.

    Raises:
        SchemaError: the file is not one that `palimpsa evaluate` wrote.
    """
    path = Path(path)
    content = load_json(path)
    try:
        against = content.get("against")
        listed = [(suite, row) for suite, row in _rows(content) if suite not in _NOT_IN_TABLE]
        listed.sort(key=lambda entry: entry[0] != _HARNESS)  # public benchmarks first
        shown = shortened(listed, lambda entry: (entry[0], entry[1]["name"]), _MOST_ROWS)
        return CardEvaluation(
            fingerprint=content["model"]["fingerprint"],
            against=None if against is None else str(against["name"]),
            data=str(content["data"]["name"]),
            device=str(content["device"]),
            rows=tuple(_table_row(suite, row) for suite, row in shown),
            total=len(listed),
            seen=tuple(_seen(content)),
            pictures=_pictures(content),
            metrics=tuple(_metrics(content, [row for _, row in shown])),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise SchemaError(f"{path}: is no report of `palimpsa evaluate` ({error!r}); write it again") from error


def _rows(content: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for suite, part in content["suites"].items():
        for row in part["rows"]:
            if not row.get("detail"):
                yield suite, row


def _table_row(suite: str, row: dict[str, Any]) -> tuple[str, ...]:
    return (
        suite,
        row["name"],
        _place(row),
        row["unit"],
        _figure(row.get("model")),
        _figure(row.get("against")),
        _figure(row.get("difference"), sign=True),
    )


def _figure(figure: dict[str, Any] | None, *, sign: bool = False) -> str:
    if figure is None:
        return ""
    value, error = float(figure["value"]), figure.get("error")
    text = f"{value:+.4g}" if sign else f"{value:.5g}"
    return text if error is None else f"{text} ± {float(error):.2g}"


def _place(row: dict[str, Any]) -> str:
    at = (row.get("at") or {}).items()
    return ", ".join(f"{key} {value:,}" if isinstance(value, int) else f"{key} {value:g}" for key, value in at)


def _seen(content: dict[str, Any]) -> Iterator[str]:
    for key, subject in (("model", "this model"), ("against", "the other model")):
        seen = (content.get(key) or {}).get("seen")
        if seen:
            yield seen_sentence(str(seen["name"]), seen["documents"], int(seen["of"]), subject)


def seen_sentence(name: str, documents: int | None, of: int, subject: str) -> str:
    """How much of a text a model was trained on.

    Args:
        name: of the training text.
        documents: of the evaluation's text that are in it; None when only the name could be compared.
        of: documents of the evaluation's text.
        subject: the model.
    """
    if documents is None:
        return f"the text has the name of the one that {subject} was trained on ({name}), which was not here to compare"
    if documents == of:
        what = "the only document of the text is" if of == 1 else f"all {of:,} documents of the text are"
    else:
        what = f"{documents:,} of the {counted(of, 'document')} of the text {'is' if documents == 1 else 'are'}"
    return f"{what} in {name}, which {subject} was trained on"


def _metrics(content: dict[str, Any], shown: list[dict[str, Any]]) -> Iterator[tuple[str, str, str, float]]:
    """Figures where one direction is better. A harness task is its own data set; speed is not a quality."""
    for suite, row in _rows(content):
        if row.get("model") is None or row.get("better") is None or suite == "speed":
            continue
        if suite not in ("loss", _HARNESS) and row not in shown:
            continue
        data, metric = str(content["data"]["name"]), row["name"]
        if suite == _HARNESS:
            data, _, metric = metric.partition(" ")
        yield data, metric, _place(row), float(row["model"]["value"])


def _pictures(content: dict[str, Any]) -> dict[str, str]:
    found = {suite: part.get("plot") for suite, part in content["suites"].items()}
    return {suite: Path(name).name for suite, name in found.items() if name}


def _slug(text: str) -> str:
    """A name as metadata types have it: `embedded:sqlite-docs` becomes `sqlite-docs`, spaces become underscores."""
    return re.sub(r"[^\w.\-/]+", "_", text.removeprefix("embedded:")).strip("_") or "text"
