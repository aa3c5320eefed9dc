"""Text to tokens: local files or a `datasets` id, tokenized once, kept in a cache that is memory-mapped afterwards."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...base.console import counted, progress
from ...base.errors import DataError, OutputError
from ...base.files import dump_json, load_json, named_path, output_folder
from ...base.records import CHAT_SUFFIXES, EMBEDDED_TEXT, TEXT_SUFFIXES, data_files, embedded_text_path
from ...base.text import PIECE_CHARACTERS, data_name, iter_documents, opening_ids, tokenize_documents
from ...surgery.checkpoint.tokenizer import probe
from .chat import render_chat
from .conversations import Conversation, iter_conversations

logger = logging.getLogger(__name__)

FORMAT = 1
_CHAT_FORMAT = 3
_BATCH = 256  # documents a call of the tokenizer


@dataclass(frozen=True)
class TokenStore:
    """All documents of a text as one array of token ids.

    Attributes:
        tokens: [N] ids, uint16 or uint32, memory-mapped.
        offsets: [documents + 1] where each document starts: with what the tokenizer itself puts there, such as a BOS
            token. Each ends with the end-of-document token, if there is one.
        trained: [N] 1 where a token is a target of the loss, or None when all are.
        key: sha256 over the text, the tokenizer and what was asked; the same text has the same key on any machine.
        records: [documents] the number of the record each document came from: a conversation may give several. None
            when each is of its own.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    trained: np.ndarray | None
    key: str
    records: np.ndarray | None = None

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1


def open_text(
    source: str | Path | Sequence[str | Path],
    tokenizer: Any,
    *,
    chat: bool = False,
    max_tokens: int | None = None,
    special_tokens: str = "parse",
    cache: str | Path | None = None,
) -> TokenStore:
    """Tokens of a text: from the cache when the same text met the same tokenizer before, else tokenized now.

    Args:
        source: what `base.text.iter_documents` reads (files, folders, `owner/name[:config:split]` of the Hub), or a
            list of these.
        tokenizer: a transformers tokenizer.
        chat: each record is a conversation (`messages`), rendered with the tokenizer's chat template; only the
            assistant's words are targets.
        max_tokens: read no further than the document that reaches this many, of a very long one no further than a
            piece beyond; of a text too long to tokenize whole.
        special_tokens: `parse` makes what is spelled like a special token one; `text` keeps it text, and refuses it in
            conversations, whose template needs the real ones.
        cache: folder of the cache; default `$PALIMPSA_CACHE`, then `$XDG_CACHE_HOME/palimpsa-surgery`.

    Raises:
        DataError: what cannot be read, or holds no text.
    """
    sources = _sources(source)
    as_text = special_tokens == "text"
    key = text_key(source, tokenizer, chat=chat, max_tokens=max_tokens, special_tokens=special_tokens)
    folder = cache_folder(cache) / "tokens" / key
    if not (folder / "meta.json").is_file():
        name = ", ".join(data_name(one) for one in sources)
        if chat:
            records: Iterator[Any] = (record for one in sources for record in iter_conversations(one))
        else:
            longest = (
                None if max_tokens is None else PIECE_CHARACTERS + max_tokens * max(map(len, tokenizer.get_vocab()))
            )
            records = (record for one in sources for record in iter_documents(one, longest=longest))
        try:
            _tokenize(records, tokenizer, folder, chat=chat, limit=max_tokens, as_text=as_text, name=name)
        except OutputError as error:
            reason = getattr(error.__cause__, "strerror", None) or error
            raise OutputError(
                f"{folder.parent}: the tokenized text cannot be written there ({reason}); name a folder for it with "
                "PALIMPSA_CACHE or data.cache"
            ) from error
    return _open(folder, key)


def text_key(
    source: str | Path | Sequence[str | Path],
    tokenizer: Any,
    *,
    chat: bool = False,
    max_tokens: int | None = None,
    special_tokens: str = "parse",
    names: bool = False,
) -> str:
    """What `TokenStore.key` is of these arguments of `open_text`: content decides, not what the files are called.

    With `names` it is the key that earlier releases made, to which the names of the files belonged.
    """
    suffixes = CHAT_SUFFIXES if chat else TEXT_SUFFIXES
    asked: list[Any] = [FORMAT, [_content_key(one, suffixes, names) for one in _sources(source)]]
    asked += [tokenizer_key(tokenizer), _CHAT_FORMAT if chat else False, max_tokens]
    asked += ["special tokens as text"] if special_tokens == "text" else []
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def _sources(source: str | Path | Sequence[str | Path]) -> list[str | Path]:
    return [source] if isinstance(source, (str, Path)) else list(source)


def cache_folder(cache: str | Path | None = None) -> Path:
    """Where tokenized text is kept."""
    named = cache if cache is not None else os.environ.get("PALIMPSA_CACHE")
    if named:
        return named_path(named, "cache folder")
    return named_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "cache folder") / "palimpsa-surgery"


