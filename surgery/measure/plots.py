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
    from matplotlib.figure import Figure

MARK = "#d62728"
INK = "#1a1a1a"
MOST_LABELLED = 80
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
    figure = Figure(figsize=(width, height), dpi=110, facecolor="white", layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    panels = (
        (left, "window (tokens)", "viridis", [layer.head_window for layer in profile.layers], "window"),
        (right, "forget rate (nats a token)", "magma_r", [layer.head_rate for layer in profile.layers], "rate"),
    )
    for axes, title, colours, values, kind in panels:
        _heat_map(figure, axes, title, colours, values, marked_rows)
        if layers <= MOST_LABELLED:
            _layer_means(axes, heads, [getattr(layer, kind) for layer in profile.layers], marked_rows)
    left.set_ylabel("layer", color=INK)
    rows = range(layers) if layers <= MOST_LABELLED else sorted({*range(0, layers, 4), *marked_rows})
    left.set_yticks(rows, [str(numbers[row]) for row in rows])
    for label in left.get_yticklabels():
        if int(label.get_text()) in chosen:
            label.set(color=MARK, fontweight="bold")
    marked = "   red: chosen layers" if chosen else ""
    figure.suptitle(f"{profile.source}\n{profile.describe()}{marked}", fontsize=9, color=INK)
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


def _heat_map(figure: Figure, axes, title: str, colours: str, values: list[list[float]], marked: Sequence[int]) -> None:
    logs = [[math.log10(value) for value in row] for row in values]
    image = axes.imshow(logs, aspect="auto", interpolation="nearest", cmap=colours)
    axes.set_title(f"log10 {title}; layer means at the side", fontsize=8, color=INK)
    axes.set_xlabel("head", color=INK)
    if len(logs[0]) <= 24:
        axes.set_xticks(range(len(logs[0])))
    axes.tick_params(labelsize=7, colors=INK)
    bar = figure.colorbar(image, ax=axes, pad=0.09)
    bar.ax.tick_params(labelsize=7, colors=INK)
    for row in marked:
        axes.axhspan(row - 0.5, row + 0.5, fill=False, edgecolor=MARK, linewidth=1.6)


def _layer_means(axes, heads: int, means: list[float], marked: Sequence[int]) -> None:
    for row, mean in enumerate(means):
        weight, colour = ("bold", MARK) if row in marked else ("normal", INK)
        axes.text(heads - 0.35, row, f"{mean:.3g}", va="center", fontsize=7, color=colour, fontweight=weight)
