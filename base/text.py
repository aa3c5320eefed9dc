"""Text for measuring, training and evaluating: read, tokenised, cut into windows, always in the same way.

Documents are read in the order of the files, shuffled with a seed, joined with the tokenizer's end-of-text token and
cut into windows of equal length. The result depends on the text, the seed and the lengths, on nothing else.
"""

from __future__ import annotations

import gzip
import json
import logging
import random
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .console import counted, human_bytes
from .errors import CheckpointError, DataError, UsageError
from .files import named_path

logger = logging.getLogger(__name__)

EMBEDDED_TEXT = "embedded:sqlite-docs"
EMBEDDED_CHECKPOINT = "embedded:mamba2-docs-1m"
_ASSETS = Path(__file__).resolve().parent.parent / "assets"
TEXT_SUFFIXES = (".jsonl", ".json", ".txt")
_MOST_DIGITS = 18
_POOL_CHARACTERS = 64 << 20
"""Of a larger text only the first 64 Mi characters are shuffled: a window needs no more, and memory has an end."""


def embedded_text_path() -> Path:
    """The public-domain documentation of SQLite that stands in when no text is given."""
    return _ASSETS / "sqlite-docs.jsonl.gz"


def embedded_checkpoint_path() -> Path:
    """A small, really pretrained Mamba2 in mamba_ssm's own layout: what `palimpsa demo` works on."""
    return _ASSETS / "mamba2-docs-1m"


def data_name(data: str | Path | None) -> str:
    """How outputs name the text: the embedded one, a file's name without its folder, or a dataset's id."""
    if data is None or str(data) == EMBEDDED_TEXT:
        return EMBEDDED_TEXT
    return Path(data).resolve().name if Path(data).exists() or _looks_like_path(data) else str(data)


def iter_documents(data: str | Path | None = None) -> Iterator[str]:
    """The documents of a file, a folder of files, a dataset of the Hub, or (None) the embedded text.

    Files: `.jsonl` (an object with `text`, or a string, on each line), `.json` (a list of such, or one), `.txt` (one
    document), and each of them with `.gz`. A dataset is `owner/name`, optionally `owner/name:config:split`, and needs
    the package `datasets`.

    Raises:
        DataError: what cannot be read, as `file:line`.
        UsageError: an empty name.
    """
    if data is None or str(data) == EMBEDDED_TEXT:
        data = embedded_text_path()
    path = named_path(data, "text")
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and _format(file)]
        if not files:
            raise DataError(f"{path}: holds no {', '.join(TEXT_SUFFIXES)} file (nor .gz of one); choose another --data")
        for file in files:
            yield from documents_of_file(file)
    elif path.is_file():
        yield from documents_of_file(path)
    elif _looks_like_path(data):
        raise DataError(f"{path}: does not exist; give a file, a folder or a dataset's id as --data")
    else:
        yield from _documents_of_dataset(str(data))


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """`512,2048` as numbers; `UsageError` names the option."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f"{option} {text}: expected whole numbers with commas between them, such as 512,2048")
    longest = max(map(len, parts))
    if longest > _MOST_DIGITS:
        raise UsageError(f"{option} {text[:12]}...: has a number of {longest:,} digits; give smaller ones")
    return tuple(int(part) for part in parts)


def _looks_like_path(data: str | Path) -> bool:
    text = str(data)
    return (
        isinstance(data, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1 or bool(_format(Path(text)))
    )


def _format(path: Path) -> str | None:
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    return suffix if suffix in TEXT_SUFFIXES else None


def documents_of_file(path: Path, *, most_bytes: int | None = None) -> Iterator[str]:
    """The documents of one file.

    Args:
        path: of one of the kinds that `iter_documents` reads.
        most_bytes: read no more than so many, decompressed: the whole lines of them in a `.jsonl`.

    Raises:
        DataError: what cannot be read, as `file:line`; a file of another kind that has more than `most_bytes`.
    """
    kind = _format(path)
    if kind is None:
        raise DataError(f"{path}: is of no known kind; expected {', '.join(TEXT_SUFFIXES)} or .gz of one")
    found = False
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as stream:
            for line, content in _pieces(stream, kind, path, most_bytes):
                for text in _texts_of(content, kind, path, line):
                    if text.strip():
                        found = True
                        yield text
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); fetch or write the file again") from error
    if not found:
        raise DataError(f"{path}: holds no text; give a file with at least one document")


def _pieces(stream: Any, kind: str, path: Path, most: int | None) -> Iterator[tuple[int | None, bytes]]:
    if kind == ".jsonl":
        lines = stream if most is None else _first_lines(stream, most)
        yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        return
    content = stream.read() if most is None else stream.read(most + 1)
    if most is not None and len(content) > most:
        raise DataError(f"{path}: has more than {human_bytes(most)}; give it as .jsonl, which is read line by line")
    yield None, content


def _first_lines(stream: Any, most: int) -> Iterator[bytes]:
    """The whole lines among the first `most` bytes."""
    while most > 0 and (line := stream.readline(most)):
        most -= len(line)
        if most > 0 or line.endswith(b"\n"):
            yield line


def _texts_of(content: bytes, kind: str, path: Path, line: int | None) -> list[str]:
    where = f"{path}:{line}" if line else str(path)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not UTF-8 ({error.reason} at byte {error.start}); convert the file") from error
    if kind == ".txt" or not text.strip():
        return [text]
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        where = where if line else f"{path}:{error.lineno}"
        raise DataError(f"{where}: is not JSON ({error.msg}); expected an object with a text") from error
    if kind == ".json" and isinstance(value, list):
        return [_field(item, f"{path}[{index}]") for index, item in enumerate(value)]
    return [_field(value, where)]


def _field(value: Any, where: str) -> str:
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        return value["text"]
    if isinstance(value, str):
        return value
    found = f"keys {', '.join(value)}" if isinstance(value, dict) else f"a {type(value).__name__}"
    raise DataError(f'{where}: has {found}; expected a string, or an object with the string "text"')


def _documents_of_dataset(name: str) -> Iterator[str]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{name}: is no file, and reading it as a dataset of the Hub needs the package datasets; "
            f"install palimpsa-surgery[train]"
        ) from error
    repository, _, rest = name.partition(":")
    config, _, split = rest.rpartition(":")
    try:
        rows = datasets.load_dataset(repository, config or None, split=split or "train", streaming=True)
        for index, row in enumerate(rows):
            yield _field(row, f"{name}[{index}]")
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, DataError):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{name}: is neither a file here nor a dataset that can be loaded ({reason})") from error


def load_tokenizer(source: str | Path, *, revision: str | None = None, token: str | None = None) -> Any:
    """The tokenizer of a model folder or Hub id, as transformers reads it.

    Raises:
        CheckpointError: there is none; the message names the option that gives one.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer_file = named_path(source, "tokenizer") / "tokenizer.json"
    try:
        return AutoTokenizer.from_pretrained(str(source), revision=revision, token=token)
    except Exception as error:  # the reasons differ by release: KeyError, ValueError, OSError, ImportError
        if tokenizer_file.is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file))
        raise CheckpointError(
            f"{source}: holds no tokenizer that transformers can read; give one with --tokenizer, a folder or a Hub id "
            f"(the state-spaces models use EleutherAI/gpt-neox-20b)"
        ) from error


