"""The training loop: one optimizer step after the other, from any position, on any number of processes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...base.console import counted, human_bytes, progress
from ...base.errors import TrainingError, UsageError
from ...mixers.importance import record_importance
from ..data.packing import IGNORED, TokenSequence, collate
from .checkpointing import full_tensor, save_checkpoint, trained_parameters
from .diagnosis import bad_gradients, first_bad_module
from .metrics import RunLog, Step, Training, memory_used, record_start, record_step, record_validation
from .optim import set_lr
from .recipe import Recipe

logger = logging.getLogger(__name__)

MOST_EMPTY = 16
"""Batches without anything to predict among the first `LOOKED_AT` at which the text is taken to be at fault."""
LOOKED_AT = 64
"""Batches that are looked at for that before anything is removed or trained."""


def train(run: Training) -> None:
    """Runs the recipe's remaining steps: logs, validates and saves checkpoints on the way.

    Raises:
        TrainingError: a loss or gradient that is not finite, or a checkpoint that cannot be written.
    """
    recipe, total = run.recipe, run.recipe.total_steps()
    record_start(run)
    log = RunLog(run)
    if run.validate is not None and run.position.step == 0:
        record_validation(run, 0)
    run.module.train()
    empty = 0
    with progress(total - run.position.step, "fine-tuning") as bar:
        for step in range(run.position.step, total):
            started = time.perf_counter()
            rates = set_lr(run.optimizer, step, recipe)
            with record_importance(run.module) if _wants_importance(recipe, step) else nullcontext() as recorder:
                done = optimizer_step(run, step)
            run.position = replace(run.position, step=step + 1, tokens=run.position.tokens + done.tokens)
            seconds = time.perf_counter() - started
            loss = "nothing to predict"
            if done.loss is not None:
                loss = f"loss {done.loss:.4f}"
                record_step(run, done, rates, seconds, recorder)
                log.step(done.loss, done.tokens, seconds, memory_used())
            else:
                empty += 1
                if empty == 1:
                    logger.warning(
                        "step %d: the batch holds nothing to predict, so it trains nothing and has no loss", step + 1
                    )
            note = f"{loss}, {done.tokens / seconds:,.0f} tokens/s, {human_bytes(memory_used())}"
            bar.set_postfix_str(note, refresh=False)
            bar.update()
            last = step + 1 == total
            if run.validate is not None and (last or (recipe.eval_every and (step + 1) % recipe.eval_every == 0)):
                record_validation(run, step + 1)
                run.module.train()
            if recipe.save_every and ((step + 1) % recipe.save_every == 0 or last):
                save(run)
    if empty > 1:
        logger.warning("%d of the batches held nothing to predict and trained nothing", empty)


def _nothing_to_predict(what: str) -> TrainingError:
    return TrainingError(
        f"{what} nothing to predict; raise data.seq_len or batch_size, or look at the text: the answers may all lie"
        " behind the cut"
    )


def check_targets(run: Training) -> None:
    """Refuses a new run that would train little or nothing, as far as its first batches tell; a run that goes on is
    borne as it is.

    Raises:
        TrainingError: `MOST_EMPTY` of the first `LOOKED_AT` batches, or all of the run, hold nothing to predict.
    """
    recipe, total = run.recipe, run.recipe.total_steps()
    tokens, empty, steps = 0, 0, range(0 if run.position.step else min(LOOKED_AT, total))
    for step in steps:
        length = recipe.data.seq_len_at(step, total)
        places = range(tokens, tokens + length * recipe.batch_size, length)
        empty += not any((run.stream.sequence(place, length).targets != IGNORED).any() for place in places)
        tokens += length * recipe.batch_size
        if empty == MOST_EMPTY:
            raise _nothing_to_predict(f"{empty} of the first {counted(step + 1, 'batch', 'batches')} hold")
    if empty == total:
        raise _nothing_to_predict(f"all {empty} batches of this run hold" if empty > 1 else "the only batch holds")


def optimizer_step(run: Training, step: int) -> Step:
    """One step over the global batch.

    The loss is the mean over all targets of the global batch, however they are spread over micro-batches, processes
    and documents; so the result does not depend on how many processes share the work.
    """
    accelerator, recipe = run.accelerator, run.recipe
    seed_step(recipe.seed, step, accelerator.process_index)
    length = recipe.data.seq_len_at(step, recipe.total_steps())
    micro = [collate(group, accelerator.device) for group in my_sequences(run, length)]
    targets = sum(int((batch["targets"] != IGNORED).sum()) for batch in micro)
    targets = int(summed(accelerator, targets))
    tokens = length * recipe.batch_size
    if targets == 0:
        return Step(None, None, tokens)
    losses: list[Tensor] = []
    run.optimizer.zero_grad(set_to_none=True)
    for index, batch in enumerate(micro):
        last = index + 1 == len(micro)
        with nullcontext() if last else accelerator.no_sync(run.module):
            loss = run.module(**batch)
            # Processes average their gradients; the factor turns the average of sums into a mean over targets.
            accelerator.backward(loss * (accelerator.num_processes / targets))
        losses.append(loss.detach())
    loss = summed(accelerator, sum(float(part) for part in losses)) / targets  # waits for the device only here
    norm = gradient_norm(run.module)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise TrainingError(_explain(run, step, micro, loss))
    if recipe.clip is not None:
        trained = trained_parameters(run.module).values()
        torch.nn.utils.clip_grads_with_norm_(trained, recipe.clip, torch.tensor(norm, device=accelerator.device))
    run.optimizer.step()
    return Step(loss, norm, tokens)


def my_sequences(run: Training, length: int) -> Iterable[list[TokenSequence]]:
    """This process's micro-batches of the step, each a list of sequences."""
    recipe, processes = run.recipe, run.accelerator.num_processes
    share = recipe.micro_batch_size * processes
    for first in range(run.accelerator.process_index * recipe.micro_batch_size, recipe.batch_size, share):
        numbers = range(first, first + recipe.micro_batch_size)
        yield [run.stream.sequence(run.position.tokens + number * length, length) for number in numbers]


