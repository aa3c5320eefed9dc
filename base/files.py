"""Files that stages exchange: written whole or not at all, strict JSON, readable YAML."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from .errors import OutputExistsError, SchemaError


def dump_json(value: Any) -> str:
    """Strict JSON: a NaN or an infinity raises `SchemaError` instead of writing what no other parser reads."""
    try:
        return json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    except ValueError as error:
        raise SchemaError(f"a value to be written as JSON is not finite ({error}); nothing was written") from error


def load_json(path: str | Path) -> Any:
    """Reads strict JSON; `SchemaError` names the file and the line of what is wrong."""
    path = Path(path)

    def refuse_constant(name: str) -> None:
        raise SchemaError(f"{path.name}: holds {name}, which is not JSON; write a finite number or null")

    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_constant)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        where = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise SchemaError(f"{path.name}{where}: is not JSON ({error}); write the file again") from error


def load_yaml(path: str | Path) -> Any:
    """Reads YAML with the safe loader; `SchemaError` names the file and the line of what is wrong."""
    path = Path(path)
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise SchemaError(f"{path.name}{where}: is not YAML ({problem}); correct that line") from error


def write_text(path: str | Path, text: str) -> None:
    """Writes through a temporary sibling and a rename, so that a reader sees the old file or the whole new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.tmp-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_json(path: str | Path, value: Any) -> None:
    """`dump_json` through `write_text`."""
    write_text(path, dump_json(value))


def refuse_existing(path: str | Path, *, force: bool) -> None:
    """Raises `OutputExistsError` for a file, or a folder with something in it, unless `force`."""
    path = Path(path)
    if force or not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    kind = "folder that is not empty" if path.is_dir() else "file"
    raise OutputExistsError(f"{path}: is a {kind}; choose another output, or give --force to replace it")


@contextlib.contextmanager
def output_folder(path: str | Path, *, force: bool = False) -> Iterator[Path]:
    """Yields a temporary sibling of `path` that takes its place only when the block ends without an error.

    A killed process leaves at most a sibling named `.NAME.tmp-*`, never a half-valid `path`. With `force` the old
    content is replaced as a whole, after the new one is complete.

    Raises:
        OutputExistsError: `path` exists, is not empty, and `force` is false.
    """
    path = Path(path)
    refuse_existing(path, force=force)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.tmp-"))
    os.chmod(temporary, 0o755)
    try:
        yield temporary
        replaced = None
        if path.exists():
            replaced = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.tmp-old-"))
            os.replace(path, replaced / "old")
        os.replace(temporary, path)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
