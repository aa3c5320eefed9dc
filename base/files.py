"""Files that stages exchange: written whole or not at all, strict JSON, readable YAML."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Hashable, Iterable, Iterator
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path
from typing import Any

import yaml

from .errors import OutputError, OutputExistsError, PalimpsaError, SchemaError, UsageError
from .siblings import lock, locked_folder, settle_leftovers, sibling, take_place

_WINDOWS = os.name == "nt"
RECIPE = "recipe.yaml"
"""How a model was trained last; what it was made from was trained by `recipe-1.yaml`, `recipe-2.yaml`, ..."""
RUN_PARTS = (RECIPE, "metrics.jsonl", "checkpoints", "adapter", "final")
"""What a run writes, the recipe first."""
LICENSE_FILES = ("LICEN[SC]E*", "licen[sc]e*", "NOTICE*", "notice*")
TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken"),
    *("chat_template.*", "tekken.json"),
)
"""Names in the folder of a model; a tokenizer may have templates in a folder of its own beside them."""
_READ_FROM_A_MODEL = (
    *("*config.json", "*.index.json", "adapter_source.json", "surgery_report.json", RECIPE, "recipe-*.yaml"),
    *TOKENIZER_FILES,
)
_PARTS_OF_A_MODEL = (
    *_READ_FROM_A_MODEL,
    *("*.safetensors", "*.bin", "*.py", "__pycache__", "additional_chat_templates", "README.md", ".gitattributes"),
    *("plan.yaml", "profile.json", "profile.png", "eval.json", "eval-*.png"),
    *LICENSE_FILES,
)
_READ_BY_NAME = (*_READ_FROM_A_MODEL, "params.json", "state.json", "meta.json")
"""Names that no report has: a file of that name is another's, whoever asks to replace it."""
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


def named_path(path: str | Path, what: str) -> Path:
    """`path` as a `Path`, `~` expanded; `UsageError` for a name that no file can have.

    An unset variable in a script gives an empty text, which `Path` would take for the current folder. A shell expands
    `~` at the start of a word alone, not in `key=~/file` or in a recipe.
    """
    if path == "":
        raise UsageError(f"the name of the {what} is empty; give one (. is the current folder)")
    expanded = os.path.expanduser(path)
    try:
        os.stat(expanded)
    except ValueError as error:  # a NUL, or what the encoding of file names does not hold
        raise UsageError(f"{str(path)!r}: cannot be the name of the {what} ({error}); give another") from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            raise UsageError(
                f"{str(path)[:200]}: cannot be the {what} ({error.strerror}); give another name"
            ) from error
    return Path(expanded)


def dump_json(value: Any, *, ascii_only: bool = False) -> str:
    """Strict JSON: a NaN or an infinity raises `SchemaError` instead of writing what no other parser reads."""
    try:
        return json.dumps(value, indent=2, allow_nan=False, ensure_ascii=ascii_only) + "\n"
    except ValueError as error:
        raise SchemaError(f"a value to be written as JSON is not finite ({error}); nothing was written") from error


def load_json(path: str | Path) -> Any:
    """Reads strict JSON; `SchemaError` names the file and the line of what is wrong."""

    def refuse_constant(name: str) -> None:
        raise SchemaError(f"{path}: holds {name}, which is not JSON; write a finite number or null")

    def refuse_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            twin = next(key for key in keys if keys.count(key) > 1)
            raise SchemaError(f"{path}:{twin}: is given twice; keep one of them")
        return dict(pairs)

    try:
        return json.loads(_read_text(path), parse_constant=refuse_constant, object_pairs_hook=refuse_twins)
    except json.JSONDecodeError as error:
        raise SchemaError(f"{path}:{error.lineno}: is not JSON ({error.msg}); write the file again") from error
    except PalimpsaError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a list in a list in a list ...
        raise SchemaError(f"{path}: is JSON that cannot be read ({_first(error)}); write the file again") from error


