"""profile.png: what a profile says, as a picture."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...base.errors import PalimpsaError
from ...base.files import write_bytes
from .profile import Profile, write_profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARK = "#d62728"
INK = "#1a1a1a"
MOST_LABELED = 80
"""Rows that still have room for a number each."""


def plot_profile(profile: Profile, path: str | Path, *, chosen: Sequence[int] = ()) -> None:
    """Draws layers x heads: log10 of the window on the left, of the rate on the right, chosen layers marked.

    Args:
        profile: the figures.
        path: of the PNG.
        chosen: layers to mark.
    """
    from matplotlib.figure import Figure

    numbers, heads = [layer.layer for layer in profile.layers], max(len(layer.head_rate) for layer in profile.layers)
    layers, marked_rows = len(numbers), [row for row, number in enumerate(numbers) if number in chosen]
    height = min(max(3.2, 0.22 * layers + 1.4), 18)
    width = min(max(9.0, 0.16 * heads + 5), 20)
    figure = Figure(figsize=(width, height), dpi=110, facecolor="white")
    (left, left_bar), (right, right_bar) = _panels(figure, width, height)
    panels = (
        (left, left_bar, "window (tokens)", "viridis", [layer.head_window for layer in profile.layers], "window"),
        (right, right_bar, "forget rate (nats per token)", "magma_r", [x.head_rate for x in profile.layers], "rate"),
    )
    for axes, bar, title, colors, values, kind in panels:
        _heat_map(axes, bar, title, colors, values, marked_rows)
        if layers <= MOST_LABELED:
            _layer_means(axes, [getattr(layer, kind) for layer in profile.layers], marked_rows)
    left.set_ylabel("layer", color=INK)
    rows = range(layers) if layers <= MOST_LABELED else sorted({*range(0, layers, 4), *marked_rows})
    left.set_yticks(rows, [str(numbers[row]) for row in rows])
    for label in left.get_yticklabels():
        if int(label.get_text()) in chosen:
            label.set(color=MARK, fontweight="bold")
    marked = "   red: chosen layers" if chosen else ""
    figure.suptitle(f"{profile.source}\n{profile.describe()}{marked}", y=1 - 0.08 / height, fontsize=9, color=INK)
    save_figure(figure, path)


def write_profile_and_picture(profile: Profile, path: str | Path, picture: Path) -> None:
    """Both or, where they are new, none: a full disk leaves no profile without its picture, nor one alone."""
    new = [file for file in (Path(path), picture) if not file.exists()]
    try:
        plot_profile(profile, picture)
        write_profile(profile, path)
    except PalimpsaError:
        for file in new:
            file.unlink(missing_ok=True)
        raise


def save_figure(figure: Figure, path: str | Path) -> None:
    """Writes a PNG, whole or not at all, the same bytes for the same figure."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    write_bytes(path, picture.getvalue())


def _panels(figure: Figure, width: float, height: float) -> list[tuple[Axes, Axes]]:
    """Two panels, each a map and its bar of colors, with fixed room for labels in inches.

    A layout that fits the labels would measure every text first, which takes as long as to draw it.
    """

    def add(left: float, across: float, **options) -> Axes:
        return figure.add_axes((left / width, 0.5 / height, across / width, 1 - 1.25 / height), **options)

    panel = (width - 0.5) / 2
    maps = [add(0.6, panel - 1.3)]
    maps.append(add(0.6 + panel, panel - 1.3, sharey=maps[0]))
    maps[1].tick_params(labelleft=False)
    return [(axes, add(panel * number - 0.1, 0.14)) for number, axes in enumerate(maps, 1)]


def _heat_map(axes: Axes, bar: Axes, title: str, colors: str, values: list[list[float]], marked: Sequence[int]) -> None:
    logs = [[math.log10(value) for value in row] for row in values]
    image = axes.imshow(logs, aspect="auto", interpolation="nearest", cmap=colors)
    axes.set_title(f"log10 {title}; layer means at the side", fontsize=8, color=INK)
    axes.set_xlabel("head", color=INK)
    if len(logs[0]) <= 16:
        axes.set_xticks(range(len(logs[0])))
    axes.tick_params(labelsize=7, colors=INK)
    axes.figure.colorbar(image, cax=bar)
    bar.tick_params(labelsize=7, colors=INK)
    for row in marked:
        axes.axhspan(row - 0.5, row + 0.5, fill=False, edgecolor=MARK, linewidth=1.6)


def _layer_means(axes: Axes, means: list[float], marked: Sequence[int]) -> None:
    beside = axes.get_yaxis_transform()  # of the panel's width across, of layers downwards
    for row, mean in enumerate(means):
        weight, color = ("bold", MARK) if row in marked else ("normal", INK)
        axes.text(1.01, row, f"{mean:.3g}", transform=beside, va="center", fontsize=7, color=color, fontweight=weight)
