"""What a run is, and what it says of itself: the lines of `metrics.jsonl`, and of the log where nobody sees a bar."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...base.console import bars_are_drawn, counted, human_bytes, human_count, human_seconds
from ...base.errors import OutputError, SchemaError
from ...base.files import write_text
from ...base.schemas import check_version
from ...mixers.importance import ImportanceRecorder, LayerImportance
from ..data.packing import TokenStream
from .checkpointing import Position, trained_parameters
from .recipe import Recipe
from .validation import LossResult

logger = logging.getLogger(__name__)

METRICS_VERSION = 1
"""`schema_version` of `metrics.jsonl`, in every line that starts or resumes a run."""

SECONDS = 30.0
"""Between two lines on the progress: a log of hours can still be read."""


@dataclass
class Training:
    """What one run of the loop works with.

    Attributes:
        accelerator: Accelerate's, already asked to `prepare` module and optimizer.
        module: a `CausalLoss`, prepared.
        optimizer: prepared.
        stream: the training text.
        recipe: what to do.
        folder: the run folder.
        position: where the run is; moves as it goes.
        validate: gives the loss on the validation sequences, or None.
        history: the lines of `metrics.jsonl`.
        behind: whether that file lacks some of them, as the disk refused one.
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
    behind: bool = False


@dataclass(frozen=True)
class Step:
    """What one optimizer step was: mean loss in nats per target, gradient norm before clipping, tokens read.

    A batch in which nothing is to be predicted (conversations cut before their answers) has no loss and trains nothing.
    """

    loss: float | None
    grad_norm: float | None
    tokens: int


def record_start(run: Training) -> None:
    """Where and how a run starts or goes on."""
    line = {
        "schema_version": METRICS_VERSION,
        "kind": "start",
        "step": run.position.step,
        "processes": run.accelerator.num_processes,
        "device": device_name(run),
    }
    write_metrics(run, line)


def record_step(
    run: Training, done: Step, rates: dict[str, float], seconds: float, recorder: ImportanceRecorder | None
) -> None:
    """One line on a step, where `log_every` asks for one or importance was recorded.

    Args:
        rates: learning rates by group.
        seconds: that the step took.
        recorder: of importance, None for steps that take no statistics.
    """
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


def record_validation(run: Training, step: int) -> None:
    """Validates, and records the loss."""
    result = run.validate()
    write_metrics(
        run, {"kind": "validation", "step": step, "loss": result.loss, "stderr": result.stderr, "tokens": result.tokens}
    )
    logger.info("step %d: validation loss %.4f +- %.4f", step, result.loss, result.stderr)


def write_metrics(run: Training, line: dict[str, Any]) -> None:
    """Adds one strict JSON line to `metrics.jsonl`, and hands its numbers to the trackers.

    A disk that refuses it ends no training: the file is written again with the next line.
    """
    run.history.append(line)
    if not run.accelerator.is_main_process:
        return
    try:
        text = json.dumps(line, allow_nan=False)
    except ValueError as error:
        raise SchemaError(f"metrics.jsonl: step {line['step']} holds a number that is not finite: {line}") from error
    path = run.folder / "metrics.jsonl"
    try:
        if run.behind:
            write_metrics_file(path, run.history)
        else:
            with path.open("a", encoding="utf-8") as stream:
                stream.write(text + "\n")
        run.behind = False
    except (OSError, OutputError) as error:
        if not run.behind:
            logger.warning("step %d: %s cannot be written (%s); the run goes on", line["step"], path, error)
        run.behind = True
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
            check_version(line.get("schema_version", METRICS_VERSION), METRICS_VERSION, str(path))
        if until is None or line["step"] <= until:
            lines.append(line)
    return lines


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
            loss: of the step, nats per token.
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
    """What a run is about to do: steps, tokens per step, device, mode, parameters that train."""
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
