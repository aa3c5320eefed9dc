"""Training checkpoints: what trains, the optimizer and the position, written whole or not at all, by name.

Everything is kept as full tensors under parameter names, so that a run may go on with another number of processes or
another way of sharding. The source's frozen tensors are not repeated. `torch.distributed.checkpoint.state_dict` would
gather the same, but steps the optimizer with zero gradients before it restores its state, and wants the hyperparameters
of a run in the file, where a run that goes on has its recipe.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ...base.errors import OutputError, SchemaError, TrainingError
from ...base.files import load_json, output_folder, write_json
from ...surgery.checkpoint.keymap import strip_wrappers

logger = logging.getLogger(__name__)

VERSION = 1
_TENSORS, _STATE = "training.safetensors", "state.json"


@dataclass(frozen=True)
class Position:
    """Where a run is.

    Attributes:
        step: optimizer steps done.
        tokens: positions of the training stream read.
        model: key of what trains (names, shapes, swapped layers).
        source: fingerprint of the model that is trained.
        data: key of the training text.
        seed: of the order of the documents and of dropout.
        validation: key of the validation windows; None where an earlier release has not recorded it.
    """

    step: int
    tokens: int
    model: str
    source: str
    data: str
    seed: int
    validation: str | None = None


def model_key(module: nn.Module, layers: list[int]) -> str:
    """Key of a model's swapped layers and of the names and shapes of its parameters that train."""
    shapes = sorted((name, list(p.shape)) for name, p in module.named_parameters() if p.requires_grad)
    return hashlib.sha256(json.dumps([layers, shapes]).encode()).hexdigest()


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint with the highest step in `RUN/checkpoints`, or None."""
    return max(filter(_is_whole, _step_folders(folder)), key=_step_of, default=None)


def save_checkpoint(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    position: Position,
    *,
    keep: int,
    main: bool = True,
) -> Path:
    """Writes `folder/step-N` and removes the oldest beyond `keep`. Every process calls it; the main one writes.

    Raises:
        TrainingError: the disk is full, or refuses otherwise; earlier checkpoints are as they were.
    """
    tensors = _training_tensors(module, optimizer, keep_tensors=main)
    target = folder / f"step-{position.step}"
    if not main:
        return target
    try:
        with output_folder(target, force=True) as temporary:
            save_file(tensors, temporary / _TENSORS)
            write_json(temporary / _STATE, _state(position, tensors))
    except (OSError, OutputError, SafetensorError) as error:
        before = latest_checkpoint(folder)
        rest = f"{before.name} is whole and --resume goes on from it" if before else "there is no earlier one"
        raise TrainingError(f"checkpoint {target.name}: could not be written ({error}); {rest}") from error
    prune(folder, keep)
    return target


def prune(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints, and what killed runs left half-written or half-removed.

    A folder of any other name, such as a checkpoint that a user renamed to keep it, is left alone.
    """
    kept = sorted(filter(_is_whole, _step_folders(folder)), key=_step_of)[-keep:]
    outdated = [path for path in _step_folders(folder) if path not in kept]
    for path in [*outdated, *folder.glob(".step-*.tmp-*")]:
        shutil.rmtree(path, ignore_errors=True)


def read_position(path: Path) -> Position:
    """Where the run was when it wrote the checkpoint `path`.

    Raises:
        TrainingError: `state.json` is of another version, or damaged.
    """
    return _read_state(path)[0]


def _state(position: Position, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The content of `state.json`: the position, the checksum of each tensor as it was in memory, and of all that."""
    content = {**asdict(position), "tensors": {name: _checksum(tensor) for name, tensor in tensors.items()}}
    return {"schema_version": VERSION, **content, "checksum": _checksum_of_state(content)}


def _read_state(path: Path) -> tuple[Position, dict[str, int] | None]:
    """Position and checksums by tensor; None for those where an earlier release has not recorded any."""
    try:
        state = load_json(path / _STATE)
    except SchemaError as error:
        raise _damaged(path, _STATE, f"cannot be read ({error})") from error
    version = state.pop("schema_version", None) if isinstance(state, dict) else None
    if version != VERSION:
        raise TrainingError(f"{path.name}/{_STATE}: is of another version than {VERSION}; start the run again")
    checksum = state.pop("checksum", None)
    if checksum is not None and checksum != _checksum_of_state(state):
        raise _damaged(path, _STATE, "is not as it was written (its checksum is another)")
    checksums = state.pop("tensors", None)
    try:
        return Position(**state), checksums
    except TypeError as error:  # a key too few or too many
        raise _damaged(path, _STATE, f"does not hold a position ({error})") from error


def _checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's dtype, shape and values."""
    begin = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode())
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy(), begin)


