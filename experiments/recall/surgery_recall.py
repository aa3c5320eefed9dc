"""Surgery on recall: the Mamba2 models of `mqar`, trained further as they are, and with their layers swapped.

    python experiments/recall/surgery_recall.py --preset cpu -o DIR      DIR is that of mqar
    python experiments/recall/surgery_recall.py --preset cpu -o DIR --arms unswapped swapped swapped_paper
    python experiments/recall/surgery_recall.py -o DIR --report

Each seed's source is the Mamba2 of that seed at the learning rate that is best on validation. All arms read the same
sequences in the same order for the same steps. The swap is `convert` itself, proof included.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mqar
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.modeling.palimpsa_mamba2.modeling_palimpsa_mamba2 import PalimpsaMamba2ForCausalLM
from palimpsa_surgery.surgery.checkpoint.loading import load_model
from palimpsa_surgery.surgery.conversion.convert import convert
from recall_presets import MAMBA2, Setting
from recall_report import Run, best_lr
from recall_runs import Place, Unit, read_runs, run_main, run_name, run_once, sweep
from recall_training import FURTHER, LAYERS, train_and_test

NAME = "surgery_recall"
UNSWAPPED, SWAPPED = "unswapped", "swapped"


@dataclass(frozen=True)
class Operation:
    """A way to operate on the source.

    Attributes:
        layers: that are swapped.
        init: of `surgery.conversion.initialization.STARTS`.
        per_head: one beta per head, whatever the setting says.
        lr_new_times: the setting's learning rate of what surgery added, times this.
    """

    layers: tuple[int, ...] = tuple(range(LAYERS))
    init: str = "identity"
    per_head: bool = False
    lr_new_times: float = 1.0


OPERATIONS: dict[str, Operation | None] = {
    UNSWAPPED: None,
    SWAPPED: Operation(),
    "swapped_paper": Operation(init="paper"),
    "swapped_fast": Operation(lr_new_times=10.0),
    "swapped_first": Operation(layers=(0,)),
    "swapped_per_head": Operation(per_head=True),
}
"""Arms, the control first; `swapped_first` takes the layer that stops forgetting when recall is learnt from scratch."""


def train_all(setting: Setting, place: Place, arms: Sequence[str] = (UNSWAPPED, SWAPPED)) -> None:
    """The sweep of the arms; a run whose file is there is not repeated.

    Raises:
        UsageError: `mqar` has not run in the folder.
    """
    lr_of_source = best_lr([run for run in read_runs(place.out, mqar.NAME) if run["arm"] == MAMBA2])
    sweep(arms, setting.surgery_lrs, setting.seeds, partial(_run, setting, place, lr_of_source), place)


def _run(setting: Setting, place: Place, lr_of_source: float, unit: Unit) -> Run:
    return run_once(place, NAME, setting, unit, partial(_train, setting, place, lr_of_source, *unit))


def _train(setting: Setting, place: Place, lr_of_source: float, arm: str, lr: float, seed: int, **more: Any) -> Run:
    source = place.models / run_name(mqar.NAME, MAMBA2, lr_of_source, seed)
    operation = OPERATIONS[arm]
    lr_new = lr * setting.new_lr_ratio * (operation.lr_new_times if operation else 1.0)
    model = start(setting, source, arm, seed)
    how = {"steps": setting.surgery_steps, "stream": FURTHER, **place.training(run_name(NAME, arm, lr, seed)), **more}
    found = train_and_test(model, setting, seed=seed, lr=lr, lr_new=lr_new, **how)
    return {"source": source.name, "lr_new": lr_new, **found}


def start(setting: Setting, source: Path, arm: str, seed: int) -> PalimpsaMamba2ForCausalLM:
    """The source itself, or operated as the arm says.

    Raises:
        UsageError: the source is not there.
    """
    if not source.is_dir():
        raise UsageError(f"{source.parent.name}/{source.name}: is not there; run mqar with the same -o first")
    operation = OPERATIONS[arm]
    if operation is None:
        return load_model(source)
    gate = {"beta_groups": 1 if operation.per_head else setting.metaplastic["beta_groups"], "seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        converted = Path(folder) / "converted"
        convert(source, converted, layers=operation.layers, init=operation.init, verify="logits", **gate)
        return load_model(converted)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains and reports."""
    run_main(NAME, tuple(OPERATIONS), train_all, __doc__, argv)


if __name__ == "__main__":
    main()
