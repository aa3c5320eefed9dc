"""Importance of the synapses of swapped layers: how far consolidated and plastic ones differ, as a text goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ....mixers.importance import ImportanceRecorder, LayerImportance
from ....mixers.states import LayerStates
from ....surgery.families.registry import mixers
from .plots import draw_heads
from .streaming import piece_bounds, read_piece
from .suite import EvalOptions, EvalText, Measurement, Subject, SuiteResult

HEAD_RATIO = "metaplasticity ratio of a head"
_KINDS = (("metaplasticity ratio", "ratio"), ("mean importance", "mean"), ("head spread", "head_spread"))


def run(subject: Subject, text: EvalText, options: EvalOptions) -> SuiteResult:
    """Of each swapped layer after so many tokens of a sequence; samples are sequences, at most `trials` of them.

    `metaplasticity ratio`: 95th over 5th percentile of I over the synapses of a head, averaged over heads.
    `mean importance`: of all synapses; what keeps growing with length shrinks the layer's output.
    `head spread`: mean importance of the head with the most over that of the head with the least.
    """
    sequences = text.sequences(options.longest)[: options.trials]
    seen = [_at_lengths(subject, sequence, options) for sequence in sequences]
    if not any(seen):
        return SuiteResult([], [f"{subject.name} has no swapped layer, so it has no importance"])
    found = []
    for name, attribute in _KINDS:
        for length, layer in seen[0]:
            values = [getattr(sequence[length, layer], attribute) for sequence in seen]
            found.append(Measurement(name, "ratio", _samples(values), {"layer": layer, "length": length}))
    return SuiteResult(found + _heads(seen), text.shortfall(options.longest))


def _heads(seen: list[dict[tuple[int, int], LayerImportance]]) -> list[Measurement]:
    """The ratio of every head after the longest length."""
    found = []
    last = max(length for length, _ in seen[0])
    for length, layer in seen[0]:
        if length == last:
            for head, values in enumerate(zip(*(sequence[length, layer].head_ratio for sequence in seen), strict=True)):
                place = {"layer": layer, "length": length, "head": head}
                found.append(Measurement(HEAD_RATIO, "ratio", _samples(values), place, detail=True))
    return found


@torch.no_grad()
def _at_lengths(subject: Subject, sequence: np.ndarray, options: EvalOptions) -> dict[tuple[int, int], LayerImportance]:
    """(length, layer) to the statistics after that many tokens; memory does not grow with the length.

    J is read where the state after a piece of text is kept, in the cache.
    """
    ids = subject.tensor(sequence).unsqueeze(0)
    swapped = {layer: mixer for layer, mixer in mixers(subject.model).items() if hasattr(mixer, "metaplasticity")}
    if not swapped:
        return {}
    wanted = {*options.lengths, len(sequence)}
    cache, found = None, {}
    for start, stop in piece_bounds(len(sequence), options.chunk, options.lengths):
        _, cache = read_piece(subject.model.get_decoder(), ids[:, start:stop], cache, start)
        if stop in wanted:
            recorder = ImportanceRecorder()
            for layer, mixer in swapped.items():
                state = mixer.split_state(LayerStates(cache, layer).recurrent)
                recorder.observe(layer, state.J, mixer.metaplasticity.prior())
            found |= {(stop, layer): figures for layer, figures in recorder.layers().items()}
    return found


def _samples(values: Sequence[float]) -> np.ndarray:
    return np.array([(value, 1.0) for value in values])


def draw(rows: Sequence, names: Sequence[str], path: Path) -> None:
    """Ratio of every head of every swapped layer, and the layers' mean importance as the text goes on."""
    panels = []
    for index, name in enumerate(names):
        rows_of_model = [row for row in rows if row.figures[index] is not None]
        if rows_of_model:
            panels.append((name, _grid(rows_of_model, index), _growth(rows_of_model, index)))
    draw_heads(path, panels)


def _grid(rows: Sequence, index: int) -> dict[int, list[float]]:
    """Layer to the ratio of each head."""
    grid: dict[int, list[float]] = {}
    for row in rows:
        if row.name == HEAD_RATIO:
            grid.setdefault(int(row.at["layer"]), []).append(row.figures[index].value)
    return grid


def _growth(rows: Sequence, index: int) -> dict[int, tuple[list[float], list[float]]]:
    """Layer to lengths and mean importance at each."""
    growth: dict[int, tuple[list[float], list[float]]] = {}
    for row in rows:
        if row.name == "mean importance":
            lengths, means = growth.setdefault(int(row.at["layer"]), ([], []))
            lengths.append(row.at["length"])
            means.append(row.figures[index].value)
    return growth
