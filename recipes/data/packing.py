"""Token sequences from a store: an endless, shuffled stream whose every position is known, packed without padding."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from ...base.console import counted
from ...base.errors import DataError
from .documents import TokenStore

IGNORED = -100
_SPLIT_SEED = 0x5EED


@dataclass(frozen=True)
class TokenSequence:
    """One training or evaluation example.

    Attributes:
        input_ids: [T] int64.
        targets: [T] int64, the token that follows each input; `IGNORED` where nothing is to be predicted.
        segments: [T] int32, the number of the document each token belongs to, or None when state runs through.
    """

    input_ids: np.ndarray
    targets: np.ndarray
    segments: np.ndarray | None = None


class TokenStream:
    """The documents of a store one after the other, in an order drawn anew in every epoch, without end.

    The token at any position is a function of the store, the subset, the seed and the position alone: a run resumes
    by remembering one number, and any number of processes read the same stream.

    Args:
        store: tokenized text.
        documents: which of its documents; all by default.
        seed: of the order; None keeps the order of the text.
        reset: documents are kept apart (`segments`, and no prediction across a border).
    """

    def __init__(
        self, store: TokenStore, documents: np.ndarray | None = None, *, seed: int | None = None, reset: bool = True
    ) -> None:
        self.store = store
        self.chosen = np.arange(store.documents) if documents is None else documents
        self.seed = seed
        self.reset = reset
        self.lengths = np.diff(store.offsets)[self.chosen]
        self.length = int(self.lengths.sum())
        if self.length < 2:
            count = counted(self.length, "token")
            raise DataError(f"the text holds {count}, too few to predict anything; give more text")
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def sequence(self, position: int, length: int) -> TokenSequence:
        """The sequence whose first input is the token at `position` of the endless stream.

        Args:
            position: tokens before the sequence, over all epochs.
            length: inputs T; one token more is read for the last target.
        """
        ids = np.empty(length + 1, np.int64)
        trained = np.ones(length + 1, bool)
        segments = np.empty(length + 1, np.int32)
        filled, segment = 0, 0
        while filled < length + 1:
            start, stop = self._document_at(position + filled)
            take = min(stop - start, length + 1 - filled)
            here = slice(filled, filled + take)
            ids[here] = self.store.tokens[start : start + take]
            if self.store.trained is not None:
                trained[here] = self.store.trained[start : start + take] > 0
            segments[here] = segment
            if filled and self.reset:
                trained[filled] = False  # the first token of a document does not follow from the one before
            filled, segment = filled + take, segment + 1
        targets = np.where(trained[1:], ids[1:], IGNORED)
        return TokenSequence(ids[:-1], targets, segments[:-1] if self.reset and segments[-2] > 0 else None)

    def sequences(self, count: int, length: int) -> list[TokenSequence]:
        """At most `count` sequences, spread evenly over one epoch: one long document does not stand for the text.

        No token is in two of them. Fewer when an epoch holds fewer; a single shorter one when it does not fill one.
        """
        available = (self.length - 1) // length
        if not available:
            return [self.sequence(0, self.length - 1)]
        count = min(count, available)
        return [self.sequence(index * available // count * length, length) for index in range(count)]

    def _document_at(self, position: int) -> tuple[int, int]:
        """Where in the store the document at a stream position goes on, and where it ends."""
        epoch, inside = divmod(position, self.length)
        order, ends = self._epoch(epoch)
        index = int(np.searchsorted(ends, inside, side="right"))
        stop = int(self.store.offsets[self.chosen[order[index]] + 1])
        return stop - int(ends[index] - inside), stop

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        if epoch not in self._epochs:
            while len(self._epochs) > 1:
                self._epochs.pop(next(iter(self._epochs)))
            order = np.arange(len(self.chosen))
            if self.seed is not None:
                order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(len(self.chosen))
            self._epochs[epoch] = (order, np.cumsum(self.lengths[order]))
        return self._epochs[epoch]


def split_documents(store: TokenStore, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Documents for training and for validation: the same split at every seed.

    Copies of a document are on one side, and so is all that came from one conversation.

    Raises:
        DataError: one document cannot be split.
    """
    if fraction == 0:
        return np.arange(store.documents), np.empty(0, np.int64)
    records = np.arange(store.documents) if store.records is None else store.records
    starts = np.flatnonzero(np.diff(records, prepend=-1))
    copies = _same_content(store, np.append(starts, store.documents))
    total = len(copies)
    groups, sizes = np.unique(copies, return_counts=True)
    if len(groups) < 2:
        what = "a single document" if total < 2 else f"{total:,} copies of one document"
        raise DataError(f"the text is {what} and cannot be split; give data.val, or set data.val_fraction=0")
    room = min(total - 1, max(1, math.ceil(fraction * total)))
    size = dict(zip(groups.tolist(), sizes.tolist(), strict=True))
    held: set[int] = set()
    for unit in np.random.Generator(np.random.PCG64(_SPLIT_SEED)).permutation(total):
        group = int(copies[unit])
        if group not in held and size[group] <= room:
            held.add(group)
            room -= size[group]
        if not room:
            break
    held = held or {min(size, key=size.__getitem__)}
    out = np.repeat(np.isin(copies, list(held)), np.diff(np.append(starts, store.documents)))
    return np.flatnonzero(~out), np.flatnonzero(out)


