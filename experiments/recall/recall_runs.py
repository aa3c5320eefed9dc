"""Runs of the recall experiments as files: trained once, found again, and the command line around them."""

from __future__ import annotations

import argparse
import logging
import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from palimpsa_surgery.base.console import setup_logging
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.base.files import load_json, write_json
from recall_presets import PRESETS, Setting
from recall_report import Run, best_lr, report
from recall_training import OutOfTimeError

logger = logging.getLogger("palimpsa_surgery.experiments")


def run_name(experiment: str, arm: str, lr: float, seed: int) -> str:
    """Name of a run's file, without its ending."""
    return f"{experiment}-{arm}-lr{lr:g}-seed{seed}"


PARTIAL = ".partial.json"
"""Ending of the file of a run on its way."""

Unit = tuple[str, float, int]
"""A run: arm, learning rate, seed."""


@dataclass(frozen=True)
class Place:
    """Where and for how long runs are made.

    Attributes:
        out: folder of their files.
        work: folder of what is larger: trained Mamba2 models, runs on their way; that of the files when None.
        device: "cpu" or "cuda".
        until: `time.monotonic()` from which on nothing further is begun; runs on their way are kept and go on later.
        jobs: runs side by side, each in a process of its own when more than one.
        workers: processes that make sequences, for each of them.
    """

    out: Path
    device: str = "cpu"
    until: float = math.inf
    jobs: int = 1
    workers: int = 0
    work: Path | None = None

    @property
    def models(self) -> Path:
        """Folder of the trained Mamba2 models, the sources of `surgery_recall`."""
        return (self.work or self.out) / "models"

    def training(self, name: str) -> dict[str, Any]:
        """What `train_and_test` needs of it for the run `name`."""
        keep = (self.work or self.out) / f"{name}.partial.pt"
        return {"device": self.device, "keep": keep, "until": self.until, "workers": self.workers}


def sweep(
    arms: Sequence[str],
    lrs: Sequence[float],
    seeds: Sequence[int],
    run: Callable[[Unit], Run],
    place: Place,
) -> None:
    """Each arm at each learning rate with the first seed, then at its best learning rate with the others.

    The best is that of validation; every arm is given the same learning rates and the same seeds. A single learning
    rate leaves no choice, and all runs may be side by side.

    Args:
        arms: names.
        lrs: to try.
        seeds: the first is that of the choice.
        run: trains a unit or finds it done; gives the run. It goes to other processes when there are several jobs.
        place: how many at a time.

    Raises:
        OutOfTimeError: the time was up before all were done.
        PalimpsaError: a run failed; the others are finished first.
    """
    if len(lrs) == 1:
        run_all([(arm, lrs[0], seed) for seed in seeds for arm in arms], run, place)
        return
    tried = run_all([(arm, lr, seeds[0]) for lr in lrs for arm in arms], run, place)
    best = {arm: best_lr([found for found in tried if found["arm"] == arm]) for arm in arms}
    run_all([(arm, best[arm], seed) for seed in seeds[1:] for arm in arms], run, place)


def run_all(units: Sequence[Unit], run: Callable[[Unit], Run], place: Place) -> list[Run]:
    """The runs of all units, `place.jobs` at a time; raises the first error when the others are done."""
    if place.jobs == 1:
        return [run(unit) for unit in units]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(place.jobs, mp_context=context, initializer=setup_logging) as pool:
        futures = [pool.submit(run, unit) for unit in units]
        for future, unit in zip(futures, units, strict=True):
            if error := future.exception():
                logger.warning("%s at %g, seed %d: %s", *unit, error)
        return [future.result() for future in futures]


