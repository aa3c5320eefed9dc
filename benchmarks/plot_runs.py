"""Loss curves of fine-tuning runs in one picture: training (smoothed), and validation with its errors.

    python benchmarks/plot_runs.py RUN [RUN ...] -o curves.png

A run is a folder with `metrics.jsonl`; its name is the legend.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_SMOOTH = 0.9


def read_run(folder: Path) -> tuple[list[dict], list[dict]]:
    """The training lines and the validation lines of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [x for x in lines if x["kind"] == "train"], [x for x in lines if x["kind"] == "validation"]


def smoothed(values: list[float]) -> list[float]:
    """Exponential mean without the bias of its start."""
    mean, weight, out = 0.0, 0.0, []
    for value in values:
        mean, weight = _SMOOTH * mean + (1 - _SMOOTH) * value, _SMOOTH * weight + (1 - _SMOOTH)
        out.append(mean / weight)
    return out


def draw(runs: list[Path], output: Path, title: str) -> None:
    """Two panels beside each other: training and validation."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for folder in runs:
        training, validation = read_run(folder)
        left.plot([x["step"] for x in training], smoothed([x["loss"] for x in training]), label=folder.name, lw=1.5)
        right.errorbar(
            [x["step"] for x in validation],
            [x["loss"] for x in validation],
            yerr=[x["stderr"] for x in validation],
            marker="o",
            ms=4,
            capsize=2,
            label=folder.name,
        )
    left.set(xlabel="step", ylabel="training loss, nats per token (smoothed)")
    right.set(xlabel="step", ylabel="validation loss, nats per token")
    _finish(figure, right, output, title)


def draw_changes(runs: list[Path], reference: str, output: Path, title: str, errors: dict[str, float]) -> None:
    """Runs that read the same tokens, where the text varies more than they differ: what differs.

    Training loss less that of the run called `reference`, and validation loss less that of step 0, whose last point
    carries its paired error in `errors` (by name), where there is one.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    base = {x["step"]: x["loss"] for folder in runs if folder.name == reference for x in read_run(folder)[0]}
    for folder in runs:
        training, validation = read_run(folder)
        common = [x for x in training if x["step"] in base]
        left.plot([x["step"] for x in common], smoothed([x["loss"] - base[x["step"]] for x in common]), lw=1.5)
        bars = [0.0] * (len(validation) - 1) + [errors.get(folder.name, 0.0)]
        changes = [x["loss"] - validation[0]["loss"] for x in validation]
        steps = [x["step"] for x in validation]
        right.errorbar(steps, changes, yerr=bars, marker="o", ms=4, capsize=3, label=folder.name)
    left.set(xlabel="step", ylabel=f"training loss less that of {reference}, nats (smoothed)")
    right.set(xlabel="step", ylabel="change of validation loss, nats per token")
    _finish(figure, right, output, title)


def _finish(figure: plt.Figure, labeled: plt.Axes, output: Path, title: str) -> None:
    labeled.legend(frameon=False)
    figure.suptitle(title)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    draw(options.runs, options.output, options.title)


if __name__ == "__main__":
    main()
