"""What a model is worth: its loss on text, with errors that say how far to trust it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...base.console import counted
from ...base.errors import DataError, UsageError
from ...base.statistics import difference, estimate
from ..data.packing import IGNORED, Window, as_window, batches, collate
from .losses import CausalLoss


@dataclass(frozen=True)
class LossResult:
    """Loss over windows.

    Attributes:
        loss: nats a target, over all targets of all windows.
        stderr: bootstrap standard error over windows; zero for a single window, which says nothing about it.
        windows: how many.
        tokens: targets predicted.
        seq_len: inputs of the longest window.
        per_window: (sum of losses, targets) of each window, for paired comparisons.
    """

    loss: float
    stderr: float
    windows: int
    tokens: int
    seq_len: int
    per_window: tuple[tuple[float, int], ...]

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values.pop("per_window")
        return {**values, "perplexity": self.perplexity}


@torch.no_grad()
def evaluate_loss(
    model: nn.Module,
    windows: Sequence[Window | Sequence[int] | np.ndarray],
    *,
    batch_size: int = 1,
    precision: str = "no",
    accelerator: Any = None,
) -> LossResult:
    """Mean next-token loss over windows, in eval mode; the model's mode is put back afterwards.

    Args:
        model: a causal LM, or a `CausalLoss` (prepared by Accelerate or not).
        windows: windows, or plain token ids, of any lengths.
        batch_size: windows of equal length a forward pass.
        precision: "no" or "bf16" autocast, when `model` is a causal LM.
        accelerator: shares the windows among its processes; every process gets the whole result.
    """
    module = model if isinstance(_unwrapped(model), CausalLoss) else CausalLoss(model, precision=precision)
    ready = [as_window(window) for window in windows]
    was_training = module.training
    module.eval()
    try:
        results = _per_window(module, ready, batch_size, accelerator)
    finally:
        module.train(was_training)
        _reshard(module)
    return summarize(results, max((len(window.input_ids) for window in ready), default=0))


def _reshard(module: nn.Module) -> None:
    """Puts a sharded model's parameters back. After a forward pass without a backward one FSDP2 leaves those of the
    outermost unit gathered: other objects, which the optimizer and so a checkpoint know nothing of."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _per_window(module: nn.Module, windows: list[Window], batch_size: int, accelerator: Any) -> np.ndarray:
    """[windows, 2] sum of losses and number of targets of each window, those of other processes included."""
    device = next(module.parameters()).device if accelerator is None else accelerator.device
    processes, mine = (1, 0) if accelerator is None else (accelerator.num_processes, accelerator.process_index)
    results = torch.zeros(len(windows), 2, dtype=torch.float64)
    groups = list(batches(windows, batch_size))
    starts = np.cumsum([0, *(len(group) for group in groups)])
    for turn in range(mine, math.ceil(len(groups) / processes) * processes, processes):
        # Sharded models need the same number of passes everywhere: the last group is repeated, and not counted.
        group = groups[min(turn, len(groups) - 1)]
        losses = module(**collate(group, device), per_token=True).double().sum(dim=1)
        if turn < len(groups):
            results[starts[turn] : starts[turn + 1], 0] = losses.cpu()
            counts = [int((window.targets != IGNORED).sum()) for window in group]
            results[starts[turn] : starts[turn + 1], 1] = torch.tensor(counts, dtype=torch.float64)
    if processes > 1:
        results = accelerator.reduce(results.to(device), "sum").cpu()
    return results.numpy()


def summarize(results: np.ndarray, seq_len: int) -> LossResult:
    """Loss and its bootstrap error from (sum, targets) of each window.

    Raises:
        DataError: no window has a target, and no loss is none of nothing.
    """
    windows, results = len(results), results[results[:, 1] > 0]
    if not len(results):
        raise DataError(
            f"nothing is to be predicted in {counted(windows, 'window')}; give longer windows or other text"
        )
    loss, error = estimate(results)
    per_window = tuple((float(total), int(count)) for total, count in results)
    return LossResult(loss, error or 0.0, len(results), int(results[:, 1].sum()), seq_len, per_window)


def paired_difference(first: LossResult, second: LossResult) -> tuple[float, float]:
    """Loss of `second` less that of `first` on the same windows, with the bootstrap error of the difference."""
    a, b = np.asarray(first.per_window), np.asarray(second.per_window)
    if a.shape != b.shape or (a[:, 1] != b[:, 1]).any():
        raise UsageError(
            "the two losses are not of the same windows; evaluate both models on the same text and lengths"
        )
    value, error = difference(a, b)
    return value, error or 0.0
