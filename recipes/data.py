"""Text to tokens: local files or a `datasets` id, tokenised once, kept in a cache that is memory-mapped afterwards."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..base.console import counted, progress
from ..base.errors import DataError
from ..base.files import dump_json, load_json, named_path, output_folder
from ..base.text import EMBEDDED_TEXT, data_name, embedded_text_path, iter_documents
from .chat import iter_conversations, render_chat

logger = logging.getLogger(__name__)

FORMAT = 1
_BATCH = 256  # documents a call of the tokenizer


@dataclass(frozen=True)
class TokenStore:
    """All documents of a text as one array of token ids.

    Attributes:
        tokens: [N] ids, uint16 or uint32, memory-mapped.
        offsets: [documents + 1] where each document starts; each ends with the end-of-document token, if there is one.
        trained: [N] 1 where a token is a target of the loss, or None when all are.
        key: sha256 over the text, the tokenizer and what was asked; the same text has the same key on any machine.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    trained: np.ndarray | None
    key: str

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1


def open_text(
    source: str | Path | Sequence[str | Path],
    tokenizer: Any,
    *,
    chat: bool = False,
    max_tokens: int | None = None,
    cache: str | Path | None = None,
) -> TokenStore:
    """Tokens of a text: from the cache when the same text met the same tokenizer before, else tokenised now.

    Args:
        source: what `base.text.iter_documents` reads (files, folders, `owner/name[:config:split]` of the Hub), or a
            list of these.
        tokenizer: a transformers tokenizer.
        chat: each line of the jsonl files is a conversation (`messages`), rendered with the tokenizer's chat
            template; only the assistant's words are targets.
        max_tokens: read no further than the document that reaches this many; of a text too long to tokenise whole.
        cache: folder of the cache; default `$PALIMPSA_CACHE`, then `$XDG_CACHE_HOME/palimpsa-surgery`.

    Raises:
        DataError: what cannot be read, or holds no text.
    """
    sources = [source] if isinstance(source, (str, Path)) else list(source)
    asked = [FORMAT, [_content_key(one) for one in sources], tokenizer_key(tokenizer), chat, max_tokens]
    key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
    folder = cache_folder(cache) / "tokens" / key
    if not (folder / "meta.json").is_file():
        read = iter_conversations if chat else iter_documents
        records = (record for one in sources for record in read(one))
        _tokenise(
            records, tokenizer, folder, chat=chat, limit=max_tokens, name=", ".join(data_name(one) for one in sources)
        )
    return _open(folder, key)


def cache_folder(cache: str | Path | None = None) -> Path:
    """Where tokenised text is kept."""
    if cache is not None:
        return Path(cache)
    if os.environ.get("PALIMPSA_CACHE"):
        return Path(os.environ["PALIMPSA_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "palimpsa-surgery"


def tokenizer_key(tokenizer: Any) -> str:
    """sha256 over what decides the ids: the whole fast tokenizer (or the vocabulary), end token and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(json.dumps([rules, tokenizer.eos_token_id, template]).encode()).hexdigest()


def _content_key(source: str | Path) -> str:
    """sha256 over the bytes of local files; name and revision of a dataset of the Hub."""
    path = embedded_text_path() if str(source) == EMBEDDED_TEXT else named_path(source, "text")
    if not path.exists():
        return f"{source}@{_dataset_revision(str(source))}"
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        digest.update(file.name.encode() + b"\0")
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


def _tokenise(
    records: Iterable[Any], tokenizer: Any, folder: Path, *, chat: bool, limit: int | None, name: str
) -> None:
    """Writes `tokens.bin`, `offsets.npy`, `meta.json` (and `trained.bin`), a batch of documents in memory at a time."""
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)
    lengths: list[int] = []
    written = 0
    encode = _encode_chats if chat else _encode_texts
    with output_folder(folder, force=True) as target, (target / "tokens.bin").open("wb") as tokens:
        trained = (target / "trained.bin").open("wb") if chat else None
        try:
            for batch in _batches(progress(records, f"tokenising {name}")):
                for ids, mask in encode(batch, tokenizer):
                    if limit is not None and written >= limit:
                        break
                    written += len(ids)
                    tokens.write(np.asarray(ids, dtype).tobytes())
                    if trained is not None:
                        trained.write(np.asarray(mask, np.uint8).tobytes())
                    lengths.append(len(ids))
                if limit is not None and written >= limit:
                    break
        finally:
            if trained is not None:
                trained.close()
        if not written:
            raise DataError(f"{name}: holds no text; give files with at least one document")
        np.save(target / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
        meta = {"format": FORMAT, "dtype": dtype.name, "tokens": written, "documents": len(lengths), "chat": chat}
        (target / "meta.json").write_text(dump_json(meta))
    logger.info("%s: %s, %s", name, counted(len(lengths), "document"), counted(written, "token"))


def _batches(records: Iterable[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for record in records:
        batch.append(record)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _encode_texts(batch: list[str], tokenizer: Any) -> Iterator[tuple[list[int], None]]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    texts = [text for text in batch if text]
    if texts:
        for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
            yield ids + end, None


def _encode_chats(batch: list[Any], tokenizer: Any) -> Iterator[tuple[list[int], list[int]]]:
    for messages in batch:
        yield render_chat(messages, tokenizer)


def _open(folder: Path, key: str) -> TokenStore:
    meta = load_json(folder / "meta.json")
    tokens = np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r")
    trained = np.memmap(folder / "trained.bin", dtype=np.uint8, mode="r") if meta["chat"] else None
    offsets = np.load(folder / "offsets.npy")
    if len(tokens) != meta["tokens"] or int(offsets[-1]) != meta["tokens"]:
        raise DataError(f"the token cache {folder.name} is damaged; delete that folder, it is made again")
    return TokenStore(tokens, offsets, trained, key)
