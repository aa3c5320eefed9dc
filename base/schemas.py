"""Schemas of the files that users write and stages exchange: strict, versioned, and errors a person can act on."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml

from .errors import PalimpsaError, SchemaError
from .files import dump_json, load_json, load_yaml, named_path, write_text


class StrictPart(pydantic.BaseModel):
    """A part of a file: an unknown key is an error, and so is a number that is not finite."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class StrictModel(StrictPart):
    """A whole file. A later version of the schema overrides `schema_version` with its own default.

    The default of `schema_version` is the version this package writes. `upgrade` turns the data of an older version
    into that of the current one; until there is one to read, every other version is refused by name.
    """

    schema_version: int = 1

    @pydantic.field_validator("schema_version")
    @classmethod
    def _only_the_current_version(cls, value: int) -> int:
        if value != current_version(cls):
            raise ValueError(f"is {value}; this release works with version {current_version(cls)}")
        return value

    @classmethod
    def upgrade(cls, data: dict[str, Any], version: int) -> dict[str, Any]:
        """Data of an older `version` as data of the current one; a subclass that reads old files overrides it."""
        raise ValueError(
            f"is {version}, which this release no longer reads (it writes {current_version(cls)}); write the file again"
        )


M = TypeVar("M", bound=StrictPart)


def current_version(cls: type[StrictModel]) -> int:
    """The version of the schema that this release writes."""
    return cls.model_fields["schema_version"].default


def validate_model(
    cls: type[M],
    data: Any,
    where: str,
    *,
    error: type[PalimpsaError] = SchemaError,
    options: Collection[str] = (),
) -> M:
    """`data` as a `cls`, every fault of it named in one message.

    Args:
        cls: the schema.
        data: what a parser returned.
        where: the file that the message names.
        error: the class to raise.
        options: keys that were given on the command line; a fault names them as `--key`.

    Raises:
        PalimpsaError: of class `error`; each fault as `where:key: what is wrong`, with the nearest valid key for a
            key that does not exist.
    """
    if not isinstance(data, dict):
        kind = "empty" if data is None else f"a {type(data).__name__}"
        raise error(f"{where}: is {kind}, expected keys and values of {_title(cls)} ({', '.join(cls.model_fields)})")
    if issubclass(cls, StrictModel):
        data = _with_current_version(cls, data, where, error)
    try:
        return cls.model_validate(data)
    except pydantic.ValidationError as failure:
        faults = [f"{_place(where, fault['loc'], options)}: {_sentence(cls, fault)}" for fault in failure.errors()]
        raise error("; ".join(dict.fromkeys(faults))) from None


def read_model(cls: type[M], path: str | Path, *, error: type[PalimpsaError] = SchemaError) -> M:
    """Reads a `.json`, `.yaml` or `.yml` file as a `cls`.

    Raises:
        UsageError: an empty name.
        SchemaError: the file does not exist, cannot be parsed, or its version is not read.
        PalimpsaError: of class `error`, for faults of its content.
    """
    path = named_path(path, cls.__name__.lower())
    data = load_json(path) if _is_json(path) else load_yaml(path)
    return validate_model(cls, data, str(path), error=error)


def write_model(model: StrictPart, path: str | Path) -> None:
    """Writes `model` whole or not at all, as JSON or YAML by the suffix of `path`."""
    path = Path(path)
    write_text(path, dump_json(model.model_dump(mode="json")) if _is_json(path) else dump_yaml(model))


def dump_yaml(model: StrictPart) -> str:
    """`model` as YAML in the order of its fields: short lists on one line, meant to be read and edited."""
    data = model.model_dump(mode="json")
    dump_json(data)  # refuses NaN and infinities, which YAML would write as .nan and .inf
    return yaml.dump(data, Dumper=_ReadableDumper, sort_keys=False, allow_unicode=True, width=110)


class _ReadableDumper(yaml.SafeDumper):
    """Lists of plain values in flow style, everything else in block style."""


def _represent_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    flat = all(not isinstance(value, (list, dict)) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=flat)


_ReadableDumper.add_representer(list, _represent_list)


def _is_json(path: Path) -> bool:
    if path.suffix in (".yaml", ".yml"):
        return False
    if path.suffix == ".json":
        return True
    raise SchemaError(f"{path}: has no suffix that tells its format; name it .json or .yaml")


def _title(cls: type[pydantic.BaseModel]) -> str:
    return f"a {cls.__name__.lower()}"


def _with_current_version(
    cls: type[StrictModel], data: dict[str, Any], where: str, error: type[PalimpsaError]
) -> dict[str, Any]:
    version, current = data.get("schema_version"), current_version(cls)
    if version is None:
        raise error(f"{where}:schema_version: is missing; add schema_version: {current}")
    check_version(version, current, where, error=error)
    if version < current:
        try:
            data = {**cls.upgrade(dict(data), version), "schema_version": current}
        except ValueError as failure:
            raise SchemaError(f"{where}:schema_version: {failure}") from failure
    return data


def check_version(version: Any, current: int, where: str, *, error: type[PalimpsaError] = SchemaError) -> None:
    """Refuses a `schema_version` that is no number, or newer than the `current` one."""
    if not isinstance(version, int) or isinstance(version, bool):
        raise error(f"{where}:schema_version: is {version!r}, expected a whole number such as {current}")
    if version > current:
        raise SchemaError(
            f"{where}:schema_version: is {version}, newer than the {current} this release knows; "
            f"update palimpsa-surgery to read it"
        )


def option_name(key: str) -> str:
    """`beta_groups` -> `--beta-groups`."""
    return f"--{key.replace('_', '-')}"


def _place(where: str, location: tuple[str | int, ...], options: Collection[str]) -> str:
    if location and location[0] in options:
        return option_name(str(location[0]))
    return ":".join([where, ".".join(str(part) for part in location)]) if location else where


def _sentence(cls: type[pydantic.BaseModel], fault: Any) -> str:
    """One pydantic error as one sentence."""
    value, context = fault.get("input"), fault.get("ctx", {})
    shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
    kind = fault["type"]
    if kind == "extra_forbidden":
        known = _keys_at(cls, fault["loc"][:-1])
        near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(known)}"
        return f"there is no such key; {hint}"
    if kind == "missing":
        return "is missing; add it"
    if kind == "value_error":
        return str(context.get("error", fault["msg"]))
    if kind == "literal_error":
        return f"is {shown}, expected {context['expected']}"
    if kind == "too_short":
        return f"is {shown}, expected at least {context['min_length']} entry in it"
    if kind == "tuple_type":
        return f"is {shown}, expected a list"
    message = fault["msg"].removeprefix("Input should be ")
    return f"is {shown}, expected {message}"


def _keys_at(cls: type[pydantic.BaseModel], location: tuple[str | int, ...]) -> list[str]:
    """The valid keys of the part of the schema at `location`."""
    here: Any = cls
    for part in location:
        if not _is_model(here) or not isinstance(part, str) or part not in here.model_fields:
            continue  # an index of a list, a key of a mapping, or the name of a union's member
        here = _inner_model(here.model_fields[part].annotation)
    return list(here.model_fields) if _is_model(here) else []


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


def _inner_model(annotation: Any) -> Any:
    """The schema inside `X | None`, `list[X]`, `dict[str, X]` and their combinations, or None."""
    if _is_model(annotation):
        return annotation
    origin = typing.get_origin(annotation)
    if origin is None and not isinstance(annotation, types.UnionType):
        return None
    return next((found for inner in typing.get_args(annotation) if (found := _inner_model(inner))), None)
