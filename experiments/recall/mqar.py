"""Associative recall from scratch: Mamba2 against Palimpsa-M in all layers, the same for both but for the mixer.

python experiments/recall/mqar.py --preset cpu -o DIR      train what is missing, then report
python experiments/recall/mqar.py --preset cpu --arms palimpsa_d -o DIR      other layers than those two
python experiments/recall/mqar.py -o DIR --report          report from the files alone
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from recall_presets import MAMBA2, PALIMPSA, PALIMPSA_D, PER_CHANNEL, PER_HEAD, Setting
from recall_report import Run
from recall_runs import Place, Unit, run_main, run_name, run_once, sweep
from recall_training import TRAIN, build_model, train_and_test

NAME = "mqar"


def train_all(setting: Setting, place: Place, arms: Sequence[str] = (MAMBA2, PALIMPSA)) -> None:
    """The sweep of the arms; a run whose file is there is not repeated."""
    sweep(arms, setting.lrs, setting.seeds, partial(_run, setting, place), place)


def _run(setting: Setting, place: Place, unit: Unit) -> Run:
    return run_once(place, NAME, setting, unit, partial(_train, setting, place, *unit))


def _train(setting: Setting, place: Place, arm: str, lr: float, seed: int, **more: Any) -> Run:
    model, name = build_model(setting, arm, seed), run_name(NAME, arm, lr, seed)
    how = {"steps": setting.steps, "stream": TRAIN, **place.training(name), **more}
    found = train_and_test(model, setting, seed=seed, lr=lr, lr_new=lr, **how)
    if arm == MAMBA2:
        model.to("cpu").save_pretrained(place.models / name)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Trains and reports."""
    run_main(NAME, (MAMBA2, PALIMPSA, PER_CHANNEL, PER_HEAD, PALIMPSA_D), train_all, __doc__, argv)


if __name__ == "__main__":
    main()
