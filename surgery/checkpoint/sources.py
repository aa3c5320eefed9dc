"""Where a checkpoint lies: a local folder or a Hub id, which of its files are the weights, what lies beside them."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from ...base.console import counted
from ...base.errors import CheckpointError
from ...base.files import LICENSE_FILES, RECIPE, TOKENIZER_FILES, named_path
from ...base.network import check_network
from ...base.not_models import has_config, other_file, other_folder
from ...base.text import EMBEDDED_CHECKPOINT, embedded_checkpoint_path

logger = logging.getLogger(__name__)

# First match wins. safetensors go before pickles; `consolidated` is what Codestral ships beside its shards, the same
# weights once more, so it is read only when nothing else is there.
WEIGHT_CHOICES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "*.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model*.bin",
    "model*.bin",
    "*.pt",
    "*.pth",
    "consolidated*.safetensors",
    "consolidated*.pth",
)
_TEMPLATES = "additional_chat_templates"
TOKENIZER_PATTERNS = (*TOKENIZER_FILES, f"{_TEMPLATES}/*.jinja")
SIDE_FILES = (
    *(RECIPE, "recipe-*.yaml"),
    *("config.json", "params.json", "generation_config.json", "README.md"),
    *LICENSE_FILES,
    *TOKENIZER_PATTERNS,
)
_NOT_WEIGHTS = (".", "adapter_model", "optimizer", "scheduler", "rng_state", "training_args", "scaler")
_INDEX = ".index.json"
_DISK = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR)
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ESTALE)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Source:
    """A checkpoint's folder on this machine.

    Attributes:
        folder: where the files are.
        source_id: the Hub id, or the folder's own name; never a path.
        hub: whether it came from the Hub.
    """

    folder: Path
    source_id: str
    hub: bool


def resolve(src: str | Path, *, revision: str | None = None, token: str | None = None, weights: bool = True) -> Source:
    """Finds the folder of `src`, fetching from the Hub what an id needs and nothing more.

    Args:
        src: a folder, a Hub id (`owner/name`), or `EMBEDDED_CHECKPOINT`. An existing folder wins over an id.
        revision: branch, tag or commit of a Hub id.
        token: the Hub token; by default the one huggingface_hub has stored.
        weights: whether they are wanted; a tokenizer needs none.

    Raises:
        CheckpointError: nothing is there, or `src` is a file.
        UsageError: an empty name.
    """
    what = "checkpoint" if weights else "tokenizer"
    path = embedded_checkpoint_path() if str(src) == EMBEDDED_CHECKPOINT else named_path(src, what)
    if path.is_dir():
        _refuse_broken_links(path)
        return Source(path, path.resolve().name, hub=False)
    if path.exists():
        raise CheckpointError(other_file(path))
    if not _HUB_ID.fullmatch(str(src)):
        raise CheckpointError(f"{src}: no such folder; give a {what}'s folder or a Hub id (owner/name)")
    folder = _download(str(src), revision, token, weights)
    _refuse_broken_links(folder)
    return Source(folder, str(src), hub=True)


def _refuse_broken_links(folder: Path) -> None:
    """A Hub cache holds links to its blobs: one that leads nowhere would look like a file that was never there."""
    broken = [path.name for path in files_read(folder) if not path.exists()]
    if broken:
        raise CheckpointError(
            f"{folder / broken[0]}: is a link to a file that is gone; remove it and download the model again while "
            "online (hf download), or put the file back"
        )


def select_weights(names: Iterable[str]) -> tuple[str, ...]:
    """The weight files, or the one shard index, to read among the files `names` of a folder; () when there is none.

    The order of preference is `WEIGHT_CHOICES`.
    """
    usable = sorted(name for name in names if "/" not in name and not name.startswith(_NOT_WEIGHTS))
    for pattern in WEIGHT_CHOICES:
        found = tuple(name for name in usable if fnmatch(name, pattern))
        if not pattern.startswith("consolidated"):
            found = tuple(name for name in found if not name.startswith("consolidated"))
        if found:
            return found
    return ()


def weight_files(folder: Path) -> list[Path]:
    """The paths of the weight files of a folder, shards in the order of their names.

    Raises:
        CheckpointError: no weights, two sets of them, an index that is broken, points outside its folder, or names
            absent files.
    """
    names = {path.name for path in folder.iterdir() if path.is_file()}
    if not has_config(folder) and (known := other_folder(folder)) is not None:
        raise CheckpointError(known)
    chosen = select_weights(names)
    if not chosen:
        raise CheckpointError(_no_weights(folder, names))
    _refuse_two_sets(folder.name, chosen, names)
    if chosen[0].endswith(_INDEX):
        files = _indexed_files(folder, chosen[0], names)
    else:
        files = list(chosen)
    others = [name for name in names if fnmatch(name, "*.safetensors") or fnmatch(name, "*pytorch_model*.bin")]
    ignored = sorted(set(others) - set(files))
    if ignored:
        logger.info(
            "%s: weights are read from %s; not read: %s (safetensors go before .bin, shards before consolidated)",
            folder.name,
            ", ".join(files),
            ", ".join(ignored),
        )
    return [folder / name for name in files]


def weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor by the word of the index that `weight_files` reads; {} where it reads none.

    Raises:
        CheckpointError: the index is broken.
    """
    chosen = select_weights(path.name for path in folder.iterdir() if path.is_file())
    return _read_index(folder, chosen[0]) if chosen and chosen[0].endswith(_INDEX) else {}


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """The files a tokenizer is loaded from, by their usual names, further chat templates in a folder of theirs last."""
    with reading(folder.name):
        paths = (*sorted(folder.iterdir()), *sorted(folder.glob(f"{_TEMPLATES}/*.jinja")))
    return tuple(path for path in paths if path.is_file() and is_of_tokenizer(tokenizer_file_name(path)))


