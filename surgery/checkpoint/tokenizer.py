"""The tokenizer of a model: opened, compared and settled here, for every verb."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.errors import CheckpointError
from ...base.text import iter_documents, opening_ids
from .sources import read_foreign_json, resolve, tokenizer_files

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

logger = logging.getLogger(__name__)

OPTION = "--tokenizer"
"""What most commands call the option that names a tokenizer; a caller says where it has another, or none (None)."""
SPECIAL_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_ODD_TEXT = "Ünïcode: nai\u0308ve ﬁ ß 日本語 русский 🙂\r\n\t 1,234.50  x_y=0xFF\n\n\n  def f(a):  # THE end"


def load_tokenizer(
    source: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    option: str | None = OPTION,
    rows: int | None = None,
) -> Any:
    """The tokenizer of a folder or Hub id, as transformers reads it; no code of the folder is run.

    Args:
        source: a folder, a Hub id, or the embedded checkpoint's name.
        revision: of a Hub id.
        token: Hub token.
        option: what the caller has for naming a tokenizer, for messages.
        rows: of the embedding of the model that it is for.

    Raises:
        CheckpointError: there is none, it cannot be read, is code of its own, gives one text other ids each time, or
            has ids that the embedding has no row for.
    """
    return _load(resolve(source, revision=revision, token=token, weights=False).folder, str(source), option, rows)


def open_tokenizer(
    checkpoint: Checkpoint,
    named: str | Path | None = None,
    *,
    token: str | None = None,
    option: str | None = OPTION,
) -> Any:
    """The tokenizer that was named, else the checkpoint's own; `option` and errors as for `load_tokenizer`."""
    tokenizer = _load(*_place(checkpoint, named, token), option, checkpoint.config.vocab_size)
    if named is not None:
        _warn_other_ids(checkpoint, tokenizer, str(named))
    return tokenizer


def with_tokenizer(
    checkpoint: Checkpoint,
    named: str | Path | None = None,
    *,
    token: str | None = None,
    option: str | None = OPTION,
) -> Checkpoint:
    """The checkpoint with the tokenizer that was named as its own, as it is run and written from here on.

    Config and generation config name the special tokens of its tokenizer, or plain `generate` would not know where a
    text ends. The tokenizer that came with a checkpoint fills gaps only: the configs may name another end, or several.

    Raises:
        CheckpointError: as for `load_tokenizer`; but a checkpoint without a tokenizer stays as it is.
    """
    if named is None and not checkpoint.tokenizer_files:
        return checkpoint
    folder, name = _place(checkpoint, named, token)
    rows = checkpoint.config.vocab_size
    tokenizer = _load(folder, name, option, rows)
    if named is not None:
        _warn_other_ids(checkpoint, tokenizer, name)
    found = {key: getattr(tokenizer, key) for key in SPECIAL_TOKEN_IDS}
    ids = {key: number for key, number in found.items() if number is not None and number < rows}

    def settled(config: Mapping[str, Any]) -> dict[str, Any]:
        known = {key: value if isinstance(value := config.get(key), list) else [value] for key in ids}
        return {k: v for k, v in ids.items() if known[k] == [None] or (named is not None and v not in known[k])}

    generation = checkpoint.generation_config
    return replace(
        checkpoint,
        config=replace(checkpoint.config, **settled(vars(checkpoint.config))),
        generation_config=None if generation is None else {**generation, **settled(generation)},
        tokenizer_files=tokenizer_files(folder),
    )


def encode_alike(first: Any, second: Any) -> bool:
    """Whether two tokenizers give the same ids: one vocabulary, the same ids at both ends, the same for a text."""
    return first.get_vocab() == second.get_vocab() and probe(first) == probe(second)


def probe(tokenizer: Any) -> list[Any]:
    """What a tokenizer puts at the start and the end of a document, and the ids of a text that has a bit of all."""
    texts = [next(iter_documents())[:4096], _ODD_TEXT, "".join(sorted(tokenizer.all_special_tokens))]
    ids = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
    return [opening_ids(tokenizer), tokenizer.eos_token_id, ids]