def load_yaml(path: str | Path) -> Any:
    """Reads YAML with the safe loader; `SchemaError` names the file and the line of what is wrong."""
    try:
        return yaml.load(_read_text(path), Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise SchemaError(f"{path}{where}: is not YAML ({problem}); correct that line") from error
    except PalimpsaError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as error:  # such as the date 2024-99-99
        raise SchemaError(f"{path}: is YAML that cannot be read ({_first(error)}); write the file again") from error


def _first(error: Exception) -> str:
    return str(error).partition(";")[0]


class _UniqueKeyLoader(yaml.SafeLoader):
    """The safe loader; a key given twice is an error instead of the last one winning, and so is a list as a key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key is a list or a mapping, expected a name", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # editors on Windows put a mark in front
    except UnicodeDecodeError as error:
        raise SchemaError(
            f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}); write it again"
        ) from error
    except OSError as error:
        raise SchemaError(f"{path}: cannot be read ({error.strerror}); check the name and the permissions") from error


def write_bytes(path: str | Path, content: bytes) -> None:
    """Writes through a temporary sibling and a rename, so that a reader sees the old file or the whole new one.

    What is not a regular file (`/dev/stdout`) is written to directly.

    Raises:
        OutputError: the disk is full, the folder is not writable, or the path is a folder.
        UsageError: an empty name.
    """
    path = named_path(path, "output")
    with _disk_errors(path, every=True):
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(content)
            return
        path = path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        settle_leftovers(path)
        temporary = sibling(path, "tmp")
        try:
            with open(temporary, "xb") as stream:
                lock(stream.fileno())
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_text(path: str | Path, text: str) -> None:
    """`write_bytes` of UTF-8 text."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    """`dump_json` through `write_text`."""
    write_text(path, dump_json(value))


def refuse_existing(path: str | Path, *, force: bool) -> None:
    """Raises `OutputExistsError` for a file, or a folder with something in it, unless `force`.

    Also `OutputError` where nothing can be written at all, so that a run does not work for hours before it says so.
    """
    path = named_path(path, "output")
    with _disk_errors(path, every=True):
        settle_leftovers(path.resolve())
        if path.exists() and not path.is_file() and not path.is_dir():
            return  # /dev/stdout
        if not force and path.exists() and not (path.is_dir() and not any(path.iterdir())):
            kind = "folder that is not empty" if path.is_dir() else "file"
            raise OutputExistsError(f"{path}: is a {kind}; choose another output, or give --force to replace it")
        parent = next(folder for folder in path.resolve().parents if folder.exists())
        if not parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{parent} is a file")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"the folder {parent} is not writable")


def refuse_file_name(path: str | Path, *suffixes: str) -> None:
    """Raises `UsageError` for an output that is a folder, or whose name does not end in one of `suffixes`.

    The stages know what a file holds by its name, and a picture lies beside it under the same one.
    """
    file = named_path(path, "output")
    expected = f"expected a file that ends in {' or '.join(suffixes)}, such as {file.stem or 'out'}{suffixes[0]}"
    if str(path).endswith(("/", os.sep)) or file.is_dir():
        raise UsageError(f"{path}: is a folder; {expected}")
    if file.suffix not in suffixes:
        raise UsageError(f"{path}: is no name for this output; {expected}")


def refuse_to_delete(path: str | Path, *inputs: str | Path | None) -> None:
    """Raises `OutputExistsError` when a folder at `path` would delete what is read, or what somebody else has written.

    `--force` replaces a folder as a whole: an input in it, the folder that the user works in, and files of the user's
    own would be gone. A folder is this program's where it is a model, an adapter or a run, and holds no other names.

    Args:
        path: the folder to be written.
        inputs: what the run reads; a None, or a name that is no file or folder here, is passed over.
    """
    path = named_path(path, "output")
    _refuse_in_use(path, *inputs)
    if path.is_file():
        raise OutputExistsError(f"{path}: is a file, and a folder is to be written; choose another output")
    strange = not_ours(path) if path.is_dir() else []
    if strange:
        raise OutputExistsError(
            f"{path}: is no model, adapter or run folder, or holds more than that, and replacing it would delete "
            f"{', '.join(strange[:3])}{' ...' if len(strange) > 3 else ''}; choose another output, or remove it "
            "yourself"
        )


def refuse_to_replace(outputs: Iterable[str | Path], *inputs: str | Path | None, force: bool) -> None:
    """Raises `OutputExistsError` for files that a stage would write over: any without `force`, with it its inputs.

    Args:
        outputs: the file that was asked for and the pictures beside it.
        inputs: as for `refuse_to_delete`.
        force: whether files that exist are replaced.
    """
    for path in outputs:
        refuse_existing(path, force=force)
        path = named_path(path, "output")
        _refuse_in_use(path, *inputs)
        if path.is_dir():
            raise OutputExistsError(f"{path}: is a folder, and a file is to be written; choose another output")
        end = path.resolve()  # of a link, whose target is what is replaced
        if end.suffix != path.suffix:
            raise OutputExistsError(
                f"{path}: is a link to {end.name}, which is no such file; remove the link, or choose another output"
            )
        if any(fnmatch(name, pattern) for name in (path.name, end.name) for pattern in _READ_BY_NAME):
            raise OutputExistsError(
                f"{path}: is the name of a file that a model or a run is read from; choose another, such as "
                f"{path.stem}-1{path.suffix}"
            )


def not_ours(folder: Path) -> list[str]:
    """The names in a folder that keep it from being a model, an adapter or a run of this program and nothing else."""
    names = sorted(entry.name for entry in folder.iterdir())
    if RECIPE in names and not {"config.json", "adapter_config.json"} & set(names):
        return [name for name in names if name not in RUN_PARTS and not name.startswith(".")]
    model = "config.json" in names and any(name.endswith((".safetensors", ".bin")) for name in names)
    if not model and "adapter_config.json" not in names:
        return names
    return [name for name in names if not any(fnmatch(name, pattern) for pattern in _PARTS_OF_A_MODEL)]


def inputs_within(path: Path, *inputs: str | Path | None) -> list[Path]:
    """Which of `inputs` would be gone or changed with `path`: they are it, lie in it, or links in them lead into it.

    Both the name of an input counts and what it leads to, as a link in a folder that is removed is lost with it.
    """
    whole = path.resolve()
    given = [Path(os.path.expanduser(name)) for name in inputs if name is not None]
    return [one for one in given if os.path.exists(one) and any(whole in (at, *at.parents) for at in _places(one))]


def _places(path: Path) -> set[Path]:
    """Where an input lies: its own name, that of each link on the way to it or in it, and what they lead to."""
    path = Path(os.path.abspath(path))
    links = [one for one in path.iterdir() if one.is_symlink() and one.is_file()] if path.is_dir() else []
    return {
        place
        for one in (path, *path.parents, *links)
        if one == path or one.is_symlink()
        for place in (one.parent.resolve() / one.name, one.resolve())
    }


def _refuse_in_use(path: Path, *inputs: str | Path | None) -> None:
    if not path.exists():
        return
    whole, here = path.resolve(), Path.cwd()
    below = inputs_within(path, *inputs)
    below += [one for one in (here, Path.home()) if path.is_dir() and whole in (one.resolve(), *one.resolve().parents)]
    if below:
        where = "is" if below[0].resolve() == whole else "lies in"
        raise OutputExistsError(
            f"{path}: replacing this would delete {below[0].name or below[0].resolve().name}, which is in use and "
            f"{where} it; choose another output"
        )
    kept = [Path(os.path.expanduser(name)).resolve() for name in inputs if name is not None]
    around = [one for one in kept if path.is_file() and one.is_dir() and one in whole.parents]
    if around:
        raise OutputExistsError(f"{path}: lies in {around[0].name}, which is read; choose an output outside it")


@contextlib.contextmanager
def output_folder(path: str | Path, *, force: bool = False) -> Iterator[Path]:
    """Yields a temporary sibling of `path` that takes its place only when the block ends without an error.

    Every file is flushed to the disk before the folder gets its name, so a full disk is noticed in time. A killed
    process leaves at most hidden siblings (see `settle_leftovers`), never a half-valid `path`. With `force` the old
    content is replaced as a whole after the new one is complete, and put back if the new one cannot take its place.

    Raises:
        OutputExistsError: `path` exists, is not empty, and `force` is false; or it holds the current folder.
        OutputError: the disk is full or the folder cannot be moved into place.
    """
    refuse_existing(path, force=force)
    path = Path(path).resolve()
    _refuse_in_use(path)
    with contextlib.ExitStack() as held:
        with _disk_errors(path, every=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = locked_folder(path, held)
        try:
            with _disk_errors(path, every=False):
                yield temporary
            with _disk_errors(path, every=True):
                for file in _files_below(temporary):
                    flush(file)
                refuse_existing(path, force=force)  # another process may have been faster
                take_place(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _files_below(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]


def flush(file: Path) -> None:
    """fsync: an error of a delayed write shows here, not after the rename."""
    handle = os.open(file, os.O_RDWR if _WINDOWS else os.O_RDONLY)  # Windows flushes none that is only read
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _disk_errors(path: Path, *, every: bool) -> Iterator[None]:
    """Turns an `OSError` about the disk (or `every` one) into an `OutputError` that says nothing was left behind."""
    try:
        yield
    except PalimpsaError:
        raise
    except OSError as error:
        if not every and error.errno not in _DISK_ERRORS:
            raise
        reason = error.strerror or str(error)
        raise OutputError(
            f"{path}: cannot be written ({reason}); what was there is untouched, make room or choose another output"
        ) from error
