"""Whether a text was part of a model's training, as far as the files beside the model tell.

A model folder that was fine-tuned has `recipe.yaml`, which names the training text, and `recipe-1.yaml`, ... of what it
was made from. Documents are compared by their content, so a copy under another name is found too, and so is a part of
the text in a file of its own.

The recipe may come with a model that somebody else made: it is read as a claim that may be nonsense, and the paths in
it are opened only where they are regular files of text, up to a bound. Of its keys only those used here are looked at,
as an evaluation should not end because a recipe has others; whatever cannot be told is a warning, never "not seen".
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...base.errors import PalimpsaError, SchemaError
from ...base.files import load_yaml, named_path
from ...base.records import EMBEDDED_TEXT, TEXT_SUFFIXES, embedded_text_path
from ...base.schemas import current_version
from ...base.text import data_name, documents_of_file, iter_documents
from ...surgery.checkpoint.sources import recipe_files
from ..training.recipe import Recipe
from .report import SeenText

logger = logging.getLogger(__name__)

MOST_CHARACTERS = 256 << 20
"""Of a text no more than so many characters are compared: a few seconds."""
MOST_BYTES = 512 << 20
"""Of the files of a training text no more is read."""
MOST_ENTRIES = 10_000
"""A folder with more in it is not walked to its end, and counts as a text that is not here."""
_MOST_RECIPE = 1 << 20
_UNKNOWN = "whether the text was part of it is not known"


def seen_text(folder: str | Path, data: str | Path | None) -> SeenText | None:
    """What of `data` the model in `folder` was trained on.

    Args:
        folder: the model's.
        data: the text, as for `base.text.iter_documents`.

    Returns:
        None when nothing of it is in the training text, or when nobody can tell: no recipe beside the model, or, with a
        warning, a training text of another name that is not here.
    """
    trained = [(recipe, text) for recipe in recipe_files(Path(folder)) for text in _training_texts(recipe)]
    if not trained:
        return None
    documents = [_digest(text) for text in _bounded(iter_documents(data))]
    wanted, found, names = set(documents), set(), []
    for recipe, source in trained:
        hits = _hits(source, wanted, recipe)
        if hits is None:
            if data_name(source) == data_name(data):
                return SeenText(name=data_name(source), documents=None, of=len(documents))
        elif hits:
            found |= hits
            names += [name] if (name := data_name(source)) not in names else []
    count = sum(document in found for document in documents)
    return SeenText(name=", ".join(names), documents=count, of=len(documents)) if count else None


def _training_texts(recipe: Path) -> list[str]:
    try:
        return _named(recipe)
    except PalimpsaError as error:
        logger.warning("%s: what the model was trained on is not known", error)
        return []


def _named(recipe: Path) -> list[str]:
    """The texts that a recipe names; `SchemaError` for what no recipe of this package says."""
    if recipe.stat().st_size > _MOST_RECIPE:
        raise SchemaError(f"{recipe}: is too long for a recipe")
    content = load_yaml(recipe)
    version = content.get("schema_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > current_version(Recipe):
        raise SchemaError(f"{recipe}:schema_version: is {version}, newer than this release knows")
    data: Any = content.get("data") if isinstance(content, dict) else None
    if not isinstance(data, dict):
        raise SchemaError(f"{recipe}:data: is missing or no mapping")
    named = data.get("train")
    texts = [named] if isinstance(named, str) else named
    if not isinstance(texts, list) or not all(isinstance(one, str) and _is_name(one) for one in texts):
        raise SchemaError(f"{recipe}:data.train: is no name of a text, nor a list of such")
    return texts


def _is_name(text: str) -> bool:
    """Whether a file system can be asked for it, and a terminal shown it."""
    try:
        Path(text).exists()
    except (OSError, ValueError):
        return False
    return bool(text) and text.isprintable()


def _hits(source: str, wanted: set[bytes], recipe: Path) -> set[bytes] | None:
    """Which of the documents `wanted` a training text has; None when it is not here or holds no plain documents."""
    found: set[bytes] = set()
    try:
        files = [embedded_text_path()] if source == EMBEDDED_TEXT else _unchanged_files(source, recipe)
        if not files:
            return None
        for text in _bounded(_documents(files)):
            digest = _digest(text)
            if digest in wanted:
                found.add(digest)
                if len(found) == len(wanted):
                    break
    except (PalimpsaError, OSError) as error:
        logger.warning("%s cannot be compared (%s): %s", data_name(source), error, _UNKNOWN)
        return None
    return found


def _unchanged_files(source: str, recipe: Path) -> list[Path]:
    """The regular files of a training text that are as old as the recipe; empty when it is not here any more."""
    path = _located(source, recipe)
    files = [] if path is None else [path] if path.is_file() else _files_below(path)
    if any(file.stat().st_mtime > recipe.stat().st_mtime for file in files):
        logger.warning("%s was changed after the training: %s", source, _UNKNOWN)
        return []
    if not files:
        logger.warning("%s, which the model was trained on, is not here: %s", data_name(source), _UNKNOWN)
    return files


def _located(source: str, recipe: Path) -> Path | None:
    """Where a training text is.

    A relative name is relative to the folder that the training was started in, which nobody recorded: it counts when
    exactly one of the folders above the model has it. The current folder may have another file of that name.
    """
    path = named_path(source, "text")
    if path.is_absolute():
        return path
    there = [above / path for above in recipe.parent.resolve().parents if (above / path).exists()]
    return there[0] if len(there) == 1 else None


def _files_below(folder: Path) -> list[Path]:
    """The regular files of a folder; none of one with more than `MOST_ENTRIES` in it, or of a whole disk."""
    if not folder.is_dir() or folder.resolve() == folder.resolve().parent:
        return []
    files, entries = [], 0
    for here, folders, names in os.walk(folder):
        entries += len(folders) + len(names)
        if entries > MOST_ENTRIES:
            return []
        files += [Path(here, name) for name in names if Path(name.removesuffix(".gz")).suffix in TEXT_SUFFIXES]
    return sorted(file for file in files if file.is_file())


def _documents(files: list[Path]) -> Iterator[str]:
    left = MOST_BYTES
    for file in files:
        if left > 0:
            yield from documents_of_file(file, most_bytes=left)
        left -= file.stat().st_size


def _bounded(documents: Iterable[str]) -> Iterator[str]:
    size = 0
    for document in documents:
        yield document
        size += len(document)
        if size >= MOST_CHARACTERS:
            return


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=16).digest()
