"""The run folder before training: whether a run may start or go on there, and making room for a new one."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...base.console import human_bytes
from ...base.errors import OutputError, OutputExistsError, UsageError
from ...base.files import RECIPE, RUN_PARTS, inputs_within, write_text
from ...base.records import TEXT_SUFFIXES
from ...base.siblings import settle_leftovers, try_lock
from ..data.documents import cache_folder
from .checkpointing import latest_checkpoint, prune
from .recipe import Recipe, dump_recipe, load_recipe

logger = logging.getLogger(__name__)

"""What a run writes, the recipe first; nothing else in a run folder is ever touched."""

MAY_CHANGE = frozenset(
    {
        *("description", "steps", "tokens"),
        *("data.train", "data.val", "data.tokenizer", "data.cache"),
        *("micro_batch_size", "gradient_checkpointing", "loss", "require_kernels", "deterministic", "lora.force"),
        *("log_every", "importance_every", "eval_every", "save_every", "keep", "save_dtype", "trackers"),
    }
)
"""What a run that goes on may be told anew: its length (upward), places of files (the content of the training text is
compared by its key), how the same numbers are computed, and what is logged and saved."""


def check_run_folder(
    out: Path, recipe: Recipe, *, resume: bool, force: bool, model: Path, recipe_file: Path | None = None
) -> None:
    """Refuses what must not start, before anything is made or removed.

    Args:
        out: the run folder.
        recipe: of the call.
        resume: go on with the run in `out`.
        force: replace it.
        model: folder of the model to train.
        recipe_file: that the recipe was read from.

    Raises:
        OutputExistsError: `out` is a file, holds a run although neither was asked for, has a link where the old run is
            removed, or an input is in what is removed or replaced.
        UsageError: there is nothing to go on from, or the recipe is another than the run's.
    """
    if out.is_file():
        raise OutputExistsError(f"{out}: is a file; give a folder for the run")
    if model.resolve() in (out.resolve(), *out.resolve().parents):
        raise OutputExistsError(f"{out}: is the model to train, or inside it; give a run folder of its own")
    used = [name for name in RUN_PARTS if os.path.lexists(out / name)]
    if resume:
        _check_resume(out, recipe)
    elif used and not force:
        raise OutputExistsError(
            f"{out}: holds a run ({', '.join(used)}); give --resume to go on, or --force to replace it"
        )
    _refuse_inputs(out, recipe, model, recipe_file, resume=resume)
    if used and RUN_PARTS[0] not in used and not resume:
        raise OutputExistsError(
            f"{out}: holds {', '.join(used)} and no {RUN_PARTS[0]}, so no run wrote that; give another run folder, or "
            "remove it yourself"
        )
    linked = [name for name in used if (out / name).is_symlink()]
    if linked and not resume:
        raise OutputExistsError(
            f"{out / linked[0]}: is a link, and a run that is replaced has files and folders of its own; remove the "
            "link yourself, or give another run folder"
        )


def _refuse_inputs(out: Path, recipe: Recipe, model: Path, recipe_file: Path | None, *, resume: bool) -> None:
    """A run that goes on keeps its checkpoints, and may be told its own recipe.yaml."""
    data = recipe.data
    inputs = {
        "the model to train": [model],
        "data.train": _with_files(data.train),
        "data.val": _with_files(data.val),
        "data.tokenizer": [data.tokenizer],
        "data.cache": [cache_folder(data.cache)],
        "the recipe": [] if resume else [recipe_file],
    }
    gone = ("metrics.jsonl", "adapter", "final") if resume else RUN_PARTS
    for part in (out / name for name in gone):
        for what, paths in inputs.items():
            lost = inputs_within(part, *paths) if part.exists() else []
            if lost:
                itself = lost[0].resolve() == part.resolve()
                raise OutputExistsError(
                    f"{out}: replacing this run would delete {part.name}, "
                    f"{what if itself else f'and {what} ({lost[0].name}) in it'}; give another run folder, or put that "
                    "elsewhere"
                )


def _with_files(texts: str | list[str] | None) -> list[str | Path]:
    """Texts and, of folders, the files in them that are read: a run folder may lie there too."""
    found: list[str | Path] = []
    for text in [texts] if isinstance(texts, str) else texts or []:
        path = Path(os.path.expanduser(text))
        below = path.rglob("*") if path.is_dir() else ()
        found += [text, *(one for one in below if one.name.removesuffix(".gz").endswith(TEXT_SUFFIXES))]
    return found


def _check_resume(out: Path, recipe: Recipe) -> None:
    begun = out / RECIPE
    if not begun.is_file():
        raise UsageError(f"{out}: --resume finds no run here (no recipe.yaml); start it without --resume")
    if latest_checkpoint(out / "checkpoints") is None and (out / "final").exists():
        raise UsageError(
            f"{out}: --resume finds no checkpoint, and from the start it would replace final/; "
            "give another run folder, or --force to run again"
        )
    before = load_recipe(begun)
    changed = recipe_changes(before, recipe)
    if changed:
        raise UsageError(
            f"{out}: was started with another recipe ({'; '.join(changed)}); go on with the recipe.yaml that is there, "
            "or start a new run folder"
        )


def recipe_changes(before: Recipe, now: Recipe) -> list[str]:
    """What a run that goes on would do otherwise than it was started to: "lr: 1e-05, now 0.001" for each such key."""
    first, second = _flat(before.model_dump(mode="json")), _flat(now.model_dump(mode="json"))
    found = [
        f"{key}: {first.get(key)}, now {second.get(key)}"
        for key in sorted(first.keys() | second.keys())
        if key not in MAY_CHANGE and first.get(key) != second.get(key)
    ]
    begun, asked = before.total_steps(), now.total_steps()
    if asked < begun:
        found.append(f"steps: {begun}, now {asked}, and a run may only grow longer")
    elif asked > begun and before.data.curriculum:
        found.append(f"steps: {begun}, now {asked}, which moves the stages of data.curriculum")
    return found


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def check_room(out: Path, recipe: Recipe, trained: int, model_bytes: int, *, resume: bool) -> None:
    """Refuses a run whose checkpoints and model the disk cannot hold, before the run that was there is removed.

    An estimate: what other programs write meanwhile, and quotas, nobody can tell.

    Args:
        out: the run folder, which exists.
        recipe: what is saved how often.
        trained: parameters that train; a checkpoint has each with Adam's two moments in fp32.
        model_bytes: of `final/`.
        resume: what is there stays until it is replaced.

    Raises:
        OutputError: there is less room than needed.
    """
    saves = -(-recipe.total_steps() // recipe.save_every) if recipe.save_every else 0
    there = sum(file.stat().st_size for name in RUN_PARTS for file in _files_of(out / name))
    kept = min(saves, recipe.keep + 1) * 12 * trained
    if resume:  # its checkpoints are among those counted
        kept = max(0, kept - sum(file.stat().st_size for file in _files_of(out / "checkpoints")))
    adapter = 4 * trained if recipe.mode in ("lora", "qlora") else 0
    needed, free = kept + model_bytes + adapter, shutil.disk_usage(out).free + (0 if resume else there)
    if needed > free:
        raise OutputError(
            f"{out}: the run needs about {human_bytes(needed)} ({human_bytes(kept)} for checkpoints), and the disk has "
            f"{human_bytes(free)} for it; make room, lower keep, or give a run folder on another disk"
        )


def _files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def clear_run_folder(out: Path, recipe: Recipe, *, resume: bool) -> None:
    """Removes the run that was there, or what a killed one left half-written, and writes the recipe."""
    try:
        if resume:
            prune(out / "checkpoints", recipe.keep)
            for name in ("final", "adapter"):
                settle_leftovers(out / name)
        else:
            for path in (out / name for name in reversed(RUN_PARTS)):  # the recipe last: it says whose the rest is
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        write_text(out / RECIPE, dump_recipe(recipe))
    except OSError as error:
        raise OutputError(f"{out}: cannot be written ({error.strerror or error}); give another run folder") from error


@contextlib.contextmanager
def held(out: Path) -> Iterator[None]:
    """Keeps a second run out of the folder while this one lasts; makes the folder, and takes it away if nothing came.

    The lock is the system's, on the open folder: it goes with the process, however that ends. Where there are none
    (Windows, some network disks) the run goes on without, and says so.

    Raises:
        OutputExistsError: another process trains here.
        OutputError: the folder cannot be made.
    """
    made = [path for path in (out, *out.parents) if not path.exists()]
    try:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{out}: cannot be made ({error.strerror}); give another run folder") from error
        with contextlib.ExitStack() as lock:
            free = try_lock(out, lock)
            if free is False:
                raise OutputExistsError(
                    f"{out}: another process trains here now; wait for it, or give another run folder"
                )
            if free is None:
                logger.warning("%s: cannot be locked on this system; start no second run there", out)
            yield
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # something was written
                path.rmdir()