def tokenizer_key(tokenizer: Any) -> str:
    """sha256 over what decides the ids: the whole fast tokenizer (of another the vocabulary, and what it makes of some
    text), end token, chat template and first tokens.

    And whether the tokenizer's own settings keep special tokens that are spelled in a text as text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend else json.dumps([sorted(tokenizer.get_vocab().items()), probe(tokenizer)])
    asked = [rules, tokenizer.eos_token_id, getattr(tokenizer, "chat_template", None), *opening_ids(tokenizer)]
    if getattr(tokenizer, "split_special_tokens", False):
        asked.append("special tokens as text")
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def _content_key(source: str | Path, suffixes: tuple[str, ...], names: bool) -> str:
    """sha256 over the bytes of the local files that are read; name and revision of a dataset of the Hub."""
    path = embedded_text_path() if str(source) == EMBEDDED_TEXT else named_path(source, "text")
    if not os.path.exists(path):
        return f"{source}@{_dataset_revision(str(source))}"
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else data_files(path, suffixes):
        # The ending says how the bytes are read, and the length where the next file begins.
        kind = f"{Path(file.name.removesuffix('.gz')).suffix} {file.stat().st_size}"
        digest.update((file.name if names else kind).encode() + b"\0")
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _dataset_revision(source: str) -> str:
    """The commit of a dataset, so that the cache notices a new one; empty where the Hub cannot be asked."""
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(source.partition(":")[0]).sha or ""
    except Exception as error:  # offline, not found, refused: reading the dataset reports what is really wrong
        logger.debug("no revision of %s (%s)", source, error)
        return ""


def _tokenize(
    records: Iterable[Any],
    tokenizer: Any,
    folder: Path,
    *,
    chat: bool,
    limit: int | None,
    as_text: bool,
    name: str,
) -> None:
    """Writes `tokens.bin`, `offsets.npy`, `meta.json` (of chats also `trained.bin`, `records.npy`), batch by batch."""
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)
    lengths: list[int] = []
    origins: list[int] = []
    written, targets = 0, 0
    batches = _batches(progress(records, f"tokenizing {name}"))
    with (
        output_folder(folder, force=True) as target,
        (target / "tokens.bin").open("wb") as tokens,
        (target / "trained.bin").open("wb") if chat else contextlib.nullcontext() as trained,
    ):
        encoded = (
            _encode_chats(batches, tokenizer, as_text) if chat else _encode_texts(batches, tokenizer, as_text, limit)
        )
        for origin, ids, mask in encoded:
            if limit is not None and written >= limit and origin != origins[-1]:
                break
            written += len(ids)
            targets += len(ids) if mask is None else sum(mask)
            tokens.write(np.asarray(ids, dtype).tobytes())
            if trained is not None:
                trained.write(np.asarray(mask, np.uint8).tobytes())
            lengths.append(len(ids))
            origins.append(origin)
            if not chat and limit is not None and written >= limit:
                break
        if not targets:
            what = "words of an assistant to train on" if written else "text"
            raise DataError(f"{name}: holds no {what}; give files with at least one document")
        np.save(target / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
        if chat:
            np.save(target / "records.npy", np.asarray(origins, np.int64))
        meta = {"format": FORMAT, "dtype": dtype.name, "tokens": written, "documents": len(lengths), "chat": chat}
        (target / "meta.json").write_text(dump_json(meta))
    logger.info("%s: %s, %s", name, counted(len(lengths), "document"), counted(written, "token"))


def _batches(records: Iterable[Any]) -> Iterator[list[Any]]:
    """Runs of records, of texts no more than about a piece in all: memory has an end."""
    batch: list[Any] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record) if isinstance(record, str) else 0
        if len(batch) == _BATCH or size >= PIECE_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode_texts(
    batches: Iterable[list[str]], tokenizer: Any, as_text: bool, limit: int | None
) -> Iterator[tuple[int, list[int], None]]:
    """(number of the document, its ids, no mask); documents of usual length go to the tokenizer together."""
    opening = opening_ids(tokenizer)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    options = {"split_special_tokens": True} if as_text else {}
    number = 0
    for texts in batches:
        if max(map(len, texts)) > PIECE_CHARACTERS:
            encoded: Iterable[list[int]] = tokenize_documents(texts, tokenizer, limit=limit, **options)
        else:
            encoded = tokenizer(texts, add_special_tokens=False, verbose=False, **options)["input_ids"]
            encoded = ([*opening, *ids] for ids in encoded)
        for ids in encoded:
            yield number, ids + end, None
            number += 1


def _encode_chats(
    batches: Iterable[list[Conversation]], tokenizer: Any, as_text: bool
) -> Iterator[tuple[int, list[int], list[int]]]:
    for number, conversation in enumerate(conversation for batch in batches for conversation in batch):
        for ids, mask in render_chat(conversation, tokenizer, refuse_special_tokens=as_text):
            yield number, ids, mask


def _open(folder: Path, key: str) -> TokenStore:
    meta = load_json(folder / "meta.json")
    tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r")
    trained = np.memmap(folder / "trained.bin", dtype=np.uint8, mode="r") if meta["chat"] else None
    offsets = np.load(folder / "offsets.npy")
    if len(tokens) != meta["tokens"] or int(offsets[-1]) != meta["tokens"]:
        raise DataError(f"the token cache {folder.name} is damaged; delete that folder, it is made again")
    records = folder / "records.npy"
    return TokenStore(tokens, offsets, trained, key, np.load(records) if records.is_file() else None)
