"""How far to trust a figure: bootstrap errors of ratios, and of differences between two models on the same samples."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_RESAMPLES = 2000
_CHUNK = 1 << 22
"""Numbers drawn at a time, so that many samples do not take much memory."""


class Figure(NamedTuple):
    """A value and its standard error; the error is None when a single sample (or none) says nothing about it."""

    value: float
    error: float | None


def estimate(samples: np.ndarray, *, exponential: bool = False, seed: int = 0) -> Figure:
    """sum(samples[:, 0]) / sum(samples[:, 1]) and its bootstrap error over rows.

    Args:
        samples: [n, 2], a sum and its weight in each row (losses and targets, hits and questions, tokens and seconds).
        exponential: of exp of the ratio, as for a perplexity.
        seed: of the resampling.
    """
    value = float(_ratio(samples.sum(axis=0), exponential))
    if len(samples) < 2:
        return Figure(value, None)
    return Figure(value, float(np.std(_resampled(samples, exponential, seed), ddof=1)))


def difference(
    first: np.ndarray, second: np.ndarray, *, exponential: bool = False, paired: bool = True, seed: int = 0
) -> Figure:
    """The figure of `second` less that of `first`, the source, with the bootstrap error of the difference.

    Args:
        first: [n, 2] as for `estimate`.
        second: [n, 2]; when `paired`, row i is of the same window, sequence or question as row i of `first`. The same
            rows are then drawn for both, so that what makes a window hard for both models cancels.
        exponential: as for `estimate`.
        paired: false when the rows have nothing to do with each other, as with timings.
        seed: of the resampling.
    """
    value = float(_ratio(second.sum(axis=0), exponential) - _ratio(first.sum(axis=0), exponential))
    if min(len(first), len(second)) < 2:
        return Figure(value, None)
    draws = _resampled(second, exponential, seed if paired else seed + 1) - _resampled(first, exponential, seed)
    return Figure(value, float(np.std(draws, ddof=1)))


def _ratio(sums: np.ndarray, exponential: bool) -> np.ndarray:
    ratio = sums[..., 0] / sums[..., 1]
    return np.exp(np.minimum(ratio, 700.0)) if exponential else ratio


def _resampled(samples: np.ndarray, exponential: bool, seed: int) -> np.ndarray:
    """The ratio of each resample; the same rows are drawn for equal numbers of rows and equal seeds."""
    count = len(samples)
    generator = np.random.Generator(np.random.PCG64(seed))
    step = max(1, _CHUNK // count)
    pieces = []
    for start in range(0, _RESAMPLES, step):
        rows = generator.integers(0, count, (min(step, _RESAMPLES - start), count))
        pieces.append(_ratio(samples[rows].sum(axis=1), exponential))
    return np.concatenate(pieces)
