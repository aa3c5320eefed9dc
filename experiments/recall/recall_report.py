"""Tables and plots of the recall experiments, from the files of their runs alone.

A learning rate is chosen for each arm by validation accuracy, never by the test. Errors are over seeds: the standard
error of the mean, and of the difference between arms at equal seeds for differences.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from palimpsa_surgery.base.files import write_text
from palimpsa_surgery.base.statistics import Figure
from palimpsa_surgery.recipes.evaluation.suites.plots import Line, draw_lines

Run = dict[str, Any]

HALF = 0.5
"""Validation accuracy that tells when a model has begun to recall: what guessing among the values gives is far less."""


def report(experiment: str, arms: Sequence[str], runs: Sequence[Run], out: Path, partial: Sequence[Run] = ()) -> None:
    """Writes `EXPERIMENT.md`, `.csv` and the plots into `out`.

    Args:
        experiment: name of the files.
        arms: the control, then what is compared with it; those without runs are left out. Plots show the first two.
        runs: what the files of the runs hold.
        out: folder.
        partial: runs that were cut: listed, and counted nowhere.
    """
    chosen = {arm: best_runs(runs, arm) for arm in arms if any(run["arm"] == arm for run in runs)}
    parts = [
        f"Learning rates ({_seeds(runs)} seeds; errors are standard errors over seeds)\n\n{_lr_table(runs, chosen)}",
        f"Test accuracy at each arm's best learning rate\n\n{_task_table(chosen)}",
        f"Heads: windows in tokens before and after training, importance of synapses after it\n\n{_head_table(chosen)}",
    ]
    if partial:
        parts.append(f"Cut before their end, and counted nowhere above\n\n{_cut_table(partial)}")
    write_text(out / f"{experiment}.md", "\n\n".join(parts) + "\n")
    write_text(out / f"{experiment}.csv", _csv(runs))
    shown = dict(list(chosen.items())[:2])
    _draw_accuracy(shown, experiment, out)
    _draw_learning(shown, experiment, out)
    _draw_importance(shown, experiment, out)


def best_lr(runs: Sequence[Run]) -> float:
    """The learning rate with the highest validation accuracy (mean over tasks) at the end, at the first seed."""
    first = min(run["seed"] for run in runs)
    return max((run for run in runs if run["seed"] == first), key=validation)["lr"]


def best_runs(runs: Sequence[Run], arm: str) -> list[Run]:
    """The arm's runs at its best learning rate, by seed."""
    own = [run for run in runs if run["arm"] == arm]
    lr = best_lr(own)
    return sorted((run for run in own if run["lr"] == lr), key=lambda run: run["seed"])


def validation(run: Run, record: int = -1) -> float:
    """Validation accuracy of a record, mean over the training tasks."""
    return mean(task["accuracy"] for task in run["records"][record]["validation"].values())


def steps_to(run: Run, accuracy: float) -> float | None:
    """The step at which validation first reaches `accuracy`, on a straight line between records; None when never."""
    points = [(record["step"], validation(run, index)) for index, record in enumerate(run["records"])]
    if points[0][1] >= accuracy:
        return 0.0
    for (before, low), (after, high) in itertools.pairwise(points):
        if low < accuracy <= high:
            return before + (after - before) * (accuracy - low) / (high - low)
    return None


def over_seeds(values: Sequence[float]) -> Figure:
    """Mean and its standard error; no error for a single seed."""
    return Figure(mean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None)


def _differences(chosen: dict[str, list[Run]], value: Callable[[Run], float]) -> list[Figure | None]:
    """Of each arm but the first: the arm less the first, at equal seeds; None when no seed is common."""
    control, *others = ({run["seed"]: value(run) for run in runs} for runs in chosen.values())
    common = [sorted(control.keys() & other.keys()) for other in others]
    return [
        over_seeds([other[seed] - control[seed] for seed in seeds]) if seeds else None
        for other, seeds in zip(others, common, strict=True)
    ]


