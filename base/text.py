"""Text for measuring, training and evaluating: read, tokenized, cut into sequences, always in the same way.

Documents are read in the order of the files, shuffled with a seed, joined and cut into sequences of equal length. Each
begins with what the tokenizer itself puts at the start of a text, and ends with its end-of-text token. The result
depends on the text, the seed and the lengths, on nothing else.
"""

from __future__ import annotations

import logging
import os
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .console import counted
from .errors import CheckpointError, DataError, UsageError
from .records import ASSETS, EMBEDDED_TEXT, iter_records, looks_like_path, records_of_file

logger = logging.getLogger(__name__)

EMBEDDED_CHECKPOINT = "embedded:mamba2-docs-1m"
_MOST_DIGITS = 18
_POOL_CHARACTERS = 64 << 20
"""Of a larger text only the first 64 Mi characters are shuffled: a sequence needs no more, and memory has an end."""
PIECE_CHARACTERS = 1 << 20
"""A longer document is tokenized in pieces, so that memory has an end."""


def embedded_checkpoint_path() -> Path:
    """A small, really pretrained Mamba2 in mamba_ssm's own layout: what `palimpsa demo` works on."""
    return ASSETS / "mamba2-docs-1m"


def data_name(data: str | Path | None) -> str:
    """How outputs name the text: the embedded one, a file's name without its folder, or a dataset's id."""
    if data is None or str(data) == EMBEDDED_TEXT:
        return EMBEDDED_TEXT
    path = os.path.expanduser(data)
    return os.path.basename(os.path.realpath(path)) if os.path.exists(path) or looks_like_path(data) else str(data)


def iter_documents(data: str | Path | None = None, *, longest: int | None = None) -> Iterator[str]:
    """The documents of a file, a folder of files, a dataset of the Hub, or (None) the embedded text.

    Files: `.jsonl` (an object with `text`, or a string, on each line), `.json` (a list of such, or one), `.txt` (one
    document), each of them with `.gz` too, and `.parquet` (a column `text`; needs pyarrow). A dataset is `owner/name`,
    optionally `owner/name:config:split`, and needs the package `datasets`.

    Args:
        data: what to read.
        longest: characters of a `.txt` after which it is cut; None reads it whole.

    Raises:
        DataError: what cannot be read, as `file:line`.
        UsageError: an empty name.
    """
    records = iter_records(EMBEDDED_TEXT if data is None else data, longest=longest)
    yield from _texts(records, data_name(data))


def documents_of_file(path: Path, *, most_bytes: int | None = None) -> Iterator[str]:
    """The documents of one file; arguments and errors as for `base.records.records_of_file`."""
    yield from _texts(records_of_file(path, most_bytes=most_bytes), str(path))


def _texts(records: Iterable[tuple[str, Any]], name: str) -> Iterator[str]:
    found = False
    for where, value in records:
        text = _field(value, where)
        if text.strip():
            found = True
            yield text
    if not found:
        raise DataError(f"{name}: holds no text; give a file with at least one document")


