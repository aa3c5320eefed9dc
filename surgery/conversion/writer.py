"""Writes safetensors a tensor at a time: the header first, as every shape is known, then the bytes where they belong.

Only one tensor is in memory, and none that lies in a file as it will be stored: the system copies it from there.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from ...base.console import counted, human_bytes
from ...base.errors import CheckpointError
from ...base.files import write_json
from ..checkpoint.lazy import SAFETENSORS_DTYPES
from ..checkpoint.weights import Extent

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 5 * 10**9
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}
_PARTIAL = ".partial"
_FLUSH_BYTES = 2**28
# What the system says of two files between which it cannot copy: other file systems, an old kernel, a network disk.
_CANNOT_COPY = {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY}


class TensorSpec(NamedTuple):
    """A tensor that is going to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of its data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class _Slot(NamedTuple):
    """Where a tensor's bytes go."""

    spec: TensorSpec
    shard: int
    offset: int


class StreamingSafetensorsWriter:
    """A context manager that writes `model.safetensors`, or numbered shards and their index.

    Files carry the suffix `.partial` until every tensor is written; leaving the block with an error removes them, so
    what is named `*.safetensors` is always whole.

        with StreamingSafetensorsWriter(folder, specs) as writer:
            for spec in specs:
                writer.write(spec.name, tensor)

    Args:
        folder: where to write; made if it does not exist.
        specs: every tensor that will be written, in the order of the model. Tensors are written in any order, fastest
            in this one.
        max_shard_size: bytes of tensor data a file. A single larger tensor gets a file of its own.
        metadata: strings for the header; `{"format": "pt"}` is always there, transformers asks for it.

    Raises:
        CheckpointError: a dtype that safetensors has no code for, a name twice, not enough room on the disk, a tensor
            that does not fit its spec, a tensor that was announced and not written.
    """

    def __init__(
        self,
        folder: str | Path,
        specs: Iterable[TensorSpec],
        *,
        max_shard_size: int = MAX_SHARD_BYTES,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.specs = [TensorSpec(*spec) for spec in specs]
        self.total_bytes = sum(spec.nbytes for spec in self.specs)
        _check(self.specs)
        self._metadata = {**(metadata or {}), "format": "pt"}
        self._shards = _split(self.specs, max_shard_size)
        self.files = _file_names(len(self._shards))
        self._slots: dict[str, _Slot] = {}
        self._streams: list[io.FileIO] = []
        self._pending = {spec.name for spec in self.specs}
        self._flusher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="flush")
        self._flushing: Future[None] | None = None
        self._unflushed = 0

    def __enter__(self) -> StreamingSafetensorsWriter:
        self.folder.mkdir(parents=True, exist_ok=True)
        _check_room(self.folder, self.total_bytes)
        try:
            for number, specs in enumerate(self._shards):
                self._begin(number, specs)
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            self._finish()
        except BaseException:
            self._discard()
            raise

    def copy(self, name: str, extent: Extent) -> bool:
        """Writes one tensor from where its very bytes lie in a file; False where the system cannot do that.

        The system copies from file to file, without a page of them passing through this process.
        """
        slot = self._slot(name)
        copied = self._copied(slot, extent)
        if copied:
            self._written(slot)
        return copied

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes one tensor.

        Args:
            name: one of the announced names, each once.
            tensor: of the announced shape and dtype; on any device, contiguous or not.
        """
        slot = self._slot(name)
        if tuple(tensor.shape) != slot.spec.shape or tensor.dtype != slot.spec.dtype:
            raise CheckpointError(
                f"tensor {name} is {list(tensor.shape)} {tensor.dtype}, expected {list(slot.spec.shape)} "
                f"{slot.spec.dtype}; the announced shape and dtype are in the header already"
            )
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._put(slot.shard, memoryview(data), slot.offset)
        self._written(slot)

    def _slot(self, name: str) -> _Slot:
        slot = self._slots.get(name)
        if slot is None or name not in self._pending:
            state = "was written before" if slot else "was not announced"
            raise CheckpointError(f"tensor {name} {state}; each tensor of the specs is written exactly once")
        return slot

    def _written(self, slot: _Slot) -> None:
        self._flush_beside(slot.shard, slot.spec.nbytes)
        self._pending.discard(slot.spec.name)

    def _begin(self, number: int, specs: list[TensorSpec]) -> None:
        header, offsets, size = _header(specs, self._metadata)
        try:
            self._streams.append(io.FileIO(self._partial(number), "wb"))
            self._streams[number].truncate(size)
        except OSError as error:
            raise self._failed(number, error) from error
        self._put(number, memoryview(header), 0)
        self._slots.update({spec.name: _Slot(spec, number, offsets[spec.name]) for spec in specs})

    def _put(self, shard: int, data: memoryview, offset: int) -> None:
        try:
            self._streams[shard].seek(offset)
            while data:  # the system takes at most 2 GiB at a time
                data = data[self._streams[shard].write(data) :]
        except OSError as error:
            raise self._failed(shard, error) from error

    def _copied(self, slot: _Slot, extent: Extent) -> bool:
        """Copies from file to file; False where the system cannot do that between these two."""
        if not hasattr(os, "copy_file_range"):
            return False
        done, size = 0, slot.spec.nbytes
        target = self._streams[slot.shard].fileno()
        while done < size:
            try:
                step = os.copy_file_range(
                    extent.descriptor, target, size - done, extent.offset + done, slot.offset + done
                )
            except OSError as error:
                if error.errno in _CANNOT_COPY:
                    return False
                raise self._failed(slot.shard, error) from error
            if step == 0:
                raise CheckpointError(
                    f"{extent.path.name}: became shorter while {slot.spec.name} was copied from it; copy the file "
                    "again and leave it alone meanwhile"
                )
            done += step
        return True

    def _flush_beside(self, shard: int, written: int) -> None:
        """Brings what is written to the disk while more is written, so that the last flush has little left to do."""
        self._unflushed += written
        if self._unflushed < _FLUSH_BYTES or (self._flushing is not None and not self._flushing.done()):
            return
        self._await_flush(shard)
        self._unflushed = 0
        flush = getattr(os, "fdatasync", os.fsync)
        self._flushing = self._flusher.submit(flush, self._streams[shard].fileno())

    def _await_flush(self, shard: int) -> None:
        """The system reports a failed write once, to the first who flushes: it must not be lost here."""
        try:
            if self._flushing is not None:
                self._flushing.result()
        except OSError as error:
            raise self._failed(shard, error) from error

    def _failed(self, shard: int, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self.files[shard]}: cannot be written ({error.strerror}), {human_bytes(self.total_bytes)} are needed in "
            "all; free room on the disk or choose another output"
        )

    def _finish(self) -> None:
        if self._pending:
            names = ", ".join(sorted(self._pending)[:5])
            raise CheckpointError(
                f"{len(self._pending)} announced tensors were never written ({names}); nothing is kept of an "
                "incomplete model"
            )
        self._await_flush(len(self.files) - 1)
        self._close()
        for number, name in enumerate(self.files):
            os.replace(self._partial(number), self.folder / name)
        if len(self.files) > 1:
            weight_map = {spec.name: self.files[self._slots[spec.name].shard] for spec in self.specs}
            write_json(
                self.folder / INDEX_FILE, {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            )
        logger.info("wrote %s in %s", human_bytes(self.total_bytes), counted(len(self.files), "file"))

    def _close(self) -> None:
        self._flusher.shutdown()  # before the file that it may be flushing is closed
        while self._streams:
            self._streams.pop().close()

    def _discard(self) -> None:
        with contextlib.suppress(OSError):
            self._close()
        for number in range(len(self.files)):
            self._partial(number).unlink(missing_ok=True)

    def _partial(self, number: int) -> Path:
        return self.folder / (self.files[number] + _PARTIAL)


def write_tensors(
    folder: str | Path,
    specs: Iterable[TensorSpec],
    load: Callable[[str], torch.Tensor],
    *,
    max_shard_size: int = MAX_SHARD_BYTES,
) -> tuple[str, ...]:
    """Streams tensors from `load` into `folder`, each cast to the dtype of its spec.

    Args:
        folder: where to write.
        specs: what to write.
        load: gives the tensor of a name; it may build it on the spot, as only one is held.
        max_shard_size: bytes of tensor data a file.

    Returns:
        The names of the weight files.
    """
    with StreamingSafetensorsWriter(folder, specs, max_shard_size=max_shard_size) as writer:
        for spec in writer.specs:
            writer.write(spec.name, cast(spec.name, load(spec.name), spec.dtype))
    return tuple(writer.files)


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


def _check(specs: list[TensorSpec]) -> None:
    names = [spec.name for spec in specs]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise CheckpointError(f"tensor {twice[0]} is announced twice; a name stands for one tensor")
    for spec in specs:
        if spec.dtype not in _CODES:
            raise CheckpointError(f"tensor {spec.name}: safetensors cannot hold {spec.dtype}; convert it first")


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{folder}: the disk has {human_bytes(free)} free, the model needs {human_bytes(needed)}; free room or "
            "choose another output"
        )


def _split(specs: list[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    """Shards in the order of the model, each as full as the limit lets it be; at least one."""
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if shards[-1] and filled + spec.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]


def _header(specs: list[TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int], int]:
    """The header of one file, where each tensor starts in the file, and the file's size.

    Wide dtypes come first and the header is padded to 8 bytes, so that every tensor is aligned to its own size.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    places: dict[str, int] = {}
    position = 0
    for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
        end = position + spec.nbytes
        entries[spec.name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [position, end]}
        places[spec.name] = position
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return (
        len(text).to_bytes(8, "little") + text,
        {name: start + place for name, place in places.items()},
        start + position,
    )
