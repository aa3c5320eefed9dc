"""Loss by position: what the model still gains from the text far behind, in buckets that double."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .plots import Line, draw_lines
from .suite import EvalOptions, EvalText, Measurement, Subject, SuiteResult

FIRST_BUCKET = 16
"""Targets with fewer tokens before them are one bucket: there are too few of them to split."""


def bucket_edges(targets: int) -> list[tuple[int, int]]:
    """(from, to) of 1-based positions, `to` excluded: 1-15, 16-31, 32-63, ... to the last of `targets`."""
    edges, start, stop = [], 1, FIRST_BUCKET
    while start <= targets:
        edges.append((start, min(stop, targets + 1)))
        start, stop = stop, 2 * stop
    return edges


def run(subject: Subject, text: EvalText, options: EvalOptions) -> SuiteResult:
    """Mean loss of the targets in each bucket, over sequences of the longest length; samples are sequences.

    The position of a target is the number of tokens before it in its sequence.
    """
    losses = np.stack(subject.losses(text, options.longest, options.chunk))
    found = []
    for start, stop in bucket_edges(losses.shape[1]):
        piece = losses[:, start - 1 : stop - 1]
        samples = np.stack([piece.sum(axis=1), np.full(len(piece), piece.shape[1])], axis=1)
        at = {"from": start, "to": stop - 1}
        found.append(Measurement("loss", "nats", samples, at, "lower"))
    return SuiteResult(found, text.shortfall(options.longest))


def draw(rows: Sequence, names: Sequence[str], path: Path) -> None:
    """Loss against position, both models above, their difference with its error below."""
    middle = [(row.at["from"] * row.at["to"]) ** 0.5 for row in rows]
    lines = [Line.of(name, middle, [row.figures[index] for row in rows]) for index, name in enumerate(names)]
    changes = []
    if len(names) > 1:
        changes = [Line.of(f"{names[0]} - {names[1]}", middle, [row.difference for row in rows])]
    draw_lines(
        path,
        lines,
        title="Loss by position",
        x="tokens before the target",
        y="loss (nats per token)",
        log_x=True,
        differences=changes,
    )