def tokenize_documents(documents: Iterable[str], tokenizer: Any) -> Iterator[list[int]]:
    """The token ids of each document, no special token added."""
    for document in documents:
        yield tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]


def token_windows(
    data: str | Path | None,
    tokenizer: Any,
    *,
    tokens: int = 65536,
    seq_len: int = 2048,
    seed: int = 0,
    vocab_size: int | None = None,
    spread: int = 1,
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Windows of `seq_len` tokens, `tokens` in all, of the documents joined with the end-of-text token.

    A text that is too short gives fewer windows, and a single shorter one when it does not fill one.

    Args:
        data: as for `iter_documents`.
        tokenizer: of the model.
        tokens: how many to take in all, at least `seq_len`; rounded down to whole windows.
        seq_len: tokens a window.
        seed: of the order of the documents.
        vocab_size: rows of the model's embedding; an id outside them is an error.
        spread: the windows are taken at equal distances from so many times as much text (or what there is of it), so
            that a few windows do not all come from one long document.

    Returns:
        The windows, int64 arrays, and what outputs record about them: data, tokens, seq_len, windows, seed.
    """
    if seq_len < 2:
        raise UsageError(f"a window of {counted(seq_len, 'token')} holds nothing to predict; give --seq-len 2 or more")
    if tokens < seq_len:
        raise UsageError(
            f"{counted(tokens, 'token')} cannot fill one window of {seq_len:,}; raise --tokens or lower --seq-len"
        )
    count = tokens // seq_len
    stream = _token_stream(_shuffled(iter_documents(data), seed), tokenizer, count * seq_len * spread)
    if vocab_size is not None and len(stream) and stream.max() >= vocab_size:
        raise CheckpointError(
            f"the tokenizer gives the id {stream.max()} but the model's embedding has {vocab_size} rows; "
            f"use the tokenizer that the model was trained with"
        )
    if len(stream) < 2:
        count = counted(len(stream), "token")
        raise DataError(f"{data_name(data)}: holds {count}, too few to measure or predict anything")
    windows = [stream[i : i + seq_len] for i in range(0, len(stream) - seq_len + 1, seq_len)] or [stream]
    if len(windows) > count:
        windows = [windows[index * len(windows) // count] for index in range(count)]
    total = sum(len(window) for window in windows)
    if total < count * seq_len:
        logger.warning("%s holds only %d tokens in whole windows, %d were asked for", data_name(data), total, tokens)
    return windows, {
        "data": data_name(data),
        "tokens": total,
        "seq_len": len(windows[0]),
        "windows": len(windows),
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
    for document in tokenize_documents(documents, tokenizer):
        ids.extend(document)
        if separator is not None:
            ids.append(separator)
        if len(ids) >= limit:
            break
    return np.asarray(ids[:limit], dtype=np.int64)
