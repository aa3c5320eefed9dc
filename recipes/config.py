"""Recipes by name or file, with changes from the command line; their schema is `base/recipe.py`."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ..base.errors import UsageError
from ..base.files import load_yaml, named_path
from ..base.recipe import Recipe
from ..base.schemas import dump_yaml, validate_model

MODES = ("full", "new", "new+swapped", "lora", "qlora")
CONFIGS = Path(__file__).parent / "configs"


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of the recipes that come with the package."""
    return {path.stem: path for path in sorted(CONFIGS.glob("*.yaml"))}


def find_recipe(name_or_file: str | Path) -> Path:
    """The file of a recipe: a path, or the name of a shipped one; `UsageError` lists the shipped ones."""
    path = named_path(name_or_file, "recipe")
    if path.is_file():
        return path
    shipped = shipped_recipes()
    if str(name_or_file) in shipped:
        return shipped[str(name_or_file)]
    near = difflib.get_close_matches(str(name_or_file), shipped, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"shipped are {', '.join(shipped)}"
    raise UsageError(f"recipe {str(name_or_file)!r}: is neither a file nor a shipped recipe; {hint}")


def load_recipe(recipe: str | Path | dict[str, Any] | Recipe, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe and applies `key=value` overrides (`data.seq_len=512`; values are read as YAML).

    Args:
        recipe: name of a shipped recipe, a YAML file, a mapping, or a recipe.
        overrides: changes, later ones win.

    Raises:
        UsageError: every problem of file and overrides at once, each with its key, the nearest valid one for a
            misspelt key.
    """
    if isinstance(recipe, (Recipe, dict)):
        values = recipe.model_dump(mode="json") if isinstance(recipe, Recipe) else dict(recipe)
        values.setdefault("schema_version", 1)
        where = "recipe"
    else:
        path = find_recipe(recipe)
        values, where = load_yaml(path), path.name
    problems = []
    if isinstance(values, dict):
        for override in overrides:
            problem = _apply(values, override)
            if problem:
                problems.append(f"override {override!r}: {problem}")
    try:
        result = validate_model(Recipe, values, where, error=UsageError)
    except UsageError as error:
        problems.append(str(error))
    if problems:
        raise UsageError("; ".join(problems))
    return result


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML with every key written out: what a run folder keeps."""
    return dump_yaml(recipe)


def _apply(values: dict, override: str) -> str | None:
    """Sets one dotted key in `values`; returns what is wrong with the override, if anything."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        return "expected key=value, for example lr=1e-4 or data.seq_len=512"
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):  # the date 2024-99-99, a number of thousands of digits
        return f"the value {text[:100]!r} is not YAML; quote it"
    *parents, last = key.strip().split(".")
    for parent in parents:
        inner = values.get(parent)
        inner = dict(inner) if isinstance(inner, dict) else {}
        values[parent] = inner
        values = inner
    values[last] = value
    # A length in steps replaces one in tokens and the other way round.
    if not parents and value is not None and last in ("steps", "tokens"):
        values["tokens" if last == "steps" else "steps"] = None
    return None
