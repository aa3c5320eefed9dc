"""Does surgery pay on language? The same pretrained Mamba2, fine-tuned alike with and without Palimpsa-M layers.

    python experiments/language/language.py --preset cpu --model DIR --train FILE --val FILE -o OUT
    python experiments/language/language.py --report -o OUT

The first line runs every arm that `OUT/raw` lacks and then reports; the second makes `OUT/tables.md` and the pictures
from `OUT/raw` again. Control and main arm first try each learning rate with the first seed; text that is used for
nothing else chooses. docs/results/language.md says what came out.
"""

from __future__ import annotations

import argparse
import logging
import math
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from language_arms import PRESETS, SOURCE, VARIANTS, Arm, chosen_arms, find_preset, sweep
from language_results import best_rates, read_results
from palimpsa_surgery.base.console import setup_logging
from palimpsa_surgery.base.errors import PalimpsaError, UsageError

if TYPE_CHECKING:
    from language_run import Experiment

logger = logging.getLogger("palimpsa_surgery.experiments")


def run(
    preset: str,
    model: str,
    train: Path,
    held_out: Path,
    out: Path,
    *,
    arms: Sequence[str] = tuple(VARIANTS),
    jobs: int = 1,
    until: float = math.inf,
) -> None:
    """Runs every arm whose result is not there yet, the most telling first.

    Args:
        preset: a key of `PRESETS`.
        model: the pretrained Mamba2.
        train: text.
        held_out: text.
        out: folder.
        arms: variants that are run.
        jobs: arms side by side on the device, each in a process of its own when more than one.
        until: `time.monotonic()` from which on no further arm is begun.
    """
    from language_run import Experiment, run_source

    experiment = Experiment(preset, find_preset(preset), model, train, held_out, out)
    experiment.split()
    if not (experiment.raw / f"{SOURCE}.json").is_file():
        run_source(experiment)

    def finish_asked(found: Sequence[Arm]) -> None:
        finish(experiment, [arm for arm in found if arm.variant in arms], jobs, until)

    finish_asked(sweep(experiment.preset))
    finish_asked(chosen_arms(experiment.preset, best_rates(read_results(experiment.raw))))


def finish(experiment: Experiment, arms: Sequence[Arm], jobs: int, until: float) -> None:
    """Runs the arms, `jobs` at a time; with several, an arm that fails ends when the others are done."""
    if jobs == 1:
        for arm in arms:
            finish_arm(experiment, arm, until)
        return
    bare = replace(experiment)  # without what it has read so far, which would travel
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=setup_logging, initargs=(0,)) as pool:
        futures = [pool.submit(finish_arm, bare, arm, until) for arm in arms]
    for future in futures:
        future.result()


def finish_arm(experiment: Experiment, arm: Arm, until: float) -> None:
    """Runs an arm unless its result is there, or the time is up."""
    from language_run import run_arm

    if (experiment.raw / f"{arm.name}.json").is_file():
        logger.info("%s: is there", arm.name)
    elif time.monotonic() >= until:
        logger.warning("%s: not begun, the time is up; the same command goes on from here", arm.name)
    else:
        run_arm(experiment, arm)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), help="cpu takes an hour, gpu is the full setting")
    parser.add_argument("--model", help="the pretrained Mamba2: a folder or Hub id")
    parser.add_argument("--train", type=Path, help="training text")
    parser.add_argument("--val", type=Path, help="held-out text")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder for raw/, work/, tables.md and pictures")
    parser.add_argument("--arms", nargs="+", choices=VARIANTS, default=tuple(VARIANTS), help="default: all")
    parser.add_argument("--jobs", type=int, default=1, help="arms side by side on the device")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further arm then")
    parser.add_argument("--report", action="store_true", help="only make tables and pictures of what is in raw/")
    given = parser.parse_args(argv)
    setup_logging(0)
    try:
        if not given.report:
            needed = ("preset", "model", "train", "val")
            missing = [f"--{name}" for name in needed if getattr(given, name) is None]
            if missing:
                raise UsageError(f"{', '.join(missing)}: is missing; give it, or --report to read finished results")
            until = time.monotonic() + 60 * given.minutes
            how = {"arms": given.arms, "jobs": given.jobs, "until": until}
            run(given.preset, given.model, given.train, given.val, given.out, **how)
        from language_report import report

        report(given.out)
    except PalimpsaError as error:
        logger.error("%s", error)
        return 2 if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
