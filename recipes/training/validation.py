"""What a model is worth: its loss on text, with errors that say how far to trust it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...base.console import counted
from ...base.errors import DataError, UsageError
from ...base.statistics import difference, estimate
from ..data.packing import IGNORED, TokenSequence, as_sequence, batches, collate
from .losses import CausalLoss


@dataclass(frozen=True)
class LossResult:
    """Loss over sequences.

    Attributes:
        loss: nats per target, over all targets of all sequences.
        stderr: bootstrap standard error over sequences; zero for a single one, which says nothing about it.
        sequences: how many.
        tokens: targets predicted.
        seq_len: inputs of the longest sequence.
        per_sequence: (sum of losses, targets) of each sequence, for paired comparisons.
    """

    loss: float
    stderr: float
    sequences: int
    tokens: int
    seq_len: int
    per_sequence: tuple[tuple[float, int], ...]

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def to_dict(self) -> dict[str, Any]:
        """For files, in which the number of sequences is called `windows`."""
        return {
            "loss": self.loss,
            "stderr": self.stderr,
            "windows": self.sequences,
            "tokens": self.tokens,
            "seq_len": self.seq_len,
            "perplexity": self.perplexity,
        }


@torch.no_grad()
def evaluate_loss(
    model: nn.Module,
    sequences: Sequence[TokenSequence | Sequence[int] | np.ndarray],
    *,
    batch_size: int = 1,
    precision: str = "no",
    accelerator: Any = None,
) -> LossResult:
    """Mean next-token loss over sequences, in eval mode; the model's mode is put back afterwards.

    Args:
        model: a causal LM, or a `CausalLoss` (prepared by Accelerate or not).
        sequences: of any lengths; plain token ids will do.
        batch_size: sequences of equal length per forward pass.
        precision: "no" or "bf16" autocast, when `model` is a causal LM.
        accelerator: shares the sequences among its processes; every process gets the whole result.
    """
    module = model if isinstance(_unwrapped(model), CausalLoss) else CausalLoss(model, precision=precision)
    ready = [as_sequence(sequence) for sequence in sequences]
    was_training = module.training
    module.eval()
    try:
        results = _per_sequence(module, ready, batch_size, accelerator)
    finally:
        module.train(was_training)
        _reshard(module)
    return summarize(results, max((len(sequence.input_ids) for sequence in ready), default=0))


def _reshard(module: nn.Module) -> None:
    """Puts a sharded model's parameters back. After a forward pass without a backward one FSDP2 leaves those of the
    outermost unit gathered: other objects, which the optimizer and so a checkpoint know nothing of."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _per_sequence(module: nn.Module, sequences: list[TokenSequence], batch_size: int, accelerator: Any) -> np.ndarray:
    """[sequences, 2] sum of losses and number of targets of each sequence, those of other processes included."""
    device = next(module.parameters()).device if accelerator is None else accelerator.device
    processes, mine = (1, 0) if accelerator is None else (accelerator.num_processes, accelerator.process_index)
    results = torch.zeros(len(sequences), 2, dtype=torch.float64)
    groups = list(batches(sequences, batch_size))
    starts = np.cumsum([0, *(len(group) for group in groups)])
    for turn in range(mine, math.ceil(len(groups) / processes) * processes, processes):
        # Sharded models need the same number of passes everywhere: the last group is repeated, and not counted.
        group = groups[min(turn, len(groups) - 1)]
        losses = module(**collate(group, device), per_token=True).double().sum(dim=1)
        if turn < len(groups):
            results[starts[turn] : starts[turn + 1], 0] = losses.cpu()
            counts = [int((sequence.targets != IGNORED).sum()) for sequence in group]
            results[starts[turn] : starts[turn + 1], 1] = torch.tensor(counts, dtype=torch.float64)
    if processes > 1:
        results = accelerator.reduce(results.to(device), "sum").cpu()
    return results.numpy()


def summarize(results: np.ndarray, seq_len: int) -> LossResult:
    """Loss and its bootstrap error from (sum, targets) of each sequence.

    Raises:
        DataError: no sequence has a target, and no loss is none of nothing.
    """
    sequences, results = len(results), results[results[:, 1] > 0]
    if not len(results):
        raise DataError(
            f"nothing is to be predicted in {counted(sequences, 'sequence')}; give longer sequences or other text"
        )
    loss, error = estimate(results)
    per_sequence = tuple((float(total), int(count)) for total, count in results)
    return LossResult(loss, error or 0.0, len(results), int(results[:, 1].sum()), seq_len, per_sequence)


def paired_difference(first: LossResult, second: LossResult) -> tuple[float, float]:
    """Loss of `second` less that of `first` on the same sequences, with the bootstrap error of the difference."""
    a, b = np.asarray(first.per_sequence), np.asarray(second.per_sequence)
    if a.shape != b.shape or (a[:, 1] != b[:, 1]).any():
        raise UsageError(
            "the two losses are not of the same sequences; evaluate both models on the same text and lengths"
        )
    value, error = difference(a, b)
    return value, error or 0.0
