"""Models for associative recall, their training, and what is recorded of it: shared by `mqar` and `surgery_recall`."""

from __future__ import annotations

import contextlib
import math
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mqar_data import RecallBatch, Task, recall_batch
from palimpsa_surgery.base.errors import PalimpsaError, TrainingError
from palimpsa_surgery.base.statistics import estimate
from palimpsa_surgery.mixers.importance import record_importance
from palimpsa_surgery.mixers.palimpsa_d import PalimpsaDMixer
from palimpsa_surgery.modeling.palimpsa_d.configuration_palimpsa_d import PalimpsaDConfig
from palimpsa_surgery.modeling.palimpsa_d.modeling_palimpsa_d import PalimpsaDForCausalLM
from palimpsa_surgery.modeling.palimpsa_mamba2.configuration_palimpsa_mamba2 import PalimpsaMamba2Config
from palimpsa_surgery.modeling.palimpsa_mamba2.modeling_palimpsa_mamba2 import PalimpsaMamba2ForCausalLM
from palimpsa_surgery.recipes.training.optim import make_optimizer, set_lr
from palimpsa_surgery.recipes.training.recipe import Recipe
from palimpsa_surgery.surgery.measure.forgetting import ForgettingSums, measure_forgetting
from palimpsa_surgery.surgery.measure.profile import LayerProfile
from recall_presets import MAMBA2, PALIMPSA_D, PER_CHANNEL, PER_HEAD, Setting
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

LAYERS = 2
TRAIN, FURTHER, VALIDATION, TEST = range(4)
"""First number of the seed of each stream of sequences."""


def build_model(setting: Setting, arm: str, seed: int) -> PalimpsaMamba2ForCausalLM | PalimpsaDForCausalLM:
    """A new model. At the same seed all arms hold the same Mamba2 tensors; the rest is the paper's start.

    Palimpsa-D shares no tensors but the embedding's shape; its prior trains as that of the other arms does.
    """
    torch.manual_seed(seed)
    shared = {"vocab_size": setting.vocab, "num_hidden_layers": LAYERS, **setting.model}
    if arm == PALIMPSA_D:
        sizes = {key: value for key, value in shared.items() if key != "chunk_size"}
        return PalimpsaDForCausalLM(PalimpsaDConfig(**sizes, **setting.metaplastic, train_prior=True))
    plain = PalimpsaMamba2ForCausalLM(PalimpsaMamba2Config(**shared))
    if arm == MAMBA2:
        return plain
    swapped = {"palimpsa_layers": list(range(LAYERS)), **setting.metaplastic}
    swapped["beta_groups"] = {PER_CHANNEL: setting.model["head_dim"], PER_HEAD: 1}.get(arm, swapped["beta_groups"])
    model = PalimpsaMamba2ForCausalLM(PalimpsaMamba2Config(**shared, **swapped))
    model.load_state_dict({**model.state_dict(), **plain.state_dict()})
    return model


def answers(model: nn.Module, batch: RecallBatch, autocast: bool = False) -> Tensor:
    """Logits [rows, pairs, vocabulary] at the questions alone, in fp32."""
    with torch.autocast(batch.ids.device.type, dtype=torch.bfloat16, enabled=autocast):
        hidden = model.get_decoder()(input_ids=batch.ids, use_cache=False).last_hidden_state
        where = batch.positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        return model.get_output_embeddings()(hidden.gather(1, where)).float()


