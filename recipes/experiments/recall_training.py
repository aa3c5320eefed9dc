"""Models for associative recall, their training, and what is recorded of it: shared by `mqar` and `surgery_recall`."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...base.errors import TrainingError
from ...modeling.configuration_palimpsa_mamba2 import PalimpsaMamba2Config
from ...modeling.importance import record_importance
from ...modeling.modeling_palimpsa_mamba2 import PalimpsaMamba2ForCausalLM
from ...surgery.forgetting import measure_forgetting
from ..bootstrap import estimate
from ..config import Recipe
from ..optim import make_optimizer, set_lr
from .mqar_data import RecallBatch, Task, recall_batch
from .recall_presets import MAMBA2, PER_CHANNEL, Setting

LAYERS = 2
TRAIN, FURTHER, VALIDATION, TEST = range(4)
"""First number of the seed of each stream of sequences."""


def build_model(setting: Setting, arm: str, seed: int) -> PalimpsaMamba2ForCausalLM:
    """A new model. At the same seed all arms hold the same Mamba2 tensors; the rest is the paper's start."""
    torch.manual_seed(seed)
    shared = {"vocab_size": setting.vocab, "num_hidden_layers": LAYERS, **setting.model}
    plain = PalimpsaMamba2ForCausalLM(PalimpsaMamba2Config(**shared))
    if arm == MAMBA2:
        return plain
    swapped = {"palimpsa_layers": list(range(LAYERS)), **setting.metaplastic}
    if arm == PER_CHANNEL:
        swapped["beta_groups"] = setting.model["head_dim"]
    model = PalimpsaMamba2ForCausalLM(PalimpsaMamba2Config(**shared, **swapped))
    model.load_state_dict({**model.state_dict(), **plain.state_dict()})
    return model


def answers(model: nn.Module, batch: RecallBatch) -> Tensor:
    """Logits [rows, pairs, vocabulary] at the questions alone."""
    hidden = model.backbone(input_ids=batch.ids, use_cache=False).last_hidden_state
    where = batch.positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
    return model.lm_head(hidden.gather(1, where))


def train_and_test(
    model: nn.Module, setting: Setting, *, seed: int, lr: float, lr_new: float, steps: int, stream: int, device: str
) -> dict[str, Any]:
    """Trains in place, on equal sequences for equal `seed` and `stream`.

    Returns:
        What a run's file holds: `records` on the way, `windows` of every head before and after, `test` accuracies,
        times.

    Raises:
        TrainingError: a loss is not finite.
    """
    model.to(device)
    recipe = Recipe(seed=seed, steps=steps, lr=lr, lr_new=lr_new, **setting.recipe)
    optimizer = make_optimizer(model, recipe)
    generator = np.random.default_rng([stream, seed])
    before, records = windows(model, setting), [look(model, setting, 0, None, device)]
    moments = {round(steps * (index + 1) / setting.records) for index in range(setting.records)}
    # On a CPU the time that the process computes: that of the wall depends on what else runs there.
    clock = time.process_time if device == "cpu" else time.perf_counter
    seconds, losses = 0.0, []
    for step in range(steps):
        task = setting.train[step % len(setting.train)]
        started = clock()
        batch = _to(recall_batch(task, setting.vocab, setting.step_tokens // task.length, generator), device)
        losses.append(_step(model, optimizer, batch, step, recipe))
        seconds += clock() - started
        if step + 1 in moments:
            records.append(look(model, setting, step + 1, float(np.mean(losses)), device))
            losses = []
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "training_seconds": round(seconds, 2),
        "records": records,
        "windows": {"before": before, "after": windows(model, setting)},
        "test": test(model, setting.test, setting, TEST, setting.test_rows, device),
        "environment": environment(device),
    }


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: RecallBatch, step: int, recipe: Recipe) -> float:
    """One optimiser step; its loss in nats a question."""
    model.train()
    set_lr(optimizer, step, recipe)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(answers(model, batch).flatten(0, 1), batch.values.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    optimizer.step()
    value = float(loss.detach())
    if not math.isfinite(value):
        raise TrainingError(f"step {step + 1}: the loss is not finite at learning rate {recipe.lr:g}; take a lower one")
    return value


def look(model: nn.Module, setting: Setting, step: int, loss: float | None, device: str) -> dict[str, Any]:
    """Validation accuracies by task, and each swapped layer's importance at the end of the longest of them."""
    short, longest = setting.train[:-1], setting.train[-1:]
    accuracies = test(model, short, setting, VALIDATION, setting.validation_rows, device)
    with record_importance(model) as recorder:
        accuracies |= test(model, longest, setting, VALIDATION, setting.validation_rows, device)
    importance = {
        str(layer): {"ratio": x.ratio, "mean": x.mean, "head_ratio": x.head_ratio, "head_mean": x.head_mean}
        for layer, x in recorder.layers().items()
    }
    return {"step": step, "train_loss": loss, "validation": accuracies, "importance": importance}


@torch.no_grad()
def test(
    model: nn.Module, tasks: Sequence[Task], setting: Setting, stream: int, rows: int, device: str
) -> dict[str, dict[str, float | None]]:
    """Share of questions whose value is the likeliest of all tokens, and its bootstrap error over sequences.

    Every model gets the same sequences.
    """
    model.eval()
    found = {}
    for task in tasks:
        generator = np.random.default_rng([stream, task.length, task.pairs])
        batch = _to(recall_batch(task, setting.vocab, rows, generator), device)
        pieces = [RecallBatch(*part) for part in zip(*(tensor.split(64) for tensor in batch), strict=True)]
        right = torch.cat([(answers(model, piece).argmax(-1) == piece.values).sum(1) for piece in pieces])
        samples = np.stack([right.cpu().numpy(), np.full(rows, task.pairs)], axis=1).astype(float)
        figure = estimate(samples)
        found[str(task)] = {"accuracy": figure.value, "error": figure.error}
    return found


def windows(model: nn.Module, setting: Setting) -> dict[str, list[float]]:
    """Each layer's window by head, in tokens, over sequences of the longest training task."""
    task = setting.train[-1]
    generator = np.random.default_rng([VALIDATION, task.length, task.pairs])
    ids = recall_batch(task, setting.vocab, setting.validation_rows, generator).ids.numpy()
    layers = measure_forgetting(model, list(ids), batch_size=64, calibrate=False)
    return {str(layer.layer): list(layer.head_window) for layer in layers}


def environment(device: str) -> dict[str, Any]:
    """What the times belong to."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return {"device": f"{device} ({name})", "threads": torch.get_num_threads(), "torch": torch.__version__}


def _to(batch: RecallBatch, device: str) -> RecallBatch:
    return RecallBatch(*(tensor.to(device) for tensor in batch))
