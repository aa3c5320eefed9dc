"""What texts and conversations are read from: records of files, folders and datasets, each with its place."""

from __future__ import annotations

import codecs
import functools
import gzip
import importlib.util
import json
import logging
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .console import counted, human_bytes
from .errors import DataError
from .files import named_path
from .network import check_network

logger = logging.getLogger(__name__)

EMBEDDED_TEXT = "embedded:sqlite-docs"
ASSETS = Path(__file__).resolve().parent.parent / "assets"
TEXT_SUFFIXES = (".jsonl", ".json", ".txt", ".parquet")
CHAT_SUFFIXES = (".jsonl", ".json", ".parquet")
_ABOUT = ("license", "licence", "copying", "notice", "readme")
_NAMED = 5  # files a message names of each sort


def embedded_text_path() -> Path:
    """The public-domain documentation of SQLite that stands in when no text is given."""
    return ASSETS / "sqlite-docs.jsonl.gz"


def iter_records(
    data: str | Path, *, suffixes: tuple[str, ...] = TEXT_SUFFIXES, longest: int | None = None
) -> Iterator[tuple[str, Any]]:
    """Each record with where it stands (`file:line`): a JSON value, a row, or the whole text of a `.txt`.

    Args:
        data: a file, a folder, `owner/name[:config:split]` of the Hub, or the embedded text's name.
        suffixes: of the files of a folder that are read.
        longest: characters of a `.txt` after which it is cut; None reads it whole.

    Raises:
        DataError: what cannot be read.
        UsageError: an empty name.
    """
    path = embedded_text_path() if str(data) == EMBEDDED_TEXT else named_path(data, "text")
    if os.path.isdir(path):
        for file in data_files(path, suffixes):
            yield from records_of_file(file, longest=longest)
    elif os.path.isfile(path):
        yield from records_of_file(path, longest=longest)
    elif looks_like_path(data):
        raise DataError(f"{path}: does not exist; give a file, a folder or a dataset's id")
    else:
        yield from _rows_of_dataset(str(data))