class Sequences(Dataset[RecallBatch]):
    """The training sequences of each step: they depend on nothing but these numbers, so a run may go on anywhere."""

    def __init__(self, setting: Setting, stream: int, seed: int) -> None:
        self.setting, self.stream, self.seed = setting, stream, seed

    def __getitem__(self, step: int) -> RecallBatch:
        task = self.setting.train[step % len(self.setting.train)]
        generator = np.random.default_rng([self.stream, self.seed, step])
        return recall_batch(task, self.setting.vocab, self.setting.step_tokens // task.length, generator)


def train_and_test(
    model: nn.Module,
    setting: Setting,
    *,
    seed: int,
    lr: float,
    lr_new: float,
    steps: int,
    stream: int,
    device: str,
    keep: Path | None = None,
    until: float = math.inf,
    workers: int = 0,
    on_record: Callable[[list[dict[str, Any]]], None] | None = None,
) -> dict[str, Any]:
    """Trains in place, on equal sequences for equal `seed` and `stream`.

    Args:
        model: a new one, also of a run that goes on.
        setting: sizes.
        seed: of the sequences.
        lr: learning rate; `lr_new` that of what is metaplastic.
        lr_new: see `lr`.
        steps: optimizer steps.
        stream: which stream of sequences.
        device: "cpu" or "cuda".
        keep: where a run is kept on its way, with every record, and gone on from; removed at the end.
        until: `time.monotonic()` from which on no further record is begun.
        workers: processes that make sequences.
        on_record: is given the records so far, after each.

    Returns:
        What a run's file holds: `records` on the way with the seconds of training so far, `windows` of every head
        before and after, `test` accuracies, times.

    Raises:
        TrainingError: a loss or a gradient is not finite.
        OutOfTimeError: `until` has come first; what was done is kept.
    """
    model.to(device)
    recipe = Recipe(seed=seed, steps=steps, lr=lr, lr_new=lr_new, **setting.recipe)
    optimizer = make_optimizer(model, recipe)
    first, seconds = 0, 0.0
    if keep is not None and keep.is_file():
        kept = torch.load(keep, map_location=device, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        first, seconds, before, records = kept["step"], kept["seconds"], kept["before"], kept["records"]
    else:
        before, records = windows(model, setting), [{"seconds": 0.0, **look(model, setting, 0, None, device)}]
    moments = {round(steps * (index + 1) / setting.records) for index in range(setting.records)}
    # On a CPU the time that the process computes: that of the wall depends on what else runs there.
    clock = time.process_time if device == "cpu" else time.perf_counter
    ahead = range(first, steps)
    batches = DataLoader(Sequences(setting, stream, seed), batch_size=None, sampler=ahead, num_workers=workers)
    losses, started = [], clock()
    for step, batch in zip(ahead, batches, strict=True):
        losses.append(_step(model, optimizer, _to(batch, device), step, recipe, setting.autocast))
        if step + 1 not in moments:
            continue
        seconds += clock() - started
        seen = look(model, setting, step + 1, float(torch.stack(losses).mean()), device)
        records.append({"seconds": round(seconds, 2), **seen})
        losses = []
        if keep is not None:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            _keep({**state, "seconds": seconds, "before": before, "records": records}, keep)
        if on_record is not None:
            on_record(records)
        if step + 1 < steps and time.monotonic() >= until:
            raise OutOfTimeError(f"step {step + 1} of {steps}: the time is up; the same command goes on from here")
        started = clock()
    found = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "training_seconds": round(seconds, 2),
        "records": records,
        "windows": {"before": before, "after": windows(model, setting)},
        "test": test(model, setting.test, setting, TEST, setting.test_rows, device),
        "environment": environment(device),
    }
    if keep is not None:
        keep.unlink(missing_ok=True)
    return found


class OutOfTimeError(PalimpsaError):
    """A run was cut because its time was up; it goes on when started again."""


def _keep(state: dict[str, Any], path: Path) -> None:
    """Writes beside and renames, so that a run killed meanwhile finds the last whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    torch.save(state, new)
    new.replace(path)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: RecallBatch, step: int, recipe: Recipe, autocast: bool
) -> Tensor:
    """One optimizer step; its loss in nats per question."""
    model.train()
    set_lr(optimizer, step, recipe)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(answers(model, batch, autocast).flatten(0, 1), batch.values.flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    for what, value in (("loss", loss.detach()), ("gradient", norm)):
        if not math.isfinite(float(value)):
            remedy = f"learning rate {recipe.lr:g}; take a lower one"
            raise TrainingError(f"step {step + 1}: the {what} is not finite at {remedy}")
    optimizer.step()
    return loss.detach()


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
        rows_at_once = min(64, max(1, setting.step_tokens // task.length))
        pieces = [RecallBatch(*part) for part in zip(*(tensor.split(rows_at_once) for tensor in batch), strict=True)]
        right = torch.cat([(answers(model, x, setting.autocast).argmax(-1) == x.values).sum(1) for x in pieces])
        samples = np.stack([right.cpu().numpy(), np.full(rows, task.pairs)], axis=1).astype(float)
        figure = estimate(samples)
        found[str(task)] = {"accuracy": figure.value, "error": figure.error}
    return found


def windows(model: nn.Module, setting: Setting) -> dict[str, list[float]]:
    """Each layer's window by head, in tokens, over sequences of the longest training task."""
    task = setting.train[-1]
    generator = np.random.default_rng([VALIDATION, task.length, task.pairs])
    ids = recall_batch(task, setting.vocab, setting.validation_rows, generator).ids.numpy()
    if isinstance(model, PalimpsaDForCausalLM):
        layers = _forgetting_of_d(model, torch.from_numpy(ids))
    else:
        layers = measure_forgetting(model, list(ids), batch_size=64, calibrate=False)
    return {str(layer.layer): list(layer.head_window) for layer in layers}


@torch.no_grad()
def _forgetting_of_d(model: PalimpsaDForCausalLM, ids: Tensor) -> list[LayerProfile]:
    """As `measure_forgetting`, for a layer that has its step sizes from a projection of their own; `ids` all real."""
    mixers = [module for module in model.modules() if isinstance(module, PalimpsaDMixer)]
    sums, training, device = [], model.training, model.get_input_embeddings().weight.device
    model.eval()
    with contextlib.ExitStack() as hooks:
        for mixer in mixers:
            sums.append(ForgettingSums(mixer, calibrate=False))
            hooks.callback(mixer.dt_proj.register_forward_hook(_watch(mixer, sums[-1])).remove)
        for rows in ids.split(64):
            model.get_decoder()(input_ids=rows.to(device), use_cache=False)
    model.train(training)
    return [found.result(mixer.layer_idx) for mixer, found in zip(mixers, sums, strict=True)]


def _watch(mixer: PalimpsaDMixer, sums: ForgettingSums) -> Callable[..., None]:
    def watch(module: nn.Module, inputs: tuple[Tensor, ...], raw: Tensor) -> None:
        sums.add(mixer.step_size(raw), mixer.decay_rate())

    return watch


def environment(device: str) -> dict[str, Any]:
    """What the times belong to."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return {"device": f"{device} ({name})", "threads": torch.get_num_threads(), "torch": torch.__version__}


def _to(batch: RecallBatch, device: str) -> RecallBatch:
    return RecallBatch(*(tensor.to(device) for tensor in batch))
