"""What a source's card and folder say of its license."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from ...base.files import LICENSE_FILES

logger = logging.getLogger(__name__)


def card_metadata(folder: Path) -> dict[str, Any]:
    """The YAML block that opens a model card (`README.md`); {} when there is none or it cannot be read.

    huggingface_hub's `metadata_load` reads in the encoding of the system, and not past the mark of an editor.
    """
    card = folder / "README.md"
    if not card.is_file():
        return {}
    text = card.read_text(encoding="utf-8-sig", errors="replace")
    block = re.match(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", text, re.DOTALL)
    try:
        content = yaml.safe_load(block.group(1)) if block else None
    except (yaml.YAMLError, ValueError, RecursionError):  # a number of thousands of digits, a list in a list in a list
        logger.warning("README.md: its metadata block is not YAML; license and base model are not carried over")
        content = None
    return content if isinstance(content, dict) else {}


def license_names(card: Mapping[str, Any]) -> str | list[str] | None:
    """The license that a card's metadata names, or the list of them; None when it names none."""
    value = card.get("license")
    names = [name for name in (value if isinstance(value, list) else [value]) if name and isinstance(name, str)]
    return names[0] if len(names) == 1 else names or None


def license_files(folder: Path) -> tuple[Path, ...]:
    """The texts of licenses and notices in a folder, and the one that its card links to by name."""
    link = card_metadata(folder).get("license_link")
    return tuple(
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and (path.name == link or any(fnmatch(path.name, pattern) for pattern in LICENSE_FILES))
    )


def license_text(license: str | list[str] | None, form: str = "`{}`") -> str:
    """Names of licenses for people; each in the given form."""
    return ", ".join(form.format(name) for name in ([license] if isinstance(license, str) else license or []))


def license_terms(metadata: Mapping[str, object]) -> dict[str, str]:
    """What a card's metadata says beside `license` when that is `other`."""
    keys = ("license_name", "license_link")
    return {key: value for key in keys if isinstance(value := metadata.get(key), str)}
