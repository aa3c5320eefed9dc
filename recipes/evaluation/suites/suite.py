"""The suites of `palimpsa evaluate`, and what they share. A new suite is one file and its name in `SUITES`.

A suite's module offers `run(subject, text, options) -> SuiteResult`, called once a model, and, when it has a picture,
`draw(rows, names, path)` for the rows of the report. What it measures are ratios over samples, so that errors,
differences and the table need to know nothing of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from ....base.console import counted
from ....base.errors import DataError, EvaluationError, UsageError
from ....base.text import opening_ids, token_sequences
from .streaming import stream_losses

SUITES = ("loss", "positions", "recall", "needle", "speed", "importance")
_SPREAD, _MOST_READ = 8, 1 << 20
"""Blocks of text come from so many times as much, unless that is more than so many tokens."""


def suite_module(name: str) -> ModuleType:
    """The module of a suite; `UsageError` for a name that is not in `SUITES`."""
    if name not in SUITES:
        raise UsageError(f"suite {name!r} does not exist; expected some of {', '.join(SUITES)}")
    return importlib.import_module(f".{name}", __package__)


@dataclass(frozen=True)
class EvalOptions:
    """How much is measured.

    Attributes:
        lengths: tokens of a sequence, for every suite; the longest is the one that positions are counted in.
        tokens: of text, at each length, for the losses.
        seed: of the choice of text, and of everything drawn.
        trials: sequences for each setting of a probe.
        pairs: key-value pairs of the recall probe.
        depths: where the needle is put, 0 the beginning and 1 the end.
        chunk: tokens of a forward pass; longer sequences go through the cache in pieces.
        repeats: timings of each speed.
        decode_tokens: tokens of a timing of decoding.
    """

    lengths: tuple[int, ...] = (512, 2048)
    tokens: int = 16384
    seed: int = 0
    trials: int = 4
    pairs: tuple[int, ...] = (4, 16)
    depths: tuple[float, ...] = (0.0, 0.5, 1.0)
    chunk: int = 2048
    repeats: int = 3
    decode_tokens: int = 32

    def __post_init__(self) -> None:
        for name in ("lengths", "pairs", "depths"):
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))
            if not getattr(self, name):
                raise UsageError(f"{name} is empty, expected at least one number")
        if self.lengths[0] < 2:
            count = counted(self.lengths[0], "token")
            raise UsageError(f"lengths: a sequence of {count} predicts nothing; give 2 or more")
        if self.pairs[0] < 2:
            count = counted(self.pairs[0], "pair")
            raise UsageError(f"pairs: {count} would leave nothing to choose from; give 2 or more")
        if self.depths[0] < 0 or self.depths[-1] > 1:
            raise UsageError(f"depths: {self.depths} must lie between 0 (the beginning) and 1 (the end)")
        for name in ("trials", "chunk", "repeats", "decode_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}, expected at least 1")

    @property
    def longest(self) -> int:
        return self.lengths[-1]


@dataclass(frozen=True)
class Measurement:
    """One figure of one model: sum(samples[:, 0]) / sum(samples[:, 1]).

    Attributes:
        name: what it is; together with `at` it is unique in its suite.
        unit: of the value.
        samples: [n, 2], a sum and its weight each; row i is of the same text for every model unless not `paired`.
        at: where it was taken (length, depth, layer, ...).
        better: which direction is an improvement, if either is.
        chance: what guessing would give.
        exponential: the value is exp of the ratio.
        paired: whether samples of two models belong together.
        detail: only for the file and the pictures, left out of the table.
        error: of a figure that comes with its own; otherwise it is bootstrapped from the samples.
    """

    name: str
    unit: str
    samples: np.ndarray
    at: Mapping[str, float | int] = field(default_factory=dict)
    better: Literal["lower", "higher"] | None = None
    chance: float | None = None
    exponential: bool = False
    paired: bool = True
    detail: bool = False
    error: float | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.name, *self.at.items())


class SuiteResult(NamedTuple):
    """What a suite measured of one model, and what a reader should know about it."""

    measurements: Sequence[Measurement]
    notes: Sequence[str] = ()


class EvalText:
    """The text of an evaluation, cut into sequences of any length; the same for every model.

    It is taken in blocks of the longest length from all over the data: sequences of one document are no independent
    samples. Shorter sequences are cut from the same blocks.

    Args:
        data: as for `base.text.iter_documents`.
        tokenizer: of the models.
        longest: tokens of a block.
        tokens: how many to take, at least one block.
        seed: of the order of the documents.
        vocab_size: rows of the smallest embedding.
    """

    def __init__(
        self, data: str | Path | None, tokenizer: Any, *, longest: int, tokens: int, seed: int, vocab_size: int
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.seed = seed
        self._source, self._tokens, self._longest = data, max(tokens, longest), longest

    @cached_property
    def _blocks(self) -> list[np.ndarray]:
        spread = max(1, min(_SPREAD, _MOST_READ // self._tokens))
        return token_sequences(
            self._source,
            self.tokenizer,
            tokens=self._tokens,
            seq_len=self._longest,
            seed=self.seed,
            vocab_size=self.vocab_size,
            spread=spread,
        )[0]

    @cached_property
    def opening(self) -> np.ndarray:
        """What the tokenizer puts at the start of a text; a probe starts so, too."""
        return np.asarray(opening_ids(self.tokenizer), np.int64)

    @cached_property
    def stream(self) -> np.ndarray:
        """All of the text in one piece."""
        return np.concatenate(self._blocks)

    def sequences(self, length: int) -> list[np.ndarray]:
        """Sequences of `length` tokens, at most the longest; one shorter sequence when the text does not fill one."""
        size = len(self._blocks[0])
        if length > size:
            return self._blocks[:1]
        return [block[i : i + length] for block in self._blocks for i in range(0, size - length + 1, length)]

    def shortfall(self, length: int) -> list[str]:
        """A note where those of `sequences` are shorter than asked for."""
        actual = len(self.sequences(length)[0])
        if actual == length:
            return []
        return [f"the text does not fill a sequence of {length} tokens; one of {actual} was used instead"]

    def filler(self, length: int, number: int) -> np.ndarray:
        """`length` tokens of running text, another part of it for each `number` as far as it goes round.

        Raises:
            DataError: the text is shorter than that.
        """
        if not length:
            return np.empty(0, np.int64)
        if len(self.stream) < length:
            count = counted(len(self.stream), "token")
            raise DataError(f"the text holds {count}, fewer than the {length:,} asked for; give more --data")
        return np.roll(self.stream, -((number * length) % len(self.stream)))[:length]

    def rare_tokens(self, count: int, around: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """`count` different tokens of the text that are absent in `around`, or rarest where too few are absent.

        They occur in the text, so the model knows them; special tokens are never among them.

        Raises:
            DataError: the text has fewer different tokens.
        """
        known = np.setdiff1d(self.stream, self.tokenizer.all_special_ids)
        if len(known) < count:
            raise DataError(
                f"the text has {len(known)} different tokens, too few to draw {count}; give more --tokens or --data"
            )
        uses = np.bincount(around, minlength=self.vocab_size)[known]
        order = np.lexsort((generator.random(len(known)), uses))
        return generator.permutation(known[order[:count]])


class Subject:
    """A model under evaluation.

    Args:
        model: a causal LM in eval mode.
        name: how errors call it.
    """

    def __init__(self, model: Any, name: str) -> None:
        self.model = model
        self.name = name
        self._losses: dict[int, list[np.ndarray]] = {}

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def tensor(self, ids: np.ndarray) -> torch.Tensor:
        """Token ids on the model's device."""
        return torch.from_numpy(np.ascontiguousarray(ids)).to(self.device)

    def losses(self, text: EvalText, length: int, chunk: int) -> list[np.ndarray]:
        """The loss of every target of every sequence of `length` tokens; each [T - 1]; computed once.

        Raises:
            EvaluationError: one is not finite.
        """
        if length not in self._losses:
            sequences = text.sequences(length)
            found: list[np.ndarray] = []
            rows = max(1, chunk // len(sequences[0]))
            for start in range(0, len(sequences), rows):
                ids = self.tensor(np.stack(sequences[start : start + rows]))
                found += list(stream_losses(self.model, ids, chunk).double().numpy())
            self._check(found, length)
            self._losses[length] = found
        return self._losses[length]

    def _check(self, losses: list[np.ndarray], length: int) -> None:
        for number, values in enumerate(losses):
            if not np.isfinite(values).all():
                position = int(np.argmin(np.isfinite(values)))
                raise EvaluationError(
                    f"{self.name}: the loss is not finite in sequence {number} of {length} tokens, first at token "
                    f"{position + 1}; look for weights that are not finite, or try --dtype float32"
                )


def generator_for(seed: int, *numbers: int) -> np.random.Generator:
    """Random numbers that depend on the seed and on the setting only, so that every model meets the same questions."""
    return np.random.Generator(np.random.PCG64([seed, *numbers]))
