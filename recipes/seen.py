"""Whether a text was part of a model's training, as far as the files beside the model tell.

A model folder that was fine-tuned has `recipe.yaml`, which names the training text. Documents are compared by their
content, so a copy under another name is found too, and so is a part of the text in a file of its own.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..base.errors import PalimpsaError
from ..base.files import load_yaml
from ..base.text import EMBEDDED_TEXT, data_name, iter_documents
from .eval_report import SeenText

logger = logging.getLogger(__name__)

RECIPE = "recipe.yaml"
MOST_CHARACTERS = 256 << 20
"""Of a text no more than so many characters are compared: a few seconds."""


def seen_text(folder: str | Path, data: str | Path | None) -> SeenText | None:
    """What of `data` the model in `folder` was trained on.

    Args:
        folder: the model's.
        data: the text, as for `base.text.iter_documents`.

    Returns:
        None when nothing of it is in the training text, or when nobody can tell: no recipe beside the model, or a
        training text of another name that is not here.
    """
    sources = _training_texts(Path(folder) / RECIPE)
    if not sources:
        return None
    documents = [_digest(text) for text in _bounded(iter_documents(data))]
    wanted, found, names = set(documents), set(), []
    for source in sources:
        hits = wanted if _same(source, data) else _hits(source, wanted)
        if hits is None:
            if data_name(source) == data_name(data):
                return SeenText(name=data_name(source), documents=None, of=len(documents))
        elif hits:
            found |= hits
            names.append(data_name(source))
    count = sum(document in found for document in documents)
    return SeenText(name=", ".join(names), documents=count, of=len(documents)) if count else None


def _training_texts(recipe: Path) -> list[str]:
    if not recipe.is_file():
        return []
    try:
        content = load_yaml(recipe)
    except PalimpsaError as error:
        logger.warning("%s: what the model was trained on is not known", error)
        return []
    data: Any = content.get("data") if isinstance(content, dict) else None
    named = data.get("train") if isinstance(data, dict) else None
    return [named] if isinstance(named, str) else [one for one in named or () if isinstance(one, str)]


def _same(source: str, data: str | Path | None) -> bool:
    return source == (EMBEDDED_TEXT if data is None else str(data))


def _hits(source: str, wanted: set[bytes]) -> set[bytes] | None:
    """Which of the documents `wanted` a training text has; None when it is not here or holds no plain documents."""
    if source != EMBEDDED_TEXT and not Path(source).exists():
        return None
    found: set[bytes] = set()
    try:
        for text in _bounded(iter_documents(source)):
            digest = _digest(text)
            if digest in wanted:
                found.add(digest)
                if len(found) == len(wanted):
                    break
    except PalimpsaError as error:
        logger.debug("%s cannot be compared with the text of the evaluation (%s)", source, error)
        return None
    return found


def _bounded(documents: Iterable[str]) -> Iterator[str]:
    size = 0
    for document in documents:
        yield document
        size += len(document)
        if size >= MOST_CHARACTERS:
            return


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=16).digest()
