"""Associative recall from scratch: Mamba2 against Palimpsa-M in all layers, the same for both but for the mixer.

python -m palimpsa_surgery.recipes.experiments.mqar --preset cpu -o DIR      train what is missing, then report
python -m palimpsa_surgery.recipes.experiments.mqar -o DIR --report          report from the files alone
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from .recall_presets import MAMBA2, PALIMPSA, PER_CHANNEL, Setting
from .recall_report import Run
from .recall_runs import run_main, run_name, run_once, sweep
from .recall_training import TRAIN, build_model, train_and_test

NAME = "mqar"
MODELS = "models"
"""Folder of the trained Mamba2 models, the sources of `surgery_recall`."""


def train_all(setting: Setting, out: Path, device: str = "cpu", arms: Sequence[str] = (MAMBA2, PALIMPSA)) -> None:
    """The sweep of the arms; a run whose file is there is not repeated."""

    def run(arm: str, lr: float, seed: int) -> Run:
        return run_once(out, NAME, setting, arm, lr, seed, partial(_train, setting, out, device, arm, lr, seed))

    sweep(arms, setting.lrs, setting.seeds, run)


def _train(setting: Setting, out: Path, device: str, arm: str, lr: float, seed: int) -> Run:
    model = build_model(setting, arm, seed)
    found = train_and_test(
        model, setting, seed=seed, lr=lr, lr_new=lr, steps=setting.steps, stream=TRAIN, device=device
    )
    if arm == MAMBA2:
        model.to("cpu").save_pretrained(out / MODELS / run_name(NAME, arm, lr, seed))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Trains and reports."""
    run_main(NAME, (MAMBA2, PALIMPSA, PER_CHANNEL), train_all, __doc__, argv)


if __name__ == "__main__":
    main()
