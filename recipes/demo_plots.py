"""The two pictures of the demo: that the model learns, and what importance did in the swapped layers meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..surgery.measure.plots import save_figure


def plot_losses(history: Sequence[dict], gains: Mapping[str, tuple[float, float]], path: Path) -> None:
    """The held-out loss during fine-tuning beside the source's, and at its end what was gained, with errors.

    Args:
        history: lines of `metrics.jsonl`; the first validation is of the model that equals its source.
        gains: model to (difference from the source, its error).
        path: of the PNG.
    """
    figure, (left, right) = _panels()
    steps, losses = zip(*[(x["step"], x["loss"]) for x in history if x["kind"] == "validation"], strict=True)
    left.axhline(losses[0], color="#444444", linestyle="--", linewidth=1.0, label="source")
    left.plot(steps, losses, color="#1f77b4", marker="o", markersize=4, linewidth=1.4, label="fine-tuned")
    left.set(xlabel="step", ylabel="nats per token")
    left.set_title("loss on held-out text during fine-tuning", fontsize=9)
    left.legend(fontsize=8, frameon=False)
    values, errors = zip(*gains.values(), strict=True)
    right.errorbar(range(len(values)), values, yerr=errors, fmt="o", capsize=4, color="#1f77b4")
    right.axhline(0, color="#444444", linestyle="--", linewidth=1.0)
    right.set_xticks(range(len(gains)), list(gains))
    right.set_xlim(-0.6, len(gains) - 0.4)
    right.set_title("held-out loss less the source's", fontsize=9)
    _save(figure, path)


def plot_importance(history: Sequence[dict], heads: Mapping[int, Sequence[float]], path: Path) -> None:
    """How far the metaplasticity ratio has risen above 1, by step, and in every head in the end.

    Args:
        history: lines of `metrics.jsonl`.
        heads: swapped layer to the ratios of its heads after fine-tuning, on held-out text.
        path: of the PNG.
    """
    figure, (left, right) = _panels()
    lines = [x for x in history if x["kind"] == "train" and "importance" in x]
    for layer in heads:
        rises = [100 * (x["importance"]["layers"][str(layer)]["ratio"] - 1) for x in lines]
        left.plot([x["step"] for x in lines], rises, marker="o", markersize=4, linewidth=1.4, label=f"layer {layer}")
    left.set(xlabel="step", ylabel="% above 1")
    left.set_title("ratio of high to low importance of synapses (95th to 5th percentile)", fontsize=9)
    left.legend(fontsize=8, frameon=False)
    rises = 100 * (np.array(list(heads.values())) - 1)
    image = right.imshow(rises, aspect="auto", cmap="viridis", vmin=0.0)
    right.set(xlabel="head", ylabel="layer")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_yticks(range(len(heads)), [str(layer) for layer in heads])
    right.set_title("by head, in the end (%)", fontsize=9)
    figure.colorbar(image, ax=right, pad=0.03).ax.tick_params(labelsize=8)
    _save(figure, path)


def _panels() -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(9, 3.4), dpi=110, facecolor="white", layout="constrained")
    return figure, figure.subplots(1, 2, width_ratios=(5, 3))


def _save(figure: Figure, path: Path) -> None:
    for axes in figure.axes[:2]:
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