def run_once(place: Place, experiment: str, setting: Setting, unit: Unit, train: Callable[..., Run]) -> Run:
    """Trains and writes the run's file, unless it is there already; gives what it holds.

    Until the run is done, `NAME.partial.json` holds its records, so that one that is cut says how far it came.

    Raises:
        UsageError: the file is of another setting.
        OutOfTimeError: `place.until` has come before the run was begun, or before it was done.
    """
    arm, lr, seed = unit
    path = place.out / f"{run_name(experiment, *unit)}.json"
    if path.is_file():
        run = load_json(path)
        if run.get("setting") != setting.of_a_run():
            raise UsageError(f"{path.name}: was made with another setting; give another -o, or remove it")
        logger.info("%s: done before", path.stem)
        return run
    if time.monotonic() >= place.until:
        raise OutOfTimeError(f"{path.stem}: not begun, the time is up; the same command goes on from here")
    head = {"schema_version": 1, "experiment": experiment, "arm": arm, "lr": lr, "seed": seed}
    partial = path.with_suffix(PARTIAL)

    def keep(records: list[dict[str, Any]]) -> None:
        write_json(partial, {**head, "records": records, "setting": setting.of_a_run()})

    run = {**head, **train(on_record=keep), "setting": setting.of_a_run()}
    write_json(path, run)
    partial.unlink(missing_ok=True)
    accuracy = sum(task["accuracy"] for task in run["test"].values()) / len(run["test"])
    logger.info("%s: test accuracy %.3f, %.0f s of training", path.stem, accuracy, run["training_seconds"])
    return run


def read_runs(out: Path, experiment: str) -> list[Run]:
    """The runs of an experiment that are in `out`.

    Raises:
        UsageError: there is none, or they are not all of one setting.
    """
    runs = [load_json(path) for path in sorted(out.glob(f"{experiment}-*-seed*[0-9].json"))]
    if not runs:
        raise UsageError(f"{out.name}: has no run of {experiment}; train first, without --report")
    if any(run["setting"] != runs[0]["setting"] for run in runs):
        raise UsageError(f"{out.name}: has runs of {experiment} of different settings; keep those of one")
    return runs


def read_partial(out: Path, experiment: str) -> list[Run]:
    """What is known of the runs that are not done."""
    return [load_json(path) for path in sorted(out.glob(f"{experiment}-*-seed*{PARTIAL}"))]


def run_main(
    experiment: str,
    arms: Sequence[str],
    train: Callable[[Setting, Place, Sequence[str]], None],
    about: str,
    argv: Sequence[str] | None,
) -> None:
    """The command line of both recall experiments; the first two of `arms` run when none are named."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu", help="cpu: small, one core; gpu: the benchmark's")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder of the runs, tables and plots")
    parser.add_argument("--arms", nargs="+", choices=arms, default=arms[:2], help="default: %(default)s")
    parser.add_argument("--lrs", nargs="+", type=float, help="learning rates instead of the preset's")
    parser.add_argument("--seeds", nargs="+", type=int, help="seeds instead of the preset's")
    parser.add_argument("--steps", type=int, help="steps from scratch instead of the preset's")
    parser.add_argument("--surgery-steps", type=int, help="steps of the further training instead of the preset's")
    parser.add_argument("--state-size", type=int, help="state size of every layer instead of the preset's")
    parser.add_argument("--work", type=Path, help="folder of models and of runs on their way; default: that of -o")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side on the device")
    parser.add_argument("--workers", type=int, default=0, help="processes that make sequences, for each run")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop then; the same command goes on later")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--report", action="store_true", help="train nothing, report what is there")
    options = parser.parse_args(argv)
    setup_logging()
    if not options.report:
        setting = _asked(PRESETS[options.preset], options)
        until = time.monotonic() + 60 * options.minutes
        try:
            place = Place(options.out, options.device, until, options.jobs, options.workers, options.work)
            train(setting, place, options.arms)
        except OutOfTimeError as error:
            logger.warning("%s", error)
    report(experiment, arms, read_runs(options.out, experiment), options.out, read_partial(options.out, experiment))


def _asked(setting: Setting, options: argparse.Namespace) -> Setting:
    """The preset with what the command line says instead."""
    model = {**setting.model, "state_size": options.state_size} if options.state_size else None
    lists = {"lrs": options.lrs, "surgery_lrs": options.lrs, "seeds": options.seeds}
    changes = {key: tuple(value) for key, value in lists.items() if value}
    changes |= {"steps": options.steps, "surgery_steps": options.surgery_steps, "model": model}
    return replace(setting, **{key: value for key, value in changes.items() if value})