def _test(run: Run) -> float:
    return mean(task["accuracy"] for task in run["test"].values())


def _seeds(runs: Sequence[Run]) -> int:
    return len({run["seed"] for run in runs})


def _text(figure: Figure | None, sign: str = "") -> str:
    if figure is None:
        return ""
    return f"{100 * figure.value:{sign}.1f}" + ("" if figure.error is None else f" ± {100 * figure.error:.1f}")


def _lr_table(runs: Sequence[Run], chosen: dict[str, list[Run]]) -> str:
    rows = []
    for arm, best in chosen.items():
        for lr in sorted({run["lr"] for run in runs if run["arm"] == arm}):
            own = [run for run in runs if run["arm"] == arm and run["lr"] == lr]
            speed = mean(map(_ms_per_step, own))
            figures = [over_seeds([f(run) for run in own]) for f in (lambda r: validation(r, 0), validation, _test)]
            mark = "chosen" if lr == best[0]["lr"] else ""
            rows.append([arm, f"{lr:g}", len(own), *map(_text, figures), _half_way(own), f"{speed:.0f}", mark])
    heads = ["arm", "learning rate", "seeds", "validation before, %", "after, %", "test mean, %"]
    heads += [f"steps to {100 * HALF:.0f} % validation", "ms per step", ""]
    return _markdown(heads, rows)


def _ms_per_step(run: Run) -> float:
    """Milliseconds a step; without those up to the first record, in which kernels are compiled, where files tell."""
    _, *records = run["records"]
    if len(records) > 1 and "seconds" in records[0]:
        seconds, steps = (records[-1][key] - records[0][key] for key in ("seconds", "step"))
        return 1000 * seconds / steps
    return 1000 * run["training_seconds"] / records[-1]["step"]