def other_ids(checkpoint: Checkpoint, tokenizer: Any, name: str) -> str | None:
    """A sentence where a tokenizer that was named gives texts other ids than the one beside the weights does, or None.

    It may be meant, where a model is to learn another vocabulary; else every figure is of texts the model cannot read.
    """
    try:
        own = open_tokenizer(checkpoint) if checkpoint.tokenizer_files else None
    except CheckpointError:  # which may be why another was named
        own = None
    if own is None or probe(own)[-1][:2] == probe(tokenizer)[-1][:2]:
        return None
    return (
        f"the tokenizer {name} gives texts other ids than the one in {checkpoint.source_id} does, so they mean other "
        "words to this model"
    )


def _warn_other_ids(checkpoint: Checkpoint, tokenizer: Any, name: str) -> None:
    said = other_ids(checkpoint, tokenizer, name)
    if said:
        logger.warning("%s", said)


def _place(checkpoint: Checkpoint, named: str | Path | None, token: str | None) -> tuple[Path, str]:
    """The folder of a tokenizer, and how messages call it."""
    if named is not None:
        return resolve(named, token=token, weights=False).folder, str(named)
    files = checkpoint.tokenizer_files
    return files[0].parent if files else checkpoint.path, checkpoint.source_id


def refuse_far_ids(tokenizer: Any, rows: int, name: str, option: str | None = OPTION) -> None:
    """Raises `CheckpointError` for a tokenizer with ids that an embedding of so many rows cannot look up.

    But for a pad token, which is often added behind them: it stands for no text.
    """
    far = {number: word for word, number in tokenizer.get_vocab().items() if number >= rows}
    far.pop(tokenizer.pad_token_id, None)
    if far:
        last = max(far)
        raise CheckpointError(
            f"{name}: its tokenizer has ids up to {last} ({far[last]!r}), but the model's embedding has {rows} rows; "
            f"{_advice(option)}"
        )


def _refuse_chance(tokenizer: Any, name: str, option: str | None) -> None:
    """Raises `CheckpointError` for a tokenizer that gives one text other ids each time (BPE dropout, sampling)."""
    dropout = getattr(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None), "dropout", None)
    sampling = (getattr(tokenizer, "sp_model_kwargs", None) or {}).get("enable_sampling")
    if dropout or sampling:
        what = f"leaves out merges by chance (dropout {dropout:.3g})" if dropout else "draws its ids (enable_sampling)"
        raise CheckpointError(
            f"{name}: its tokenizer {what}, so one text has other ids each time; set that to null in its files, or "
            f"{_advice(option)}"
        )


def _load(folder: Path, name: str, option: str | None, rows: int | None = None) -> Any:
    from transformers import AutoTokenizer

    from ... import modeling  # noqa: F401  registers our configs: transformers warns of a type that it does not know

    refuse_code(folder, name, option)
    none = f"{name}: has no tokenizer; {_advice(option)}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        words = set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)
    except Exception as error:  # the reasons differ by release and package
        if tokenizer_files(folder):
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"{name}: its tokenizer cannot be read ({type(error).__name__}: {reason}); {_advice(option)}"
            ) from error
        raise CheckpointError(none) from error
    if not words:  # without files transformers makes one of special tokens up, from the type of the model
        raise CheckpointError(none)
    _refuse_chance(tokenizer, name, option)
    if rows is not None:
        refuse_far_ids(tokenizer, rows, name, option)
    return tokenizer


def _advice(option: str | None) -> str:
    if option is None:
        return "put the files of its tokenizer there again, or remove those that are there"
    return f"give one with {option}, a folder or a Hub id (the state-spaces models use EleutherAI/gpt-neox-20b)"


def refuse_code(folder: Path, name: str, option: str | None) -> None:
    """Raises `CheckpointError` for a tokenizer that is code in its folder.

    What transformers would read instead is a similar one, with other ids or without an end token.
    """
    for file in (folder / "tokenizer_config.json", folder / "config.json"):
        code = read_foreign_json(file).get("auto_map") if file.is_file() else None
        code = code.get("AutoTokenizer") if isinstance(code, dict) else code
        if code:
            classes = ", ".join(str(one) for one in (code if isinstance(code, list) else [code]) if one)
            other = "" if option is None else f", or name another tokenizer with {option}"
            raise CheckpointError(
                f"{name}: {file.name} says that its tokenizer is code of its own ({classes}), which is not run here; "
                f"put files there that transformers reads without it{other}"
            )
