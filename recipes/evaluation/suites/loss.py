"""Loss and perplexity at several lengths: the same text each time, cut shorter or longer."""

from __future__ import annotations

import numpy as np

from .suite import EvalOptions, EvalText, Measurement, Subject, SuiteResult


def run(subject: Subject, text: EvalText, options: EvalOptions) -> SuiteResult:
    """Mean next-token loss over sequences of each length, in nats per token, and its exponential."""
    found, notes = [], []
    for length in options.lengths:
        notes += text.shortfall(length)
        losses = subject.losses(text, length, options.chunk)
        actual = len(losses[0]) + 1
        if any(row.at["length"] == actual for row in found):
            continue  # the whole text stands for every longer sequence
        samples = np.array([(sequence.sum(), len(sequence)) for sequence in losses])
        at = {"length": actual}
        found.append(Measurement("loss", "nats", samples, at, "lower"))
        found.append(Measurement("perplexity", "tokens", samples, at, "lower", exponential=True))
    return SuiteResult(found, notes)
