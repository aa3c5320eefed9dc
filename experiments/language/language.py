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
import sys
from collections.abc import Sequence
from pathlib import Path

from language_arms import PRESETS, SOURCE, Arm, chosen_arms, find_preset, sweep
from language_results import best_rates, read_results
from palimpsa_surgery.base.console import setup_logging
from palimpsa_surgery.base.errors import PalimpsaError, UsageError

logger = logging.getLogger("palimpsa_surgery.experiments")


def run(preset: str, model: str, train: Path, held_out: Path, out: Path) -> None:
    """Runs every arm whose result is not there yet, the most telling first."""
    from language_run import Experiment, run_arm, run_source

    experiment = Experiment(preset, find_preset(preset), model, train, held_out, out)
    experiment.split()
    if not (experiment.raw / f"{SOURCE}.json").is_file():
        run_source(experiment)

    def finish(arms: Sequence[Arm]) -> None:
        for arm in arms:
            if (experiment.raw / f"{arm.name}.json").is_file():
                logger.info("%s: is there", arm.name)
            else:
                run_arm(experiment, arm)

    finish(sweep(experiment.preset))
    finish(chosen_arms(experiment.preset, best_rates(read_results(experiment.raw))))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), help="sizes: cpu takes an hour, gpu is the full setting")
    parser.add_argument("--model", help="the pretrained Mamba2: a folder or Hub id")
    parser.add_argument("--train", type=Path, help="training text")
    parser.add_argument("--val", type=Path, help="held-out text")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder for raw/, work/, tables.md and pictures")
    parser.add_argument("--report", action="store_true", help="only make tables and pictures of what is in raw/")
    given = parser.parse_args(argv)
    setup_logging(0)
    try:
        if not given.report:
            needed = ("preset", "model", "train", "val")
            missing = [f"--{name}" for name in needed if getattr(given, name) is None]
            if missing:
                raise UsageError(f"{', '.join(missing)}: is missing; give it, or --report to read finished results")
            run(given.preset, given.model, given.train, given.val, given.out)
        from language_report import report

        report(given.out)
    except PalimpsaError as error:
        logger.error("%s", error)
        return 2 if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
