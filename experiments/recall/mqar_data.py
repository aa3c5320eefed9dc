"""Multi-query associative recall (MQAR), the synthetic task of Zoology (Arora et al. 2023, arXiv 2312.04927).

    k1 v1 k2 v2 ... kn vn | r k2 r r k1 r ... kn r r

Keys come from the lower half of the vocabulary, values from the upper half, each without repeats. After the pairs
every key is asked for once; the gap between pairs and question follows a power law, so that most questions come early
and some late. Where nothing is asked there are random tokens r of the whole vocabulary. At a question the value is the
target, and it is not shown afterwards. Written from the public description.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from palimpsa_surgery.base.errors import UsageError
from torch import Tensor

POWER = 0.01
"""The a of the law p(slot) ~ a slot^(a - 1) over the slots after the pairs, as in the benchmark."""

FIRST_KEY = 1
"""Token 0 is no key, as in the benchmark."""


@dataclass(frozen=True)
class Task:
    """Sequences of `length` tokens with `pairs` keys and values; all of them are asked for."""

    length: int
    pairs: int

    def __str__(self) -> str:
        return f"{self.length}/{self.pairs}"


class RecallBatch(NamedTuple):
    """Sequences and their questions.

    Attributes:
        ids: [rows, length] tokens.
        positions: [rows, pairs] where each key is asked for, in the order of the pairs.
        values: [rows, pairs] the token that is due there.
    """

    ids: Tensor
    positions: Tensor
    values: Tensor


def recall_batch(task: Task, vocab: int, rows: int, generator: np.random.Generator) -> RecallBatch:
    """Draws `rows` sequences.

    Raises:
        UsageError: the vocabulary has too few keys, or the sequence no room to ask for all of them.
    """
    length, pairs, half = task.length, task.pairs, vocab // 2
    slots = (length - 2 * pairs) // 2
    if pairs > half - FIRST_KEY or slots < pairs:
        raise UsageError(
            f"task {task}: {pairs} pairs need at least {4 * pairs} tokens and a vocabulary of "
            f"{2 * (pairs + FIRST_KEY)}, there are {length} and {vocab}; take fewer pairs"
        )
    keys = _distinct(rows, pairs, half - FIRST_KEY, generator) + FIRST_KEY
    values = _distinct(rows, pairs, vocab - half, generator) + half
    ids = generator.integers(0, vocab, (rows, length))
    ids[:, 0 : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2] = keys, values
    positions = 2 * pairs + 2 * _gaps(rows, pairs, slots, generator)
    np.put_along_axis(ids, positions, keys, axis=1)
    return RecallBatch(*(torch.from_numpy(array) for array in (ids, positions, values)))


def _distinct(rows: int, count: int, of: int, generator: np.random.Generator) -> np.ndarray:
    """[rows, count] different numbers below `of` in each row, in random order."""
    smallest = generator.random((rows, of)).argpartition(count - 1, axis=1)[:, :count]
    return generator.permuted(smallest, axis=1)  # a partition is not in random order


def _gaps(rows: int, count: int, slots: int, generator: np.random.Generator) -> np.ndarray:
    """[rows, count] different slots in each row, drawn one after the other with the power law's weights.

    The largest `count` of log weight + Gumbel noise are distributed as draws without replacement, the first first.
    """
    log_weight = (POWER - 1) * np.log(np.arange(1, slots + 1))
    noise = generator.gumbel(size=(rows, slots))
    return (log_weight + noise).argsort(axis=1)[:, ::-1][:, :count]
