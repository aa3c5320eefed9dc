"""What was given for a model and is none: what it is, and the name that was meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import PalimpsaError
from .files import RECIPE, RUN_PARTS, load_json, load_yaml

_TRAINER = ("trainer_state.json", "training_args.bin", "optimizer.*", "scheduler.*", "rng_state*", "random_states_*")
_STAGE_FILES = (
    ({"layers", "seq_len", "fingerprint"}, "a profile", "with --profile"),
    ({"layers", "beta_rank"}, "a plan", "with --plan"),
    ({"suites"}, "the report of an evaluation", "to push with --eval"),
    ({"data"}, "a recipe", "with --recipe"),
)
"""Keys by which the files of stages are told, what each is, and where it is given."""


def has_config(folder: Path) -> bool:
    """Whether a model's config lies in the folder, in either of its names."""
    return any((folder / name).is_file() for name in ("config.json", "params.json"))


def other_folder(folder: Path) -> str | None:
    """A sentence on a folder without a model in it that is known to be something else; None where it is not."""
    if any(folder.glob("adapter_model*")) or (folder / "adapter_config.json").is_file():
        beside = folder.parent / "final"
        instead = f", or give {beside}, where it is merged" if folder.name == "adapter" and has_config(beside) else ""
        return f"{folder}: holds an adapter, not a model; merge it into its base first (palimpsa merge){instead}"
    if (folder / "training.safetensors").is_file() or (folder / "state.json").is_file():
        return f"{folder}: is a checkpoint that a run goes on from, not a model; {_trained_by(folder.parent.parent)}"
    if any(folder.glob("step-*/state.json")):
        return f"{folder}: holds the checkpoints of a run, not a model; {_trained_by(folder.parent)}"
    if sum((folder / name).exists() for name in RUN_PARTS) > 1:
        return f"{folder}: is a run folder, not a model; {_trained_by(folder)}"
    saves = sorted(folder.glob("checkpoint-*"), key=lambda path: (len(path.name), path.name))
    if saves:
        return f"{folder}: holds checkpoints of a Trainer ({len(saves)}), not a model; give one, such as {saves[-1]}"
    if any(path for pattern in _TRAINER for path in folder.glob(pattern)):
        return (
            f"{folder}: is a checkpoint of a Trainer or of accelerate and has no config.json; copy config.json and the "
            "tokenizer's files of the model that was trained into it"
        )
    return None


def other_file(path: Path) -> str:
    """The sentence on a file that was given where a model's folder is expected."""
    for keys, what, where in _STAGE_FILES:
        if keys <= set(_content(path)):
            return f"{path}: is {what}, expected the folder of a model; give that folder, and this file {where}"
    return f"{path}: is a file, expected the folder that holds it; give {path.parent}"


def _trained_by(run: Path) -> str:
    """What to give of the run folder `run`."""
    if has_config(run / "final"):
        return f"give {run / 'final'}, the model that was trained"
    if (run / RECIPE).is_file():
        return f"the run has not come to its end, go on with it (palimpsa finetune -o {run} --resume)"
    return "give final/ of its run, the model that was trained"


def _content(path: Path) -> dict[str, Any]:
    """The first level of a file that a stage may have written; {} for any other."""
    read = {".json": load_json, ".yaml": load_yaml, ".yml": load_yaml}.get(path.suffix)
    try:
        content = read(path) if read is not None else {}
    except PalimpsaError:
        return {}
    return content if isinstance(content, dict) else {}
