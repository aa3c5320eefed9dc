"""The training loop: one optimiser step after the other, from any position, on any number of processes."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.console import human_bytes, progress
from ..base.errors import SchemaError, TrainingError, UsageError
from ..base.files import write_text
from .config import Recipe
from ..modeling.importance import ImportanceRecorder, LayerImportance, record_importance
from .checkpointing import Position, full_tensor, save_checkpoint, trained_parameters
from .diagnosis import bad_gradients, first_bad_module
from .evaluate import LossResult
from .optim import set_lr
from .packing import IGNORED, TokenStream, Window, collate
from .run_log import RunLog, device_name

logger = logging.getLogger(__name__)

MOST_EMPTY = 16
"""Batches without anything to predict that a call bears before it says that the text is at fault."""

METRICS_VERSION = 1
"""`schema_version` of `metrics.jsonl`, in every line that starts or resumes a run."""


@dataclass
class Training:
    """What one run of the loop works with.

    Attributes:
        accelerator: Accelerate's, already asked to `prepare` module and optimiser.
        module: a `CausalLoss`, prepared.
        optimizer: prepared.
        stream: the training text.
        recipe: what to do.
        folder: the run folder.
        position: where the run is; moves as it goes.
        validate: gives the loss on the validation windows, or None.
        history: the lines of `metrics.jsonl`.
    """

    accelerator: Any
    module: torch.nn.Module
    optimizer: Any
    stream: TokenStream
    recipe: Recipe
    folder: Path
    position: Position
    validate: Callable[[], LossResult] | None = None
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """What one optimizer step was: mean loss in nats per target, gradient norm before clipping, tokens read.

    A batch in which nothing is to be predicted (conversations cut before their answers) has no loss and trains nothing.
    """

    loss: float | None
    grad_norm: float | None
    tokens: int


def train(run: Training) -> None:
    """Runs the recipe's remaining steps: logs, validates and saves checkpoints on the way.

    Raises:
        TrainingError: a loss or gradient that is not finite, or a checkpoint that cannot be written.
    """
    recipe, total = run.recipe, run.recipe.total_steps()
    write_metrics(run, _start_line(run))
    log = RunLog(run)
    if run.validate is not None and run.position.step == 0:
        _record_validation(run, 0)
    run.module.train()
    empty = 0
    with progress(total - run.position.step, "fine-tuning") as bar:
        for step in range(run.position.step, total):
            started = time.perf_counter()
            rates = set_lr(run.optimizer, step, recipe)
            with record_importance(run.module) if _wants_importance(recipe, step) else nullcontext() as recorder:
                done = optimiser_step(run, step)
            run.position = replace(run.position, step=step + 1, tokens=run.position.tokens + done.tokens)
            seconds = time.perf_counter() - started
            loss = "nothing to predict"
            if done.loss is not None:
                loss = f"loss {done.loss:.4f}"
                _record_step(run, done, rates, seconds, recorder)
                log.step(done.loss, done.tokens, seconds, memory_used())
            else:
                empty += 1
                _say_empty(step, empty)
            bar.advance(1, f"{loss}  {done.tokens / seconds:,.0f} tokens/s  {human_bytes(memory_used())}")
            last = step + 1 == total
            if run.validate is not None and (last or (recipe.eval_every and (step + 1) % recipe.eval_every == 0)):
                _record_validation(run, step + 1)
                run.module.train()
            if recipe.save_every and ((step + 1) % recipe.save_every == 0 or last):
                save(run)


def _say_empty(step: int, empty: int) -> None:
    if empty == 1:
        logger.warning("step %d: the batch holds nothing to predict, so it trains nothing and has no loss", step + 1)
    if empty == MOST_EMPTY:
        raise TrainingError(
            f"step {step + 1}: {empty} batches held nothing to predict; raise data.seq_len or batch_size, or look at"
            " the text: the answers may all lie behind the cut"
        )


def optimiser_step(run: Training, step: int) -> Step:
    """One step over the global batch.

    The loss is the mean over all targets of the global batch, however they are spread over micro-batches, processes
    and documents; so the result does not depend on how many processes share the work.
    """
    accelerator, recipe = run.accelerator, run.recipe
    seed_step(recipe.seed, step, accelerator.process_index)
    length = recipe.data.seq_len_at(step, recipe.total_steps())
    micro = [collate(w, accelerator.device) for w in my_windows(run, length)]
    targets = sum(int((batch["targets"] != IGNORED).sum()) for batch in micro)
    targets = int(_sum(accelerator, targets))
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
    loss = _sum(accelerator, sum(float(part) for part in losses)) / targets  # waits for the device only here
    norm = gradient_norm(run.module)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise TrainingError(_explain(run, step, micro, loss))
    if recipe.clip is not None and norm > recipe.clip:
        for parameter in trained_parameters(run.module).values():
            if parameter.grad is not None:
                parameter.grad.mul_(recipe.clip / norm)
    run.optimizer.step()
    return Step(loss, norm, tokens)


def my_windows(run: Training, length: int) -> Iterable[list[Window]]:
    """This process's micro-batches of the step, each a list of windows."""
    recipe, processes = run.recipe, run.accelerator.num_processes
    share = recipe.micro_batch_size * processes
    for first in range(run.accelerator.process_index * recipe.micro_batch_size, recipe.batch_size, share):
        numbers = range(first, first + recipe.micro_batch_size)
        yield [run.stream.window(run.position.tokens + number * length, length) for number in numbers]


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


