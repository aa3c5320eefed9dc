"""Writes safetensors a shard at a time, or copies them: what is in memory is one shard, whatever the model's size."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file

from ...base.console import counted, human_bytes, progress
from ...base.errors import CheckpointError
from ...base.files import flush, write_json

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 10**9
"""Tensors of a shard are held until it is written; a single larger tensor gets a file of its own."""
INDEX_FILE = "model.safetensors.index.json"
ADDED_FILE = "model-palimpsa.safetensors"
"""What a surgery adds to weight files that it leaves as they are."""


class TensorSpec(NamedTuple):
    """A tensor that is going to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of its data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def copy_files(
    folder: Path,
    files: Mapping[Path, Iterable[str]],
    added: list[TensorSpec],
    load: Callable[[str], torch.Tensor],
) -> list[str]:
    """Copies safetensors files byte for byte, writes tensors into one more, and an index over all.

    Args:
        folder: where to write.
        files: what to copy, with the names of the tensors in each file.
        added: what to write besides.
        load: as for `write_tensors`.

    Returns:
        The names of the weight files.

    Raises:
        CheckpointError: not enough room on the disk.
    """
    sizes = {path: path.stat().st_size for path in files}
    total = sum(sizes.values()) + sum(spec.nbytes for spec in added)
    _refuse_full_disk(folder, total)
    lone = len(files) == 1 and not added
    weight_map: dict[str, str] = {}
    with progress(total, "copying") as bar, _flushing(total) as written:
        for path, names in files.items():
            # A lone `model.safetensors` is all that transformers looks at, whatever the index beside it says.
            name = "model.safetensors" if lone else _among_others(path.name)
            with room(name, total):
                shutil.copyfile(path, folder / name)
            written(folder / name)
            weight_map |= dict.fromkeys(names, name)
            bar.update(sizes[path])
        if added:
            name = _unused(ADDED_FILE, set(weight_map.values()))
            tensors = {spec.name: _fitting(spec, load(spec.name)) for spec in added}
            with room(name, total):
                save_file(tensors, folder / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, name)
    if not lone:
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    logger.info("wrote %s in %s", human_bytes(total), counted(len(set(weight_map.values())), "file"))
    return sorted(set(weight_map.values()))


def _among_others(name: str) -> str:
    """The name of a file of weights that an index names; a download takes those that begin so."""
    if name == "model.safetensors":
        return "model-source.safetensors"
    return name if name.startswith("model-") else f"model-{name}"


def _unused(name: str, taken: set[str]) -> str:
    stem, suffix = name.rsplit(".", 1)
    names = itertools.chain([name], (f"{stem}-{number}.{suffix}" for number in itertools.count(2)))
    return next(one for one in names if one not in taken)


def _refuse_full_disk(folder: Path, total: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < total:
        raise CheckpointError(
            f"{folder}: the disk has {human_bytes(free)} free, the model needs {human_bytes(total)}; free room or "
            "choose another output"
        )


@contextlib.contextmanager
def room(file: str, total: int) -> Iterator[None]:
    """Turns an error of writing a file into a `CheckpointError`."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:  # the last one is torch's writer of zip files
        raise CheckpointError(
            f"{file}: cannot be written ({error}), {human_bytes(total)} are needed in all; free room on the disk or "
            "choose another output"
        ) from error


@contextlib.contextmanager
def _flushing(total: int) -> Iterator[Callable[[Path], None]]:
    """Yields what takes a written file: its pages go to the disk while the next is read. Waits for all at the end."""
    with ThreadPoolExecutor(1, thread_name_prefix="flush") as pool:
        waiting: list[tuple[Path, Future[None]]] = []
        yield lambda path: waiting.append((path, pool.submit(flush, path)))
        for path, done in waiting:
            with room(path.name, total):
                done.result()


def write_tensors(folder: str | Path, specs: Iterable[TensorSpec], load: Callable[[str], torch.Tensor]) -> list[str]:
    """Writes tensors as `model.safetensors`, or as numbered shards and their index.

    Args:
        folder: where to write, which is there; after an error it may hold some of the files.
        specs: what to write, in the order of the model.
        load: gives the tensor of a name, which is cast to the dtype of its spec; it may build it on the spot.

    Returns:
        The names of the weight files.

    Raises:
        CheckpointError: not enough room on the disk, or a tensor that does not fit its spec.
    """
    folder, by_name = Path(folder), {spec.name: spec for spec in specs}
    total = sum(spec.nbytes for spec in by_name.values())
    _refuse_full_disk(folder, total)
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda spec: spec.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_SHARD_BYTES,
    )
    with progress(len(by_name), "writing") as bar, _flushing(total) as written:
        for file, names in split.filename_to_tensors.items():
            tensors = {}
            for name in names:
                tensors[name] = _fitting(by_name[name], load(name))
                bar.update()
            with room(file, total):
                save_file(tensors, folder / file, metadata={"format": "pt"})
            written(folder / file)
    if split.is_sharded:
        weight_map = {name: split.tensor_to_filename[name] for name in by_name}
        write_json(folder / INDEX_FILE, {"metadata": split.metadata, "weight_map": weight_map})
    logger.info("wrote %s in %s", human_bytes(total), counted(len(split.filename_to_tensors), "file"))
    return list(split.filename_to_tensors)


def _fitting(spec: TensorSpec, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as it is stored: contiguous on the CPU, in the dtype of its spec."""
    if tuple(tensor.shape) != spec.shape:
        raise CheckpointError(
            f"tensor {spec.name} is {list(tensor.shape)}, expected {list(spec.shape)}; the model cannot be written"
        )
    return cast(spec.name, tensor.detach().cpu(), spec.dtype).contiguous()


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` in the dtype to store it in.

    Raises:
        CheckpointError: finite values would become infinite.
    """
    stored = tensor.to(dtype)
    if dtype != tensor.dtype and torch.isfinite(tensor).all() and not torch.isfinite(stored).all():
        raise CheckpointError(
            f"{name}: holds values up to {tensor.abs().max().item():.3g}, beyond the range of "
            f"{str(dtype).removeprefix('torch.')}; choose bfloat16 or float32"
        )
    return stored
