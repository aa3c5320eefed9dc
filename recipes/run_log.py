"""What the log says of a run: one line when it starts, and lines on its progress where nobody sees a bar."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from ..base.console import bars_are_drawn, counted, human_bytes, human_count, human_seconds
from .checkpointing import trained_parameters

if TYPE_CHECKING:
    from .loop import Training

logger = logging.getLogger(__name__)

SECONDS = 30.0
"""Between two lines on the progress: a log of hours can still be read."""


class RunLog:
    """The lines of one call. The first process alone writes them; with a bar on a terminal only the first line."""

    def __init__(self, run: Training) -> None:
        self._run = run
        self._first = run.position.step
        self._spent = 0.0
        self._written = time.monotonic()
        if run.accelerator.is_main_process:
            logger.info("%s", announcement(run))

    def step(self, loss: float, tokens: int, seconds: float, memory: int) -> None:
        """Says how far the run is, if it is time to: after the first step and the last, and at steps that `log_every`
        names once `SECONDS` have passed.

        Args:
            loss: of the step, nats a token.
            tokens: of the step.
            seconds: that it took.
            memory: peak bytes.
        """
        step, recipe, now = self._run.position.step, self._run.recipe, time.monotonic()
        total = recipe.total_steps()
        self._spent += seconds
        due = step in (self._first + 1, total) or (step % recipe.log_every == 0 and now - self._written >= SECONDS)
        if not due or bars_are_drawn() or not self._run.accelerator.is_main_process:
            return
        self._written = now
        left = human_seconds(self._spent / (step - self._first) * (total - step))
        line = "step %d of %d: loss %.4f, %.0f tokens/s, %s, %s left"
        logger.info(line, step, total, loss, tokens / seconds, human_bytes(memory), left)


def announcement(run: Training) -> str:
    """What a run is about to do: steps, tokens a step, device, mode, parameters that train."""
    recipe, done, total = run.recipe, run.position.step, run.recipe.total_steps()
    steps_that_differ = range(done, total) if recipe.data.curriculum else (done,)
    lengths = {recipe.data.seq_len_at(step, total) for step in steps_that_differ} or {recipe.data.seq_len}
    tokens = " to ".join(f"{length * recipe.batch_size:,}" for length in sorted({min(lengths), max(lengths)}))
    processes = run.accelerator.num_processes
    where = f"{processes} x {device_name(run)}" if processes > 1 else device_name(run)
    steps = counted(total - done, "step") + (f" ({done} of {total} are done)" if done else "")
    # Of a sharded model these are sizes of the whole parameters.
    trained = human_count(sum(parameter.numel() for parameter in trained_parameters(run.module).values()))
    return f"fine-tuning: {steps} of {tokens} tokens on {where}, mode {recipe.mode}, {trained} parameters train"


def device_name(run: Training) -> str:
    """The GPU's own name, or the kind of device."""
    device = run.accelerator.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
