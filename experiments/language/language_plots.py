"""Pictures of the experiment on language."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from language_arms import CONTROL, MAIN
from language_board import Board
from language_results import LOSS, ArmResult, change, change_over_seeds
from matplotlib.figure import Figure
from palimpsa_surgery.recipes.evaluation.suites.plots import GRAY, INK

MOST_HISTORIES = 4
LOG_FROM = 10
"""Ratios above it get a logarithmic axis."""


def draw_all(board: Board, out: Path) -> None:
    """arms.png, positions.png, importance.png, windows.png."""
    draw_arms(board, out / "arms.png")
    draw_positions(board, out / "positions.png")
    draw_importance(board, out / "importance.png")
    draw_windows(board, out / "windows.png")


def draw_arms(board: Board, path: Path) -> None:
    """Every arm's loss less the control's, within and beyond the training length, beside the spread over seeds."""
    bounds = ((0, board.seq_len, "within the training length"), (board.seq_len, None, "beyond it"))
    figure, panels = _figure(2, (9.0, 1.4 + 0.36 * len(board.compared)))
    for axes, (low, high, name) in zip(panels, bounds, strict=True):
        _, over_seeds = change_over_seeds(board.pairs, low, high)
        single = [1000 * change(one, control, low, high).value for one, control in board.pairs]
        if over_seeds is not None:
            spread = float(np.std(single, ddof=1))
            axes.axvspan(-2 * spread, 2 * spread, color=GRAY, alpha=0.15, linewidth=0)
        figures = [change(result, board.control, low, high) for result in board.compared]
        places = range(len(figures))[::-1]
        errors = [1000 * (figure.error or 0.0) for figure in figures]
        axes.errorbar([1000 * f.value for f in figures], places, xerr=errors, fmt="o", color="#d62728", capsize=3)
        axes.plot(single[1:], [places[0]] * len(single[1:]), "|", color=INK, markersize=11)
        axes.axvline(0, color=GRAY, linewidth=0.8)
        axes.set_yticks(list(places), [result.variant for result in board.compared])
        axes.set_ylim(-0.6, len(figures) - 0.4)
        axes.set_xlabel("loss less the control's (thousandths of a nat a token)", color=INK)
        axes.set_title(name, fontsize=9, color=INK)
    panels[1].tick_params(labelleft=False)
    _save(figure, path, "First seed, one bootstrap error; bars: other seeds; gray: two standard deviations over seeds")


def draw_positions(board: Board, path: Path) -> None:
    """Main arm less control by position: each seed, and the mean with its error over windows."""
    figure, (axes,) = _figure(1, (7.5, 4.2))
    rows = board.control.of(LOSS)
    middle = [(row.at["from"] * row.at["to"]) ** 0.5 for row in rows]
    for one, control in board.pairs:
        values = [change(one, control, row.at["from"], row.at["to"] + 1).value for row in rows]
        axes.plot(middle, values, color=GRAY, linewidth=0.9, marker=".", label=f"seed {one.seed}")
    means = [change_over_seeds(board.pairs, row.at["from"], row.at["to"] + 1)[0] for row in rows]
    values, errors = (np.array([x if x is not None else 0.0 for x in column]) for column in zip(*means, strict=True))
    axes.plot(middle, values, color="#d62728", linewidth=1.8, marker="o", markersize=4, label="mean over seeds")
    axes.fill_between(middle, values - errors, values + errors, color="#d62728", alpha=0.18, linewidth=0)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.axvline(board.seq_len, color=INK, linewidth=0.8, linestyle=":")
    axes.text(board.seq_len * 1.05, axes.get_ylim()[1], "beyond training", fontsize=8, va="top", color=INK)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else "")
    axes.set_xlabel("tokens before the target", color=INK)
    axes.set_ylabel(f"{MAIN} - {CONTROL} (nats per token)", color=INK)
    axes.legend(fontsize=8, frameon=False)
    _save(figure, path, "Loss by position, difference to the control")


def draw_importance(board: Board, path: Path) -> None:
    """Metaplasticity ratio of each swapped layer over training, of the arms that say most."""
    wanted = (MAIN, "window-new-only-fast", "window-paper", "all", "window-calibrated")
    arms = [result for name in wanted for result in board.operated if result.variant == name and result.importance]
    arms = arms[:MOST_HISTORIES]
    figure, panels = _figure(max(1, len(arms)), (3.1 * max(1, len(arms)) + 0.6, 3.4))
    for axes, result in zip(panels, arms, strict=False):
        per_step = result.tokens / max(1, result.steps)
        for layer in result.palimpsa_layers:
            ratios = [line["layers"][str(layer)]["ratio"] for line in result.importance]
            tokens = [line["step"] * per_step / 1000 for line in result.importance]
            axes.plot(tokens, ratios, marker=".", linewidth=1.2, color=f"C{layer % 10}", label=f"layer {layer}")
        highest = max(line.get_ydata().max() for line in axes.get_lines())
        if highest > LOG_FROM:
            axes.set_yscale("log")
        else:
            axes.ticklabel_format(axis="y", useOffset=False)
        axes.set_xlabel("thousand tokens trained", color=INK)
        axes.set_title(result.variant, fontsize=9, color=INK)
        axes.legend(fontsize=7, frameon=False)
    panels[0].set_ylabel("metaplasticity ratio", color=INK)
    _save(figure, path, "95th over 5th percentile of the importance of a head's synapses, mean over heads")


def draw_windows(board: Board, path: Path) -> None:
    """Mean window of each layer of the source, and after training with and without surgery."""
    main = board.get(MAIN)
    arms: Sequence[tuple[str, ArmResult | None, str]] = (
        ("source", board.source, GRAY),
        (CONTROL, board.control, "#1f77b4"),
        (f"{MAIN} (swapped: {', '.join(str(layer) for layer in main.palimpsa_layers)})", main, "#d62728"),
    )
    shown = [(name, arm, color) for name, arm, color in arms if arm is not None]
    figure, (axes,) = _figure(1, (7.5, 3.6))
    for index, (name, arm, color) in enumerate(shown):
        means = [float(np.mean(heads)) for heads in arm.windows]
        places = np.arange(len(means)) + (index - (len(shown) - 1) / 2) * 0.27
        axes.bar(places, means, width=0.25, color=color, label=name)
    axes.set_xticks(range(len(means)))
    axes.set_xlabel("layer", color=INK)
    axes.set_ylabel("mean window (tokens)", color=INK)
    axes.legend(fontsize=8, frameon=False)
    _save(figure, path, "Windows before and after fine-tuning")


def _figure(columns: int, size: tuple[float, float]) -> tuple[Figure, Sequence]:
    figure = Figure(figsize=size, dpi=110, facecolor="white", layout="constrained")
    panels = figure.subplots(1, columns, squeeze=False)[0]
    for axes in panels:
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.tick_params(labelsize=8, colors=INK)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _save(figure: Figure, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=9, color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={"Software": None})
