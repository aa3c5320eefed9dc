"""Runs of the recall experiments as files: trained once, found again, and the command line around them."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...base.console import setup_logging
from ...base.errors import UsageError
from ...base.files import load_json, write_json
from .recall_presets import PRESETS, Setting
from .recall_report import Run, best_lr, report

logger = logging.getLogger(__name__)


def run_name(experiment: str, arm: str, lr: float, seed: int) -> str:
    """Name of a run's file, without its ending."""
    return f"{experiment}-{arm}-lr{lr:g}-seed{seed}"


def sweep(
    arms: Sequence[str], lrs: Sequence[float], seeds: Sequence[int], run: Callable[[str, float, int], Run]
) -> None:
    """Each arm at each learning rate with the first seed, then at its best learning rate with the others.

    The best is that of validation; every arm is given the same learning rates and the same seeds.

    Args:
        arms: names.
        lrs: to try.
        seeds: the first is that of the choice.
        run: trains (arm, learning rate, seed) or finds it done; gives the run.
    """
    tried = {arm: [] for arm in arms}
    for lr in lrs:
        for arm in arms:
            tried[arm].append(run(arm, lr, seeds[0]))
    for seed in seeds[1:]:
        for arm in arms:
            run(arm, best_lr(tried[arm]), seed)


def run_once(
    out: Path, experiment: str, setting: Setting, arm: str, lr: float, seed: int, train: Callable[[], Run]
) -> Run:
    """Trains and writes the run's file, unless it is there already; gives what it holds.

    Raises:
        UsageError: the file is of another setting.
    """
    path = out / f"{run_name(experiment, arm, lr, seed)}.json"
    if path.is_file():
        run = load_json(path)
        if run.get("setting") != setting.of_a_run():
            raise UsageError(f"{path.name}: was made with another setting; give another -o, or remove it")
        logger.info("%s: done before", path.stem)
        return run
    head = {"schema_version": 1, "experiment": experiment, "arm": arm, "lr": lr, "seed": seed}
    run = {**head, **train(), "setting": setting.of_a_run()}
    write_json(path, run)
    accuracy = sum(task["accuracy"] for task in run["test"].values()) / len(run["test"])
    logger.info("%s: test accuracy %.3f, %.0f s of training", path.stem, accuracy, run["training_seconds"])
    return run


def read_runs(out: Path, experiment: str) -> list[Run]:
    """The runs of an experiment that are in `out`.

    Raises:
        UsageError: there is none, or they are not all of one setting.
    """
    runs = [load_json(path) for path in sorted(out.glob(f"{experiment}-*-seed*.json"))]
    if not runs:
        raise UsageError(f"{out.name}: has no run of {experiment}; train first, without --report")
    if any(run["setting"] != runs[0]["setting"] for run in runs):
        raise UsageError(f"{out.name}: has runs of {experiment} of different settings; keep those of one")
    return runs


def run_main(
    experiment: str,
    arms: Sequence[str],
    train: Callable[[Setting, Path, str, Sequence[str]], None],
    about: str,
    argv: Sequence[str] | None,
) -> None:
    """The command line of both recall experiments; the first two of `arms` run when none are named."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu", help="cpu: small, one core; gpu: the benchmark's")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder of the runs, tables and plots")
    parser.add_argument("--arms", nargs="+", choices=arms, default=arms[:2], help="default: %(default)s")
    parser.add_argument("--lrs", nargs="+", type=float, help="learning rates instead of the preset's")
    parser.add_argument("--steps", type=int, help="steps from scratch instead of the preset's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--report", action="store_true", help="train nothing, report what is there")
    options = parser.parse_args(argv)
    setup_logging()
    if not options.report:
        setting = PRESETS[options.preset]
        if options.lrs:
            setting = replace(setting, lrs=tuple(options.lrs), surgery_lrs=tuple(options.lrs))
        if options.steps:
            setting = replace(setting, steps=options.steps)
        train(setting, options.out, options.device, options.arms)
    report(experiment, arms, read_runs(options.out, experiment), options.out)
