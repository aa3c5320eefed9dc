"""Multi-query associative recall: key-value pairs of tokens early in the sequence, every key asked for later.

    k1 v1 k2 v2 ... | running text of `distance` tokens | k5 v5 k2 v2 ...

After each asked key the model has to give its value, which it is then told. Nothing is trained: keys and values are
tokens that the model knows and that are rare or absent in the text between, paired at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ....base.statistics import Figure
from .plots import Line, draw_lines
from .streaming import stream_logits
from .suite import EvalOptions, EvalText, Measurement, Subject, SuiteResult, generator_for


def recall_sequence(
    text: EvalText, pairs: int, distance: int, number: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A sequence of 4 pairs + distance tokens, after what the tokenizer puts at the start of a text.

    Returns:
        The token ids, the values [pairs] in the order asked, and the positions [pairs] after which they are due.
    """
    generator = generator_for(seed, pairs, distance, number)
    filler = text.filler(distance, number)
    drawn = text.rare_tokens(2 * pairs, filler, generator).reshape(pairs, 2)
    asked = drawn[generator.permutation(pairs)]
    ids = np.concatenate([text.opening, drawn.ravel(), filler, asked.ravel()])
    return ids, asked[:, 1], len(text.opening) + 2 * pairs + distance + 2 * np.arange(pairs)


def run(subject: Subject, text: EvalText, options: EvalOptions) -> SuiteResult:
    """Accuracy by number of pairs and distance; samples are sequences.

    `accuracy` takes the likeliest of the sequence's values (guessing gives 1/pairs), `exact` the likeliest of all
    tokens.
    """
    found = []
    for pairs in options.pairs:
        for distance in (0, *options.lengths):
            right = _hits(subject, text, options, pairs, distance)
            at = {"pairs": pairs, "distance": distance}
            for name, column, chance in (("accuracy", 0, 1 / pairs), ("exact", 1, 0.0)):
                samples = np.stack([right[:, column], np.full(len(right), pairs)], axis=1)
                found.append(Measurement(name, "fraction", samples, at, "higher", chance))
    return SuiteResult(found)


def _hits(subject: Subject, text: EvalText, options: EvalOptions, pairs: int, distance: int) -> np.ndarray:
    """[trials, 2] queries of each sequence that were answered right, among its values and among all tokens."""
    made = [recall_sequence(text, pairs, distance, number, options.seed) for number in range(options.trials)]
    rows = max(1, options.chunk // len(made[0][0]))
    hits = []
    for start in range(0, len(made), rows):
        group = made[start : start + rows]
        ids, values = subject.tensor(np.stack([m[0] for m in group])), subject.tensor(np.stack([m[1] for m in group]))
        logits = stream_logits(subject.model, ids, group[0][2], options.chunk)
        # [B, queries, candidates]: the values of the sequence in the order asked, so the right one is on the diagonal.
        among = torch.gather(logits, 2, values.unsqueeze(1).expand(-1, pairs, -1)).argmax(-1)
        expected = torch.arange(pairs, device=among.device)
        found = torch.stack([(among == expected).sum(1), (logits.argmax(-1) == values).sum(1)], dim=1)
        hits.append(found.cpu().numpy())
    return np.concatenate(hits).astype(float)


def draw(rows: Sequence, names: Sequence[str], path: Path) -> None:
    """Accuracy against distance, a line for each model and number of pairs."""
    rows = [row for row in rows if row.name == "accuracy"]
    lines = []
    for shade, pairs in enumerate(sorted({row.at["pairs"] for row in rows})):
        these = [row for row in rows if row.at["pairs"] == pairs]
        distances = [row.at["distance"] + 1 for row in these]
        for index, name in enumerate(names):
            line = Line.of(f"{name}, {pairs} pairs", distances, [row.figures[index] for row in these])
            lines.append(line._replace(color=index, dash=shade))
        chance = [Figure(row.chance, None) for row in these]
        lines.append(Line.of("guessing" if not shade else None, distances, chance)._replace(color=None, dash=shade))
    draw_lines(
        path,
        lines,
        title="Associative recall",
        x="tokens between pairs and questions, plus 1",
        y="accuracy",
        log_x=True,
        y_limits=(-0.03, 1.03),
    )