def looks_like_path(data: str | Path) -> bool:
    """Whether a name that is not here was meant as a file's, not as a dataset's."""
    text = str(data)
    return isinstance(data, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1 or bool(_kind(Path(text)))


def data_files(folder: Path, suffixes: tuple[str, ...] = TEXT_SUFFIXES) -> list[Path]:
    """The files of a folder that are read, in order; what is left out is said, once in a process.

    Hidden ones, those of another kind, and a license or readme are left out.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); check its permissions") from error

    files, left = [], {}
    for here, folders, names in os.walk(folder, onerror=refuse):
        for name in [*folders, *names]:
            path = Path(here, name)
            reason = _why_left_out(path, suffixes)
            if reason:
                left.setdefault(reason, []).append(str(path.relative_to(folder)))
            elif name in names:
                files.append(path)
        folders[:] = [name for name in folders if not name.startswith(".")]
    fates = [f"{_some(sorted(paths))} ({reason})" for reason, paths in left.items()]
    if not files:
        there = f"; there is {', '.join(fates)}" if fates else ""
        raise DataError(f"{folder}: holds no {', '.join(suffixes)} file (nor .gz of one){there}; give another text")
    files.sort()
    read = f"{folder}: {counted(len(files), 'file')} read, {_some([str(file.relative_to(folder)) for file in files])}"
    _say(f"{read}; left out: {', '.join(fates)}" if fates else read, bool(fates))
    return files


@functools.cache
def _say(message: str, warn: bool) -> None:
    logger.log(logging.WARNING if warn else logging.INFO, "%s", message)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _why_left_out(path: Path, suffixes: tuple[str, ...]) -> str | None:
    if path.name.startswith("."):
        return "hidden"
    if path.is_dir():
        return "a link to a folder" if path.is_symlink() else None
    if not path.is_file():
        return "no regular file"
    if _kind(path) not in suffixes:
        return "of another kind"
    if _kind(path) == ".txt" and path.stem.split(".")[0].lower() in _ABOUT:
        return "about the files, not of them"
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        return "needs palimpsa-surgery[train]"
    return None


def _kind(path: Path) -> str | None:
    if path.suffix == ".gz":
        suffix = Path(path.stem).suffix
        return suffix if suffix in TEXT_SUFFIXES and suffix != ".parquet" else None
    return path.suffix if path.suffix in TEXT_SUFFIXES else None


def records_of_file(
    path: Path, *, most_bytes: int | None = None, longest: int | None = None
) -> Iterator[tuple[str, Any]]:
    """The records of one file, each with where it stands.

    Args:
        path: a `.jsonl`, `.json` (a list counts as its items) or `.txt`, with or without `.gz`, or a `.parquet`.
        most_bytes: read no more than so many, decompressed: the whole lines of them in a `.jsonl`.
        longest: characters of a `.txt` after which it is cut.

    Raises:
        DataError: what cannot be read, as `file:line`; a file of another kind that has more than `most_bytes`.
    """
    kind = _kind(path)
    if kind is None:
        raise DataError(f"{path}: is of no known kind; expected {', '.join(TEXT_SUFFIXES)}, or .gz of the first three")
    found = False
    try:
        for record in _rows_of_parquet(path, most_bytes) if kind == ".parquet" else _read(path, most_bytes, longest):
            found = True
            yield record
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); fetch or write the file again") from error
    if not found:
        raise DataError(f"{path}: holds no text; give a file with at least one document")


def _read(path: Path, most: int | None, longest: int | None) -> Iterator[tuple[str, Any]]:
    kind = _kind(path)
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as stream:
        if kind == ".jsonl":
            for number, line in enumerate(stream if most is None else _first_lines(stream, most), 1):
                where = f"{path}:{number}"
                text = _decode(line, where, first=number == 1)
                if text.strip():
                    yield where, _parse(text, where)
            return
        bounds = [most, 4 * longest if kind == ".txt" and longest else None]
        content = stream.read(min((bound + 1 for bound in bounds if bound is not None), default=-1))
        if most is not None and len(content) > most:
            raise DataError(f"{path}: has more than {human_bytes(most)}; give it as .jsonl, which is read line by line")
        text = _decode(content, str(path), first=True, whole=bounds[1] is None or len(content) <= bounds[1])
    if not text.strip():
        return
    if kind == ".txt":
        yield str(path), text[:longest]
        return
    value = _parse(text, str(path), whole_file=True)
    if isinstance(value, list):
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
    else:
        yield str(path), value


def _first_lines(stream: Any, most: int) -> Iterator[bytes]:
    """The whole lines among the first `most` bytes."""
    while most > 0 and (line := stream.readline(most)):
        most -= len(line)
        if most > 0 or line.endswith(b"\n"):
            yield line


def _decode(content: bytes, where: str, *, first: bool, whole: bool = True) -> str:
    """UTF-8 text, without the mark that some editors put first; what is not `whole` may end inside a character."""
    try:
        return codecs.getincrementaldecoder("utf-8-sig" if first else "utf-8")().decode(content, final=whole)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not UTF-8 ({error.reason} at byte {error.start}); convert the file") from error


def _parse(text: str, where: str, *, whole_file: bool = False) -> Any:
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():  # only an escape brings in half of a pair
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        where = f"{where}:{error.lineno}" if whole_file else where
        raise DataError(f"{where}: is not JSON ({error.msg}); expected an object with a text") from error
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise DataError(
            f"{where}: holds half a character (\\u{ord(half):04x} without its other half); remove it"
        ) from error
    except RecursionError as error:
        raise DataError(f"{where}: is JSON nested too deep to be read; correct or remove it") from error
    except ValueError as error:
        raise DataError(f"{where}: holds a number of too many digits to be read; shorten or remove it") from error
    return value


def _rows_of_parquet(path: Path, most: int | None) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(f"{path}: reading parquet needs pyarrow; install palimpsa-surgery[train]") from error
    if most is not None and path.stat().st_size > most:
        raise DataError(f"{path}: has more than {human_bytes(most)}")
    try:
        with ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(256) for row in batch.to_pylist())
            for index, row in enumerate(rows):
                yield f"{path}[{index}]", row
    except pyarrow.ArrowException as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise DataError(f"{path}: cannot be read ({reason}); fetch or write the file again") from error


def _rows_of_dataset(name: str) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{name}: is no file, and reading it as a dataset of the Hub needs the package datasets; "
            f"install palimpsa-surgery[train]"
        ) from error
    check_network()
    repository, _, rest = name.partition(":")
    config, _, split = rest.rpartition(":")
    try:
        rows = datasets.load_dataset(repository, config or None, split=split or "train", streaming=True)
        for index, row in enumerate(rows):
            yield f"{name}[{index}]", row
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{name}: is neither a file here nor a dataset that can be loaded ({reason})") from error
