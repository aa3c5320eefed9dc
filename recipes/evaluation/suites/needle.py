"""Passkey retrieval: a key hidden in running text at some depth, asked for at the end. In tokens, for any tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ....base.errors import UsageError
from .plots import draw_grids
from .streaming import stream_logits
from .suite import EvalOptions, EvalText, Measurement, Subject, SuiteResult, generator_for

CUE = "\nThe pass key is"
KEY_TOKENS = 4
_LEAST_FILLER = 8


def needle_sequence(
    text: EvalText, length: int, depth: float, number: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """A prompt of `length` tokens: running text with the cue and the key in it, then the cue and the key again.

    Returns:
        The token ids, and the key, which is their end too.

    Raises:
        UsageError: the length leaves no room for text.
    """
    cue = np.asarray(text.tokenizer(CUE, add_special_tokens=False)["input_ids"], np.int64)
    room = length - len(text.opening) - 2 * (len(cue) + KEY_TOKENS)
    if not len(cue) or room < _LEAST_FILLER:
        raise UsageError(
            f"lengths: {length} tokens hold no needle; give at least {length - room + _LEAST_FILLER} to this suite"
        )
    filler = text.filler(room, number)
    generator = generator_for(seed, length, round(depth * 1000), number)
    key = text.rare_tokens(KEY_TOKENS, filler, generator)
    place = round(depth * room)
    return np.concatenate([text.opening, filler[:place], cue, key, filler[place:], cue, key]), key


def run(subject: Subject, text: EvalText, options: EvalOptions) -> SuiteResult:
    """For each length and depth: tokens of the key that come out right, and their loss; samples are prompts.

    The key is given token by token, so a key counts fully exactly when greedy decoding would write all of it.
    """
    found = []
    for length in options.lengths:
        for depth in options.depths:
            hits, nats = _answers(subject, text, options, length, depth)
            at = {"length": length, "depth": depth}
            weights = np.full(len(hits), KEY_TOKENS)
            found.append(Measurement("accuracy", "fraction", np.stack([hits, weights], 1), at, "higher", 0.0))
            found.append(Measurement("key loss", "nats", np.stack([nats, weights], 1), at, "lower"))
    return SuiteResult(found)


def _answers(
    subject: Subject, text: EvalText, options: EvalOptions, length: int, depth: float
) -> tuple[np.ndarray, np.ndarray]:
    """Right tokens of the key, and the sum of their losses, of each prompt."""
    made = [needle_sequence(text, length, depth, number, options.seed) for number in range(options.trials)]
    rows = max(1, options.chunk // length)
    due = np.arange(length - KEY_TOKENS - 1, length - 1)
    hits, nats = [], []
    for start in range(0, len(made), rows):
        group = made[start : start + rows]
        ids, keys = subject.tensor(np.stack([m[0] for m in group])), subject.tensor(np.stack([m[1] for m in group]))
        logits = stream_logits(subject.model, ids, due, options.chunk)
        likelihood = torch.gather(logits.log_softmax(-1), 2, keys.unsqueeze(-1)).squeeze(-1)
        hits.append((logits.argmax(-1) == keys).sum(1).cpu().numpy())
        nats.append(-likelihood.double().sum(1).cpu().numpy())
    return np.concatenate(hits).astype(float), np.concatenate(nats)


def draw(rows: Sequence, names: Sequence[str], path: Path) -> None:
    """A grid of depth by length for each model: accuracy above, loss of the key below."""
    lengths = sorted({row.at["length"] for row in rows})
    depths = sorted({row.at["depth"] for row in rows})
    grids = []
    for kind, colors, limits in (("accuracy", "viridis", (0.0, 1.0)), ("key loss", "magma_r", None)):
        line = []
        for index, name in enumerate(names):
            values = np.full((len(depths), len(lengths)), np.nan)
            for row in rows:
                if row.name == kind:
                    values[depths.index(row.at["depth"]), lengths.index(row.at["length"])] = row.figures[index].value
            line.append((f"{name}: {'accuracy' if kind == 'accuracy' else 'loss of the key (nats)'}", values))
        grids.append((colors, limits, line))
    draw_grids(path, grids, title="Needle", x=("length (tokens)", lengths), y=("depth", [f"{d:.0%}" for d in depths]))