def check_batch(recipe: Recipe, processes: int) -> None:
    """Refuses a batch that the processes cannot share evenly."""
    if recipe.batch_size % (recipe.micro_batch_size * processes):
        raise UsageError(
            f"batch_size ({recipe.batch_size}) must be a multiple of micro_batch_size x processes"
            f" ({recipe.micro_batch_size} x {processes}); change one of them"
        )


def seed_step(seed: int, step: int, process: int) -> None:
    """Dropout's randomness is a function of seed, step and process: a resumed run needs no generator's state."""
    torch.manual_seed((seed * 1_000_003 + step) * 4_099 + process)


def gradient_norm(module: torch.nn.Module) -> float:
    """L2 norm over the gradients of all that trains, of all shards."""
    gradients = [p.grad for p in trained_parameters(module).values() if p.grad is not None]
    return float(full_tensor(torch.nn.utils.get_total_norm(gradients))) if gradients else 0.0


def save(run: Training) -> None:
    """A checkpoint at the run's position, if it is not there already."""
    folder = run.folder / "checkpoints"
    run.accelerator.wait_for_everyone()
    save_checkpoint(
        folder,
        run.module,
        run.optimizer,
        run.position,
        keep=run.recipe.keep,
        main=run.accelerator.is_main_process,
    )


def summed(accelerator: Any, value: float) -> float:
    """The sum of what each process gives; every process gets it, and waits for the others."""
    if accelerator.num_processes == 1:
        return value
    # fp32 where fp64 is not there; a count of targets fits exactly up to 2**24 a process
    dtype = torch.float32 if accelerator.device.type == "mps" else torch.float64
    return float(accelerator.reduce(torch.tensor(value, dtype=dtype, device=accelerator.device), "sum"))


def _explain(run: Training, step: int, micro: list[dict[str, Tensor]], loss: float) -> str:
    where = None
    for batch in micro:
        where = where or first_bad_module(run.module, lambda batch=batch: run.module(**batch))
    if where is not None:
        place = f"first in the output of {where}"
    else:
        names = bad_gradients(run.module)
        place = f"first in the gradient of {names[0]}" if names else "on another process"
    return (
        f"step {step + 1}: the loss ({loss:g}) or its gradient is not finite, {place}; nothing was changed by this"
        " step: lower lr or lr_new, lengthen warmup, or look at that layer"
    )


def _wants_importance(recipe: Recipe, step: int) -> bool:
    """Whether step `step` (0-based) takes statistics: the first, every n-th, the last."""
    every = recipe.importance_every
    return bool(every) and (step == 0 or (step + 1) % every == 0 or step + 1 == recipe.total_steps())