def recipe_files(folder: Path) -> list[Path]:
    """The recipes that lie beside a model, in the order in which it was trained by them."""
    numbers = {path: path.stem.removeprefix("recipe-") for path in folder.glob("recipe-*.yaml")}
    earlier = sorted((path for path, number in numbers.items() if number.isdecimal()), key=lambda p: int(numbers[p]))
    return [path for path in (*earlier, folder / RECIPE) if path.is_file()]


def is_of_tokenizer(name: str) -> bool:
    """Whether a tokenizer is loaded from a file of this name, relative to the model folder."""
    return any(fnmatch(name, pattern) for pattern in TOKENIZER_PATTERNS)


def tokenizer_file_name(path: Path) -> str:
    """The name of a file of `tokenizer_files` relative to the model folder."""
    return f"{_TEMPLATES}/{path.name}" if path.parent.name == _TEMPLATES else path.name


def files_read(src: str | Path | None) -> list[Path]:
    """The files of a checkpoint's folder that a stage reads, for what must not be replaced; [] for a Hub id."""
    if src is None or not os.path.isdir(folder := os.path.expanduser(src)):
        return []
    files = [path for path in Path(folder).iterdir() if not path.name.startswith(_NOT_WEIGHTS)]
    return [path for path in files if any(fnmatch(path.name, pattern) for pattern in (*SIDE_FILES, *WEIGHT_CHOICES))]