def memory_used() -> int:
    """Peak bytes: of the CUDA device where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return psutil.Process().memory_info().peak_wset
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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


def _sum(accelerator: Any, value: float) -> float:
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


def _start_line(run: Training) -> dict[str, Any]:
    """Where and how a run starts or goes on."""
    return {
        "schema_version": METRICS_VERSION,
        "kind": "start",
        "step": run.position.step,
        "processes": run.accelerator.num_processes,
        "device": device_name(run),
    }


def _wants_importance(recipe: Recipe, step: int) -> bool:
    """Whether step `step` (0-based) takes statistics: the first, every n-th, the last."""
    every = recipe.importance_every
    return bool(every) and (step == 0 or (step + 1) % every == 0 or step + 1 == recipe.total_steps())


def _record_step(
    run: Training, done: Step, rates: dict[str, float], seconds: float, recorder: ImportanceRecorder | None
) -> None:
    step, recipe = run.position.step, run.recipe
    line: dict[str, Any] = {
        "kind": "train",
        "step": step,
        "loss": done.loss,
        "lr": rates,
        "tokens": run.position.tokens,
        "tokens_per_second": done.tokens / seconds,
        "grad_norm": done.grad_norm,
        "memory_bytes": memory_used(),
    }
    layers = recorder.layers() if recorder is not None else {}
    if layers:
        line["importance"] = importance_summary(layers)
    if layers or step == 1 or step % recipe.log_every == 0 or step == recipe.total_steps():
        write_metrics(run, line)


def importance_summary(layers: dict[int, LayerImportance]) -> dict[str, Any]:
    """The metaplasticity ratio and the mean importance over the swapped layers, the widest spread, and each layer."""
    return {
        "metaplasticity_ratio": sum(layer.ratio for layer in layers.values()) / len(layers),
        "mean": sum(layer.mean for layer in layers.values()) / len(layers),
        "head_spread": max(layer.head_spread for layer in layers.values()),
        "layers": {
            str(index): {"ratio": layer.ratio, "mean": layer.mean, "head_spread": layer.head_spread}
            for index, layer in layers.items()
        },
    }


def _record_validation(run: Training, step: int) -> None:
    result = run.validate()
    write_metrics(
        run, {"kind": "validation", "step": step, "loss": result.loss, "stderr": result.stderr, "tokens": result.tokens}
    )
    logger.info("step %d: validation loss %.4f +- %.4f", step, result.loss, result.stderr)


def write_metrics(run: Training, line: dict[str, Any]) -> None:
    """Adds one strict JSON line to `metrics.jsonl`, and hands its numbers to the trackers."""
    run.history.append(line)
    if not run.accelerator.is_main_process:
        return
    try:
        text = json.dumps(line, allow_nan=False)
    except ValueError as error:
        raise SchemaError(f"metrics.jsonl: step {line['step']} holds a number that is not finite: {line}") from error
    with (run.folder / "metrics.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(text + "\n")
    if run.recipe.trackers:
        run.accelerator.log(_numbers(line), step=line["step"])


def write_metrics_file(path: Path, lines: list[dict[str, Any]]) -> None:
    """`metrics.jsonl` as these lines: a resumed run drops what came after the checkpoint it goes on from."""
    write_text(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, dict):
            flat.update({f"{line['kind']}/{key}/{inner}": number for inner, number in value.items()})
        elif isinstance(value, (int, float)) and key != "step":
            flat[f"{line['kind']}/{key}"] = value
    return {key: value for key, value in flat.items() if isinstance(value, (int, float))}


def _check_version(version: Any, path: Path) -> None:
    if not isinstance(version, int) or isinstance(version, bool):
        raise SchemaError(f"{path}:schema_version: is {version!r}, expected a whole number such as {METRICS_VERSION}")
    if version > METRICS_VERSION:
        raise SchemaError(
            f"{path}:schema_version: is {version}, newer than the {METRICS_VERSION} this release knows; "
            "update palimpsa-surgery to read it"
        )


def read_metrics(path: Path, *, until: int | None = None) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, up to step `until`; a last line that a kill cut short is left out.

    Raises:
        SchemaError: a newer release wrote it.
    """
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if line.get("kind") == "start":
            _check_version(line.get("schema_version", METRICS_VERSION), path)
        if until is None or line["step"] <= until:
            lines.append(line)
    return lines