def _checksum_of_state(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _damaged(path: Path, file: str, what: str) -> TrainingError:
    """The sentence on a file of the checkpoint `path`, and how the run goes on without that checkpoint."""
    earlier = [one for one in _step_folders(path.parent) if _is_whole(one) and _step_of(one) < _step_of(path)]
    if earlier:
        advice = f"delete {path.name} and resume: the run goes on from {max(earlier, key=_step_of).name}"
    else:
        advice = "there is no earlier checkpoint, so put an undamaged copy back or start the run again with --force"
    return TrainingError(f"{path.name}/{file}: {what}; {advice}")


def load_checkpoint(
    path: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    expected: Position,
    is_source: Callable[[str], bool] | None = None,
) -> Position:
    """Puts a checkpoint's values into `module` and `optimizer`.

    Args:
        path: a checkpoint folder.
        module: the prepared module, with the same parameters training.
        optimizer: its optimizer.
        expected: the keys and the seed of the run that resumes.
        is_source: whether a fingerprint, of an earlier release perhaps, is the model's; by default equality is asked.

    Raises:
        TrainingError: other layers are swapped, other parameters train, the text or the seed is another, or the
            file is damaged.
    """
    position, checksums = _read_state(path)
    if is_source is not None and is_source(position.source):
        position = replace(position, source=expected.source)
    if position.validation is None:
        position = replace(position, validation=expected.validation)
    for field, what in (
        ("model", "other layers are swapped, or other parameters train"),
        ("source", "the model is another"),
        ("data", "the training text, or the tokenizer, is another"),
        ("seed", "the seed is another"),
        ("validation", "the validation text is another, so the losses on it would be no curve,"),
    ):
        if getattr(position, field) != getattr(expected, field):
            raise TrainingError(
                f"{path.name}: cannot be resumed, {what} than when it was written; use the run's own model and"
                " recipe, or start a new run folder"
            )
    try:
        with safe_open(path / _TENSORS, framework="pt") as stored:
            names = _stored_names(path, stored.keys(), module, checksums)
            _restore(lambda name: _read_tensor(path, stored, name, checksums), names, module, optimizer)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, _TENSORS, f"cannot be read ({error})") from error
    return position


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter of what trains, without the prefixes that wrappers add."""
    return {strip_wrappers(name): parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def full_tensor(tensor: Tensor) -> Tensor:
    """A sharded tensor as a whole one (a collective call), any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _training_tensors(module: nn.Module, optimizer: torch.optim.Optimizer, *, keep_tensors: bool) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in trained_parameters(module).items():
        values = {"param": parameter.detach(), **optimizer.state.get(parameter, {})}
        for kind, value in values.items():
            whole = full_tensor(value) if isinstance(value, Tensor) else torch.tensor(value)
            if keep_tensors:
                tensors[f"{kind}/{name}"] = whole.detach().cpu().contiguous()
    return tensors


def _stored_names(
    path: Path, keys: Iterable[str], module: nn.Module, checksums: Mapping[str, int] | None
) -> dict[str, list[str]]:
    """What is stored of each parameter: "param" and its optimizer state.

    Raises:
        TrainingError: something is missing, or is of no parameter that trains.
    """
    names: dict[str, list[str]] = {name: [] for name in trained_parameters(module)}
    for key in (keys := sorted(keys)):  # sharded tensors are handed out in this order, the same in every process
        kind, _, name = key.partition("/")
        if name not in names:
            raise _damaged(path, _TENSORS, f"holds {key}, which the run does not train")
        names[name].append(kind)
    every = {kind for found in names.values() for kind in found}
    # A parameter that no gradient has reached has no optimizer state; one that has some has all of it.
    expected = {f"{kind}/{name}" for name, found in names.items() for kind in (every if len(found) > 1 else ("param",))}
    absent = sorted(expected.union(checksums or ()).difference(keys))
    if absent:
        raise _damaged(path, _TENSORS, f"lacks {absent[0]}")
    return names


def _read_tensor(path: Path, stored: Any, key: str, checksums: Mapping[str, int] | None) -> Tensor:
    tensor = stored.get_tensor(key)
    if checksums is not None and _checksum(tensor) != checksums.get(key):
        raise _damaged(path, _TENSORS, f"{key} is not as it was written (its checksum is another)")
    return tensor


@torch.no_grad()
def _restore(
    read: Callable[[str], Tensor], names: Mapping[str, list[str]], module: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    for name, parameter in trained_parameters(module).items():
        state = {}
        for kind in names[name]:
            value = read(f"{kind}/{name}")
            if kind == "param":
                parameter.copy_(_like(value, parameter))
            else:
                state[kind] = value if value.dim() == 0 else _like(value, parameter)
        if state:
            optimizer.state[parameter] = state


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """`value` on the device, and with the sharding, of `parameter`."""
    if isinstance(parameter, DTensor):
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value.to(parameter.device)


def _step_folders(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()]


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _is_whole(path: Path) -> bool:
    return (path / _STATE).is_file()