def _cut_table(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        last = run["records"][-1]
        rows.append([run["arm"], f"{run['lr']:g}", run["seed"], last["step"], f"{100 * validation(run):.1f}"])
    return _markdown(["arm", "learning rate", "seed", "step", "validation, %"], rows)


def _half_way(runs: Sequence[Run]) -> str:
    """Mean steps to `HALF` with its error over the runs that reach it, and how many do when not all."""
    steps = [step for step in (steps_to(run, HALF) for run in runs) if step is not None]
    if not steps:
        return "never"
    figure = over_seeds(steps)
    error = "" if figure.error is None else f" ± {figure.error:.0f}"
    return f"{figure.value:.0f}{error}" + ("" if len(steps) == len(runs) else f" ({len(steps)} of {len(runs)})")


def _task_table(chosen: dict[str, list[Run]]) -> str:
    rows = []
    for task in _tasks(chosen):
        length, pairs = task.split("/")
        figures = [over_seeds([run["test"][task]["accuracy"] for run in runs]) for runs in chosen.values()]
        gaps = _differences(chosen, lambda run, task=task: run["test"][task]["accuracy"])
        gaps = [_text(gap, "+") for gap in gaps]
        rows.append([length, pairs, f"{100 / int(pairs):.1f}", *map(_text, figures), *gaps])
    figures = [over_seeds([_test(run) for run in runs]) for runs in chosen.values()]
    gaps = [_text(gap, "+") for gap in _differences(chosen, _test)]
    rows.append(["mean", "", "", *map(_text, figures), *gaps])
    control, *others = chosen
    columns = [*(f"{arm}, %" for arm in chosen), *(f"{arm} less {control}" for arm in others)]
    return _markdown(["length", "pairs", "guess among values, %", *columns], rows)


def _head_table(chosen: dict[str, list[Run]]) -> str:
    rows = []
    for arm, runs in chosen.items():
        for layer in runs[0]["windows"]["before"]:
            for head in range(len(runs[0]["windows"]["before"][layer])):
                before, after = (
                    mean(run["windows"][when][layer][head] for run in runs) for when in ("before", "after")
                )
                last = [run["records"][-1]["importance"].get(layer) for run in runs]
                cells = ["", ""]
                if all(last):
                    cells = [f"{mean(x[key][head] for x in last):.2f}" for key in ("head_ratio", "head_mean")]
                rows.append([arm, layer, head, f"{before:.0f}", f"{after:.0f}", *cells])
    heads = ["arm", "layer", "head", "window before", "window after", "metaplasticity ratio", "mean importance"]
    return _markdown(heads, rows)


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _csv(runs: Sequence[Run]) -> str:
    """One row for each run and test task."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["arm", "lr", "seed", "length", "pairs", "accuracy", "bootstrap_error"])
    for run in sorted(runs, key=lambda run: (run["arm"], run["lr"], run["seed"])):
        for task, figure in run["test"].items():
            place = [run["arm"], run["lr"], run["seed"], *task.split("/")]
            writer.writerow([*place, round(figure["accuracy"], 6), round(figure["error"] or 0.0, 6)])
    return text.getvalue()


def _tasks(chosen: dict[str, list[Run]]) -> list[str]:
    return list(next(iter(chosen.values()))[0]["test"])


def _draw_accuracy(chosen: dict[str, list[Run]], experiment: str, out: Path) -> None:
    lines, differences = [], []
    by_pairs: dict[str, list[str]] = {}
    for task in _tasks(chosen):
        by_pairs.setdefault(task.split("/")[1], []).append(task)
    for dash, (pairs, tasks) in enumerate(by_pairs.items()):
        lengths = [int(task.split("/")[0]) for task in tasks]
        for color, (arm, runs) in enumerate(chosen.items()):
            figures = [over_seeds([run["test"][task]["accuracy"] for run in runs]) for task in tasks]
            lines.append(Line.of(f"{arm}, {pairs} pairs", lengths, figures)._replace(color=1 - color, dash=dash))
        if len(chosen) == 2:
            gaps = [_differences(chosen, lambda run, task=task: run["test"][task]["accuracy"])[0] for task in tasks]
            differences.append(Line.of(f"{pairs} pairs", lengths, gaps)._replace(dash=dash))
    draw_lines(
        out / f"{experiment}-accuracy.png",
        lines,
        title=f"Recall by length and pairs, mean of {len(next(iter(chosen.values())))} seeds and its standard error",
        x="sequence length, tokens",
        y="accuracy",
        log_x=True,
        y_limits=(-0.03, 1.03),
        differences=differences,
    )


def _draw_learning(chosen: dict[str, list[Run]], experiment: str, out: Path) -> None:
    lines = []
    for color, (arm, runs) in enumerate(chosen.items()):
        steps = [record["step"] for record in runs[0]["records"]]
        figures = [over_seeds([validation(run, index) for run in runs]) for index in range(len(steps))]
        label = f"{arm}, learning rate {runs[0]['lr']:g}"
        lines.append(Line.of(label, steps, figures)._replace(color=1 - color, dash=color))
    path, title = out / f"{experiment}-learning.png", "Validation accuracy in training, mean over tasks and seeds"
    draw_lines(path, lines, title=title, x="step", y="accuracy", y_limits=(-0.03, 1.03))


def _draw_importance(chosen: dict[str, list[Run]], experiment: str, out: Path) -> None:
    """The metaplasticity ratio of each layer over training; nothing when no arm has one."""
    lines = []
    for runs in chosen.values():
        for number, layer in enumerate(runs[0]["records"][0]["importance"]):
            steps = [record["step"] for record in runs[0]["records"]]
            ratios = [[run["records"][i]["importance"][layer]["ratio"] for run in runs] for i in range(len(steps))]
            line = Line.of(f"layer {layer}", steps, [over_seeds(values) for values in ratios])
            lines.append(line._replace(color=number, dash=number))
    if lines:
        title = "Metaplasticity ratio (95th over 5th percentile of a head's importance), mean over heads and seeds"
        draw_lines(out / f"{experiment}-importance.png", lines, title=title, x="step", y="ratio")
