"""The two sizes of the recall experiments: the benchmark's on a GPU, and a small one that one CPU core can do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from mqar_data import Task

MAMBA2, PALIMPSA = "mamba2", "palimpsa"
PER_CHANNEL, PER_HEAD = "palimpsa_per_channel", "palimpsa_per_head"
PALIMPSA_D = "palimpsa_d"
"""Arms: the control; all layers metaplastic as the setting says; the same with one beta per channel, as in the paper;
the same with one beta per head; Palimpsa-D layers of the same sizes, each head with keys of its own."""


@dataclass(frozen=True)
class Setting:
    """One size of the experiments; everything but the arm's own fields is the same for every arm.

    Attributes:
        vocab: tokens, half of them keys and half values.
        model: fields of `PalimpsaMamba2Config` that the arms share.
        metaplastic: what the arm `palimpsa` adds, beside having all its layers swapped.
        train: tasks of training, a step of one after a step of the other.
        test: tasks of the table.
        lrs: learning rates from scratch, each tried with every arm at the first seed; the best of an arm gets them all.
        seeds: of weights and training sequences.
        steps: optimizer steps from scratch.
        step_tokens: tokens of a step, whatever the task.
        test_rows: sequences of each test task.
        validation_rows: sequences of each training task, for choosing the learning rate and for curves.
        records: how many times a run is looked at on its way.
        surgery_lrs: learning rates of the further training, likewise.
        surgery_steps: steps of the further training.
        new_lr_ratio: there, the learning rate of what surgery added over that of the rest.
        autocast: train and test in bf16 autocast; the parameters are fp32 all the same.
        recipe: fields of `Recipe` that do not vary.
    """

    vocab: int
    model: dict[str, Any]
    metaplastic: dict[str, Any]
    train: tuple[Task, ...]
    test: tuple[Task, ...]
    lrs: tuple[float, ...]
    seeds: tuple[int, ...]
    steps: int
    step_tokens: int
    test_rows: int
    validation_rows: int
    records: int
    surgery_lrs: tuple[float, ...]
    surgery_steps: int
    new_lr_ratio: float
    autocast: bool
    recipe: dict[str, Any]

    def of_a_run(self) -> dict[str, Any]:
        """What a single run depends on: all but the lists of learning rates and seeds, which may grow later."""
        return {key: value for key, value in self.to_dict().items() if key not in ("lrs", "seeds", "surgery_lrs")}

    def to_dict(self) -> dict[str, Any]:
        """As JSON gives it back; tasks are `length/pairs`."""
        tasks = {"train": [str(task) for task in self.train], "test": [str(task) for task in self.test]}
        return json.loads(json.dumps({**asdict(self), **tasks}))


_RECIPE = {"weight_decay": 0.0, "warmup": 0.1, "min_lr_ratio": 0.0, "clip": 1.0}


def _grid(lengths: tuple[int, ...], pairs: tuple[int, ...]) -> tuple[Task, ...]:
    """Every number of pairs at every length that has room to ask for all of them."""
    return tuple(Task(length, count) for count in pairs for length in lengths if 4 * count <= length)


PRESETS = {
    "cpu": Setting(
        vocab=64,
        model={"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 16, "chunk_size": 32},
        metaplastic={"beta_groups": 1, "beta_scale_form": "softplus"},
        train=(Task(16, 2), Task(16, 4), Task(32, 8), Task(64, 16)),
        test=_grid((16, 32, 64, 128, 256), (4, 8, 16)),
        lrs=(2e-2, 4e-2),
        seeds=(0, 1, 2),
        steps=1600,
        step_tokens=1024,
        test_rows=128,
        validation_rows=64,
        records=16,
        surgery_lrs=(5e-3, 2e-2),
        surgery_steps=320,
        new_lr_ratio=1.0,
        autocast=False,
        recipe=_RECIPE,
    ),
    "gpu": Setting(
        vocab=8192,
        model={"hidden_size": 128, "num_heads": 4, "head_dim": 64, "state_size": 64, "chunk_size": 64},
        metaplastic={"beta_groups": 64, "beta_scale_form": "softplus"},
        train=(Task(64, 4), Task(128, 8), Task(256, 16), Task(256, 32), Task(256, 64)),
        test=_grid((256, 1024, 4096), (16, 64, 256)),
        lrs=(1e-2, 3e-2, 6e-2, 1e-1),
        seeds=(0, 1, 2),
        steps=2400,
        step_tokens=65536,
        test_rows=256,
        validation_rows=128,
        records=12,
        surgery_lrs=(1e-3, 3e-3, 1e-2),
        surgery_steps=1200,
        new_lr_ratio=1.0,
        autocast=True,
        recipe={**_RECIPE, "weight_decay": 0.1},
    ),
}
"""`gpu` is the benchmark's setting: its vocabulary, its mixture of lengths up to 256 with pairs growing along, tests
at up to sixteen times that length; an eighth of its steps, so that a run takes a few minutes. `cpu` is chosen so that
neither arm is at chance or perfect everywhere."""
