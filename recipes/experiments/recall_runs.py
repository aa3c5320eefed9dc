"""Runs of the recall experiments as files: trained once, found again, and the command line around them."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...base.console import setup_logging
from ...base.errors import UsageError
from ...base.files import load_json, write_json
from .recall_presets import PRESETS, Setting
from .recall_report import report

logger = logging.getLogger(__name__)


def run_name(experiment: str, arm: str, lr: float, seed: int) -> str:
    """Name of a run's file, without its ending."""
    return f"{experiment}-{arm}-lr{lr:g}-seed{seed}"


def run_once(
    out: Path, experiment: str, setting: Setting, arm: str, lr: float, seed: int, train: Callable[[], dict[str, Any]]
) -> None:
    """Trains and writes the run's file, unless it is there already.

    Raises:
        UsageError: the file is of another setting.
    """
    path = out / f"{run_name(experiment, arm, lr, seed)}.json"
    if path.is_file():
        if load_json(path).get("setting") != setting.to_dict():
            raise UsageError(f"{path.name}: was made with another setting; give another -o, or remove it")
        logger.info("%s: done before", path.stem)
        return
    found = train()
    head = {"schema_version": 1, "experiment": experiment, "arm": arm, "lr": lr, "seed": seed}
    write_json(path, {**head, **found, "setting": setting.to_dict()})
    accuracy = sum(task["accuracy"] for task in found["test"].values()) / len(found["test"])
    logger.info("%s: test accuracy %.3f, %.0f s of training", path.stem, accuracy, found["training_seconds"])


def read_runs(out: Path, experiment: str) -> list[dict[str, Any]]:
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
    arms: tuple[str, str],
    train: Callable[[Setting, Path, str], None],
    about: str,
    argv: Sequence[str] | None,
) -> None:
    """The command line of both recall experiments."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu", help="cpu: small, one core; gpu: the benchmark's")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder of the runs, tables and plots")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--report", action="store_true", help="train nothing, report what is there")
    options = parser.parse_args(argv)
    setup_logging()
    if not options.report:
        train(PRESETS[options.preset], options.out, options.device)
    report(experiment, arms, read_runs(options.out, experiment), options.out)