def _field(value: Any, where: str) -> str:
    text = value.get("text") if isinstance(value, dict) else value
    if isinstance(text, str):
        return text
    if not isinstance(value, dict):
        found = f"a {type(value).__name__}"
    elif "text" in value:
        found = f'a {type(text).__name__} as "text"' if text is not None else 'null as "text"'
    else:
        found = f"keys {', '.join(value)}"
    if isinstance(value, dict) and "messages" in value:
        found += " (conversations are trained on with data.chat=true)"
    raise DataError(f'{where}: has {found}; expected a string, or an object with the string "text"')


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """`512,2048` as numbers; `UsageError` names the option."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f"{option} {text}: expected whole numbers with commas between them, such as 512,2048")
    longest = max(map(len, parts))
    if longest > _MOST_DIGITS:
        raise UsageError(f"{option} {text[:12]}...: has a number of {longest:,} digits; give smaller ones")
    return tuple(int(part) for part in parts)


def opening_ids(tokenizer: Any) -> list[int]:
    """What a tokenizer itself puts at the start of a text, such as a BOS token: each document and prompt starts so.

    What it adds at the end is left out: a document ends with the end-of-text token, and a prompt goes on.
    """
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a", add_special_tokens=True)["input_ids"]
    starts = (start for start in range(len(whole)) if whole[start : start + len(plain)] == plain)
    return whole[: next(starts, 0)]


def tokenize_documents(
    documents: Iterable[str], tokenizer: Any, *, limit: int | None = None, **options: Any
) -> Iterator[list[int]]:
    """The token ids of each document, after what the tokenizer itself puts at the start of one.

    Args:
        documents: the texts.
        tokenizer: of the model.
        limit: a document longer than one piece is not tokenized beyond so many tokens.
        options: of the tokenizer's call.
    """
    opening = opening_ids(tokenizer)
    for document in documents:
        ids = [*opening]
        for piece in _pieces(document):
            ids += tokenizer(piece, add_special_tokens=False, verbose=False, **options)["input_ids"]
            if limit is not None and len(ids) >= limit:
                break
        yield ids


def _pieces(document: str) -> Iterator[str]:
    """A long document cut before a single space or after a line end, where the tokens of nearly all tokenizers end."""
    start = 0
    while len(document) - start > PIECE_CHARACTERS:
        stop = start + PIECE_CHARACTERS
        near = max(start + 1, stop - 4096)
        border = next(re.finditer(r"(?<=\S)(?= \S)|(?<=\n)(?=\S)", document[near:stop]), None)
        stop = near + border.start() if border else stop
        yield document[start:stop]
        start = stop
    yield document[start:]


def token_sequences(
    data: str | Path | None,
    tokenizer: Any,
    *,
    tokens: int = 65536,
    seq_len: int = 2048,
    seed: int = 0,
    vocab_size: int | None = None,
    spread: int = 1,
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Sequences of `seq_len` tokens, `tokens` in all, of the documents joined with the end-of-text token.

    A text that is too short gives fewer sequences, and a single shorter one when it does not fill one.

    Args:
        data: as for `iter_documents`.
        tokenizer: of the model.
        tokens: how many to take in all, at least `seq_len`; rounded down to whole sequences.
        seq_len: tokens per sequence.
        seed: of the order of the documents.
        vocab_size: rows of the model's embedding; an id outside them is an error.
        spread: the sequences are taken at equal distances from so many times as much text (or what there is of it), so
            that a few sequences do not all come from one long document.

    Returns:
        The sequences, int64 arrays, and what outputs record about them: data, tokens, seq_len, windows (their number),
        seed.
    """
    if seq_len < 2:
        raise UsageError(
            f"a sequence of {counted(seq_len, 'token')} holds nothing to predict; give --seq-len 2 or more"
        )
    if tokens < seq_len:
        raise UsageError(
            f"{counted(tokens, 'token')} cannot fill one sequence of {seq_len:,}; raise --tokens or lower --seq-len"
        )
    count = tokens // seq_len
    stream = _token_stream(
        _shuffled(iter_documents(data, longest=_POOL_CHARACTERS), seed), tokenizer, count * seq_len * spread
    )
    if vocab_size is not None and len(stream) and stream.max() >= vocab_size:
        raise CheckpointError(
            f"the tokenizer gives the id {stream.max()} but the model's embedding has {vocab_size} rows; "
            f"use the tokenizer that the model was trained with"
        )
    if len(stream) < 2:
        count = counted(len(stream), "token")
        raise DataError(f"{data_name(data)}: holds {count}, too few to measure or predict anything")
    sequences = [stream[i : i + seq_len] for i in range(0, len(stream) - seq_len + 1, seq_len)] or [stream]
    if len(sequences) > count:
        sequences = [sequences[index * len(sequences) // count] for index in range(count)]
    total = sum(len(sequence) for sequence in sequences)
    if total < count * seq_len:
        logger.warning("%s holds only %d tokens in whole sequences, %d were asked for", data_name(data), total, tokens)
    return sequences, {
        "data": data_name(data),
        "tokens": total,
        "seq_len": len(sequences[0]),
        "windows": len(sequences),
        "seed": seed,
    }


def _shuffled(documents: Iterable[str], seed: int) -> list[str]:
    pool, size = [], 0
    for document in documents:
        pool.append(document)
        size += len(document)
        if size >= _POOL_CHARACTERS:
            break
    random.Random(seed).shuffle(pool)
    return pool


def _token_stream(documents: Iterable[str], tokenizer: Any, limit: int) -> np.ndarray:
    ids: list[int] = []
    separator = tokenizer.eos_token_id
    for document in tokenize_documents(documents, tokenizer, limit=limit):
        ids.extend(document)
        if separator is not None:
            ids.append(separator)
        if len(ids) >= limit:
            break
    return np.asarray(ids[:limit], dtype=np.int64)