@contextlib.contextmanager
def reading(name: str | Path) -> Iterator[None]:
    """Turns the system's error about a file of the checkpoint `name` that is gone, or closed to us, into a
    `CheckpointError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _GONE:
            raise
        raise CheckpointError(
            f"{name}: {Path(error.filename or '').name or 'a file'} cannot be read ({error.strerror}); put it back or "
            "make it readable, and leave the folder alone while it is read"
        ) from error


def read_foreign_json(path: Path) -> dict[str, Any]:
    """Reads a JSON table that other programs wrote: Python's `Infinity`, and transformers' `{"__float__": ...}` too.

    A byte order mark is read over, as editors on Windows put one in front.

    Raises:
        CheckpointError: the file is not a JSON table, or gives a key twice.
    """

    def decode(pairs: list[tuple[str, Any]]) -> Any:
        table = dict(pairs)
        if len(table) < len(pairs):
            keys = [key for key, _ in pairs]
            twin = next(key for key in keys if keys.count(key) > 1)
            raise CheckpointError(f"{path.name}:{twin}: is given twice; keep one of them")
        return float(table["__float__"]) if set(table) == {"__float__"} else table

    try:
        with reading(path.parent.name):
            content = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=decode)
    except CheckpointError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: is not JSON ({error}); write or download the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name}: holds a {type(content).__name__}, expected a table of keys and values")
    return content


def special_token_ids(folder: Path) -> dict[str, int]:
    """`bos_token_id`, `eos_token_id` and `pad_token_id`, those of them that the tokenizer's files give.

    mamba_ssm's config names none of them, and a model without an end token never stops generating.
    """
    described, table = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not (described.is_file() and table.is_file()):
        return {}
    settings = read_foreign_json(described)
    added = read_foreign_json(table).get("added_tokens") or []
    ids = {token.get("content"): token.get("id") for token in added if isinstance(token, dict)}
    found = {}
    for kind in ("bos", "eos", "pad"):
        token = settings.get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token in ids:
            found[f"{kind}_token_id"] = ids[token]
    return found


def _read_index(folder: Path, index: str) -> dict[str, str]:
    found = read_foreign_json(folder / index).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise CheckpointError(f"{index}: has no usable weight_map, expected tensor names and files; write it again")
    return found


def _indexed_files(folder: Path, index: str, names: set[str]) -> list[str]:
    files = sorted(set(_read_index(folder, index).values()))
    for name in files:
        parts = PurePosixPath(name.replace("\\", "/")).parts
        if len(parts) != 1 or parts[0] in ("..", "/") or ":" in name:
            raise CheckpointError(f"{index}: weight_map points to {name[:100]!r}, outside its folder; this is refused")
    missing = [name[:100] for name in files if name not in names]  # a name may be longer than any system opens
    if missing:
        raise CheckpointError(
            f"{index}: of its {counted(len(files), 'file')} {len(missing)} cannot be found ({', '.join(missing[:5])}); "
            "download the missing shards"
        )
    return files


def _refuse_two_sets(where: str, chosen: tuple[str, ...], names: set[str]) -> None:
    """One file beside shards of the same name: nobody can tell which of the two is the model."""
    stem, _, suffix = chosen[0].rpartition(".")
    shards = sorted(name for name in names if re.fullmatch(rf"{re.escape(stem)}-\d+-of-\d+\.{suffix}", name))
    if len(chosen) == 1 and shards:
        raise CheckpointError(
            f"{where}: holds {chosen[0]} and {counted(len(shards), 'shard')} ({shards[0]} ...), which are two sets of "
            "weights; remove the one that is not the model"
        )


def _no_weights(folder: Path, names: set[str]) -> str:
    if not names and not any(folder.iterdir()):
        return f"{folder}: is an empty folder, expected config.json and weights"
    known = other_folder(folder)
    return known or f"{folder}: holds no weights, expected model.safetensors, pytorch_model.bin or their shards"


def _download(repo: str, revision: str | None, token: str | None, weights: bool) -> Path:
    """Fetches config, card, tokenizer and the one chosen form of the weights; the cached files when offline."""
    import httpx
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub import errors as hub

    at = f" at revision {revision}" if revision else ""
    check_network(token)
    try:
        patterns: list[str] | None = None
        try:
            names = HfApi(token=token).list_repo_files(repo, revision=revision)
            patterns = _patterns(repo, names) if weights else [*SIDE_FILES]
        except (hub.OfflineModeIsEnabled, httpx.TransportError, ConnectionError) as error:
            logger.info("%s: the Hub cannot be reached (%s), using the files in the cache", repo, type(error).__name__)
        folder = snapshot_download(
            repo, revision=revision, token=token, allow_patterns=patterns, local_files_only=patterns is None
        )
    except hub.GatedRepoError as error:
        raise CheckpointError(
            f"{repo}: is gated on the Hub; accept its terms there and log in (hf auth login)"
        ) from error
    except hub.RevisionNotFoundError as error:
        raise CheckpointError(f"{repo}: has no revision {revision!r} on the Hub; choose one it lists") from error
    except (hub.RepositoryNotFoundError, hub.HFValidationError) as error:
        raise CheckpointError(
            f"{repo}: neither a folder here nor a model on the Hub that you may read; check the spelling, or log in"
        ) from error
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled) as error:
        there = getattr(error, "snapshot_path", None)  # newer clients refuse what was fetched in part, as above
        if there is not None and patterns is None:
            return Path(there)
        raise CheckpointError(
            f"{repo}{at}: no such folder here, not in the Hub cache, and the Hub cannot be reached; "
            "check the spelling, or download it while online"
        ) from error
    except (hub.HfHubHTTPError, httpx.HTTPError, OSError) as error:
        reason = (str(error).splitlines() or [""])[0]
        disk = getattr(error, "errno", None) in _DISK
        advice = "name a folder that can be written, and has room, in HF_HOME" if disk else "try again"
        raise CheckpointError(
            f"{repo}{at}: the download failed ({type(error).__name__}: {reason}); {advice}"
        ) from error
    return Path(folder)


def _patterns(repo: str, names: list[str]) -> list[str]:
    """What to fetch of a repository that holds the files `names`."""
    chosen = list(select_weights(names))
    if chosen:
        _refuse_two_sets(repo, tuple(chosen), set(names))
    if chosen and chosen[0].endswith(_INDEX):
        stem, suffix = chosen[0].removesuffix(_INDEX).rsplit(".", 1)
        chosen.append(f"{stem}-*.{suffix}")
    return [*SIDE_FILES, *chosen]