def shared_documents(first: TokenStore, second: TokenStore) -> int:
    """How many documents of the second text are in the first, too."""
    known = {_digest(first, index, index + 1) for index in range(first.documents)}
    return sum(_digest(second, index, index + 1) in known for index in range(second.documents))


def _same_content(store: TokenStore, bounds: np.ndarray) -> np.ndarray:
    """For each run of documents between `bounds`, the number of the first one with the same tokens."""
    first: dict[bytes, int] = {}
    runs = enumerate(pairwise(bounds.tolist()))
    return np.array([first.setdefault(_digest(store, start, stop), number) for number, (start, stop) in runs])


def _digest(store: TokenStore, start: int, stop: int) -> bytes:
    """Of the tokens of documents `start` to `stop`."""
    tokens = store.tokens[store.offsets[start] : store.offsets[stop]]
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()


def as_sequence(tokens: TokenSequence | Sequence[int] | np.ndarray) -> TokenSequence:
    """A sequence as it is, or plain token ids as one: all but the last are inputs, all but the first targets."""
    if isinstance(tokens, TokenSequence):
        return tokens
    ids = np.asarray(tokens, np.int64).reshape(-1)
    if len(ids) < 2:
        raise DataError(f"a sequence of {counted(len(ids), 'token')} holds nothing to predict; give at least 2")
    return TokenSequence(ids[:-1], ids[1:])


def collate(sequences: Sequence[TokenSequence], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Of equal length, as `input_ids`, `targets` [B, T] and, when documents are kept apart, `seq_idx` [B, T]."""
    batch = {
        "input_ids": torch.from_numpy(np.stack([s.input_ids for s in sequences])),
        "targets": torch.from_numpy(np.stack([s.targets for s in sequences])),
    }
    if any(s.segments is not None for s in sequences):
        zero = np.zeros_like(sequences[0].input_ids, dtype=np.int32)
        batch["seq_idx"] = torch.from_numpy(np.stack([zero if s.segments is None else s.segments for s in sequences]))
    return {name: tensor.to(device) for name, tensor in batch.items()}


def batches(sequences: Sequence[TokenSequence], size: int) -> Iterator[list[TokenSequence]]:
    """Runs of at most `size` sequences of equal length, in order."""
    run: list[TokenSequence] = []
    for sequence in sequences:
        if run and (len(run) == size or len(run[0].input_ids) != len(sequence.input_ids)):
            yield run
            run = []
        run.append(sequence)
    if run:
        yield run


def sequences_key(sequences: Sequence[TokenSequence]) -> str:
    """sha256 over the ids and targets of sequences: what a loss on them depends on."""
    digest = hashlib.sha256()
    for sequence in sequences:
        for part in (sequence.input_ids, sequence.targets):
            digest.update(np.ascontiguousarray(part, dtype=np.int64).tobytes() + b"|")
    return digest.hexdigest()
