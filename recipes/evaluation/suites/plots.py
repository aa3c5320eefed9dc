"""The pictures of an evaluation: lines with error bands, grids of cells, heads of layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ....surgery.measure.plots import save_figure

INK, GRAY = "#1a1a1a", "#8a8a8a"
COLORS = ("#d62728", "#1f77b4")
"""Of the model, and of the one it is compared with."""
_DASHES = ("-", "--", ":", "-.")
_MARKS = ("o", "s", "^", "D")
_MOST_CELLS_LABELED = 150
_LOG_FROM = 10
"""A logarithmic axis from this ratio of highest to lowest on: below, its ticks say little."""
_FLAT = 0.01
"""Values that differ by less than this part of themselves are drawn as the same."""


class Line(NamedTuple):
    """A line of a plot: x, y, standard errors (nan where there is none), and how it looks."""

    label: str | None
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float]
    color: int | None = -1
    dash: int = 0

    @classmethod
    def of(cls, label: str | None, x: Sequence[float], figures: Sequence[Any]) -> Line:
        """From figures with `value` and `error`; one that is missing leaves a gap."""
        values = [(math.nan, None) if figure is None else (figure.value, figure.error) for figure in figures]
        return cls(label, x, [v for v, _ in values], [math.nan if e is None else e for _, e in values])


def draw_lines(
    path: str | Path,
    lines: Sequence[Line],
    *,
    title: str,
    x: str,
    y: str,
    log_x: bool = False,
    y_limits: tuple[float, float] | None = None,
    differences: Sequence[Line] = (),
) -> None:
    """Lines with a band of one standard error; `differences` get a panel of their own below, with a line at zero."""
    figure = Figure(figsize=(7.5, 6.4 if differences else 4.4), dpi=110, facecolor="white", layout="constrained")
    panels = figure.subplots(
        2 if differences else 1, 1, sharex=True, squeeze=False, height_ratios=[2, 1] if differences else None
    )
    top = panels[0, 0]
    _plot(top, lines, y, log_x)
    if y_limits:
        top.set_ylim(*y_limits)
    top.set_title(title, fontsize=10, color=INK)
    if differences:
        below = panels[1, 0]
        below.axhline(0, color=GRAY, linewidth=0.8)
        _plot(below, [line._replace(color=0) for line in differences], "difference", log_x)
    panels[-1, 0].set_xlabel(x, color=INK)
    save_figure(figure, path)


def _plot(axes, lines: Sequence[Line], y: str, log_x: bool) -> None:
    for index, line in enumerate(lines):
        number = index if line.color == -1 else line.color
        color = GRAY if number is None else COLORS[number % len(COLORS)]
        style = {"linestyle": _DASHES[line.dash % 4], "linewidth": 1.5 if number is not None else 0.9}
        marker = _MARKS[line.dash % 4] if number is not None else None
        values, errors = np.asarray(line.y), np.nan_to_num(np.asarray(line.error, dtype=float))
        axes.plot(line.x, values, color=color, marker=marker, markersize=4, label=line.label, **style)
        axes.fill_between(line.x, values - errors, values + errors, color=color, alpha=0.18, linewidth=0)
    if log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else "")
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.set_ylabel(y, color=INK)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.tick_params(labelsize=8, colors=INK)
    axes.legend(fontsize=8, frameon=False)


def draw_grids(
    path: str | Path,
    rows: Sequence[tuple[str, tuple[float, float] | None, Sequence[tuple[str, np.ndarray]]]],
    *,
    title: str,
    x: tuple[str, Sequence[Any]],
    y: tuple[str, Sequence[Any]],
) -> None:
    """Grids of numbers, one row of panels for each kind: (color map, limits or None, [(panel title, values)]).

    Panels of a row share their colors, so that models can be compared by eye.
    """
    columns = max(len(panels) for _, _, panels in rows)
    width = max(4.2, 0.75 * len(x[1]) + 2.2) * columns
    figure = Figure(figsize=(width, 2.9 * len(rows) + 0.3), dpi=110, facecolor="white", layout="constrained")
    places = figure.subplots(len(rows), columns, squeeze=False)
    for line, (colors, limits, panels) in zip(places, rows, strict=True):
        low, high = limits or _limits([values for _, values in panels])
        for axes, (name, values) in zip(line, panels, strict=True):
            image = axes.imshow(values, aspect="auto", cmap=colors, vmin=low, vmax=high, interpolation="nearest")
            axes.set_title(name, fontsize=9, color=INK)
            axes.set_xticks(range(len(x[1])), [f"{v:,}" if isinstance(v, int) else str(v) for v in x[1]])
            axes.set_yticks(range(len(y[1])), [str(v) for v in y[1]])
            axes.set_xlabel(x[0], color=INK)
            axes.set_ylabel(y[0], color=INK)
            axes.tick_params(labelsize=8, colors=INK)
            _label_cells(axes, image, values)
        figure.colorbar(image, ax=list(line), pad=0.02).ax.tick_params(labelsize=8, colors=INK)
    figure.suptitle(title, fontsize=10, color=INK)
    save_figure(figure, path)


def _plain_axis(axes, values: Sequence[float]) -> None:
    """Ticks that are the numbers themselves, not what is to be added to a number at the end of the axis; and where all
    values are the same to the eye, an axis that shows them so."""
    low, high = min(values), max(values)
    if high - low < _FLAT * abs(high):
        axes.set_ylim(low - _FLAT * abs(low), high + _FLAT * abs(high))
    axes.ticklabel_format(axis="y", useOffset=False)


def _label_cells(axes, image, values: np.ndarray) -> None:
    if values.size > _MOST_CELLS_LABELED:
        return
    for row, column in np.ndindex(values.shape):
        if math.isfinite(values[row, column]):
            red, green, blue, _ = image.cmap(image.norm(values[row, column]))
            dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
            text = f"{values[row, column]:.2f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if dark else INK)


def _limits(grids: Sequence[np.ndarray]) -> tuple[float, float]:
    values = np.concatenate([grid.ravel() for grid in grids])
    values = values[np.isfinite(values)]
    return (float(values.min()), float(values.max())) if values.size and np.ptp(values) > 0 else (0.0, 1.0)


def draw_heads(
    path: str | Path,
    panels: Sequence[tuple[str, Mapping[int, Sequence[float]], Mapping[int, tuple[Sequence[float], Sequence[float]]]]],
) -> None:
    """For each model: log10 of the ratio of every head of every swapped layer, and the layers' mean over the text.

    Args:
        path: of the PNG.
        panels: (model, layer to ratios of its heads, layer to (lengths, mean importances)).
    """
    layers = max(len(grid) for _, grid, _ in panels)
    height = 3.6 + max(0.0, 0.25 * (layers - 8))
    figure = Figure(figsize=(10.5, height * len(panels)), dpi=110, facecolor="white", layout="constrained")
    places = figure.subplots(len(panels), 2, squeeze=False)
    for (left, right), (name, grid, growth) in zip(places, panels, strict=True):
        logs = np.log10(np.array(list(grid.values())))
        most = max(_FLAT, float(logs.max()))
        image = left.imshow(logs, aspect="auto", cmap="viridis", vmin=0.0, vmax=most, interpolation="nearest")
        left.xaxis.set_major_locator(MaxNLocator(integer=True))
        left.set_yticks(range(len(grid)), [str(layer) for layer in grid])
        left.set_ylabel("swapped layer", color=INK)
        left.set_xlabel("head", color=INK)
        left.set_title(f"{name}: log10 of the metaplasticity ratio", fontsize=9, color=INK)
        figure.colorbar(image, ax=left, pad=0.02).ax.tick_params(labelsize=8, colors=INK)
        for number, (layer, (lengths, values)) in enumerate(growth.items()):
            style = {"color": f"C{number % 10}", "linestyle": _DASHES[number // 10 % 4]}
            right.plot(lengths, values, marker="o", markersize=4, linewidth=1.4, label=f"layer {layer}", **style)
        right.set_xscale("log", base=2)
        right.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        means = [mean for _, values in growth.values() for mean in values]
        if max(means) > _LOG_FROM * min(means):
            right.set_yscale("log")
        else:
            _plain_axis(right, means)
        right.set_xlabel("tokens read", color=INK)
        right.set_title("mean importance of the synapses", fontsize=9, color=INK)
        right.grid(alpha=0.25, linewidth=0.6, which="both")
        right.legend(fontsize=7, frameon=False, ncols=1 + len(growth) // 9)
        for axes in (left, right):
            axes.tick_params(labelsize=8, colors=INK)
    save_figure(figure, path)
