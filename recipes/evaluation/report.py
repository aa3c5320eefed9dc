"""eval.json: what was measured of one model, or of two side by side with their differences.

`palimpsa evaluate` writes it, and a push reads it for the card.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from ...base.console import counted, shortened
from ...base.schemas import StrictModel, StrictPart, read_model, write_model

_MOST_PRINTED = 40


class EvalFigure(StrictPart):
    """A value and its bootstrap standard error; no error when a single sample says nothing about it."""

    value: float
    error: float | None


class EvalRow(StrictPart):
    """One line of the table.

    Attributes:
        name: what was measured.
        at: where: length, depth, layer, ...
        unit: of the values.
        better: which direction is an improvement, if either is.
        chance: what guessing would give.
        samples: sequences, questions or timings behind the figure.
        model: None when the model has nothing to measure here (importance where no layer is swapped).
        against: of the model it is compared with.
        difference: model - against; errors of paired samples.
        detail: left out of the table for people.
    """

    name: str
    at: dict[str, int | float] = {}
    unit: str
    better: Literal["lower", "higher"] | None = None
    chance: float | None = None
    samples: int
    model: EvalFigure | None = None
    against: EvalFigure | None = None
    difference: EvalFigure | None = None
    detail: bool = False

    @model_validator(mode="after")
    def _measured(self) -> EvalRow:
        if self.model is None and self.against is None:
            raise ValueError("has neither `model` nor `against`, expected a figure of one of them at least")
        return self

    @property
    def figures(self) -> tuple[EvalFigure | None, EvalFigure | None]:
        """Of the model and of the one it is compared with."""
        return self.model, self.against

    @property
    def place(self) -> str:
        """`at` as text."""
        return ", ".join(
            f"{key} {value:,}" if isinstance(value, int) else f"{key} {value:g}" for key, value in self.at.items()
        )


class EvalSuite(StrictPart):
    """One suite: its rows, and the name of its picture beside the file."""

    rows: list[EvalRow]
    notes: list[str] = []
    plot: str | None = None


class SeenText(StrictPart):
    """What of the text a model was trained on.

    Attributes:
        name: of the training text, never a path.
        documents: how many documents of the evaluation's text are in it; None when the training text is not here and
            only its name is the same.
        of: documents of the evaluation's text.
    """

    name: str
    documents: int | None
    of: int


class EvaluatedModel(StrictPart):
    """Which model: never a path. `seen` is None when nothing of the text was trained on, or nobody can tell."""

    name: str
    fingerprint: str
    layout: str
    parameters: int
    dtype: str
    palimpsa_layers: list[int]
    seen: SeenText | None = None


class EvalData(StrictPart):
    """Which text: `embedded:sqlite-docs`, a file's name, or a dataset's id."""

    name: str
    tokens: int
    tokenizer: str


class EvalReport(StrictModel):
    """The file eval.json.

    Attributes:
        version: of this package.
        model: the one evaluated.
        against: the one it is compared with.
        data: the text.
        device: what it ran on.
        backends: kernels that ran, by kind of layer.
        options: how much was measured.
        suites: results by name of the suite; `lm_eval` holds those of the harness.
    """

    version: str
    model: EvaluatedModel
    against: EvaluatedModel | None = None
    data: EvalData
    device: str
    backends: dict[str, str] = {}
    options: dict[str, Any] = Field(default_factory=dict)
    suites: dict[str, EvalSuite]

    def row(self, suite: str, name: str, **at: float) -> EvalRow:
        """The row `name` of a suite at that place.

        Raises:
            KeyError: there is none.
        """
        for row in self.suites[suite].rows:
            if row.name == name and row.at == at:
                return row
        raise KeyError(f"{suite}: no row {name} at {at}")

    def table_rows(self) -> list[tuple[str, ...]]:
        """The rows for `base.console.table`, as text under `table_headers`."""
        found = []
        for suite, content in self.suites.items():
            for row in content.rows:
                if not row.detail:
                    cells = [_cell(row.model), _cell(row.against), _cell(row.difference, sign=True)]
                    kept = cells if self.against else cells[:1]
                    found.append((suite, row.name, row.place, row.unit, *(part for cell in kept for part in cell)))
        return found

    def printed_rows(self) -> list[tuple[str, ...]]:
        """`table_rows`, or a summary of them where they would fill several screens."""
        return shortened(self.table_rows(), lambda row: row[:2], _MOST_PRINTED)

    def table_headers(self) -> tuple[str, ...]:
        """What the columns of `table_rows` are."""
        first = ("suite", "measured", "at", "unit", "model", "+-")
        return first if self.against is None else (*first, "against", "+-", "difference", "+-")

    @property
    def notes(self) -> list[str]:
        """What a reader should know, each once."""
        seen = [
            "not held out: " + seen_sentence(model.seen, model.name)
            for model in (self.model, self.against)
            if model is not None and model.seen is not None
        ]
        return list(dict.fromkeys([*seen, *(note for suite in self.suites.values() for note in suite.notes)]))


def seen_sentence(seen: SeenText, subject: str) -> str:
    """How much of a text the model `subject` was trained on."""
    documents, of, name = seen.documents, seen.of, seen.name
    if documents is None:
        return f"the text has the name of the one that {subject} was trained on ({name}), which was not here to compare"
    if documents == of:
        what = "the only document of the text is" if of == 1 else f"all {of:,} documents of the text are"
    else:
        what = f"{documents:,} of the {counted(of, 'document')} of the text {'is' if documents == 1 else 'are'}"
    return f"{what} in {name}, which {subject} was trained on"


def _cell(figure: EvalFigure | None, sign: bool = False) -> tuple[str, str]:
    if figure is None:
        return "-", "-"
    digits = f"{figure.value:{'+' if sign else ''}.5g}"
    return digits, "-" if figure.error is None else f"{figure.error:.2g}"


def write_report(report: EvalReport, path: str | Path) -> None:
    """Writes eval.json whole or not at all."""
    write_model(report, path)


def read_report(path: str | Path) -> EvalReport:
    """Reads eval.json; `SchemaError` names file and key of a mistake."""
    return read_model(EvalReport, path)
