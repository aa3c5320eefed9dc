"""How much of the held-out text also stands in the training text: runs of tokens that occur in both."""

from __future__ import annotations

import numpy as np

_BASE = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that a power of it never vanishes modulo 2**64."""


def run_hashes(tokens: np.ndarray, length: int) -> np.ndarray:
    """[N - length + 1] a 64-bit hash of every run of `length` tokens; empty for a shorter text."""
    count = len(tokens) - length + 1
    hashes = np.zeros(max(count, 0), np.uint64)
    if count > 0:
        values = tokens.astype(np.uint64) + np.uint64(1)
        for offset in range(length):
            hashes = hashes * _BASE + values[offset : offset + count]
    return hashes


def overlap(train: np.ndarray, held_out: np.ndarray, length: int) -> float:
    """Fraction of the held-out tokens that lie in a run of `length` tokens which the training text also has.

    Args:
        train: [N] token ids.
        held_out: [M] token ids.
        length: of the runs; boilerplate repeats tens of tokens, a copied page hundreds.
    """
    shared = np.isin(run_hashes(held_out, length), run_hashes(train, length))
    covered = np.zeros(len(held_out) + 1, np.int64)
    starts = np.flatnonzero(shared)
    np.add.at(covered, starts, 1)
    np.add.at(covered, starts + length, -1)
    return float((np.cumsum(covered[:-1]) > 0).mean()) if len(held_out) else 0.0
