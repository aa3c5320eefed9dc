"""Weight files read lazily: every tensor is a view of the mapped file, so opening a checkpoint costs no memory.

A mapped page belongs to the file, not to the process: it counts as RssFile and the kernel drops it when memory is
short. Mappings are private, so writing into a loaded tensor never reaches the file.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import pickle
import re
import sys
import zipfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ..base.errors import CheckpointError

logger = logging.getLogger(__name__)

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
# The format's own limit: a longer header is a file of another kind read as safetensors.
MAX_HEADER_BYTES = 100_000_000
_LFS_POINTER = b"version https://git-lfs"
# What torch says of a pickle that wants to build anything but tensors; its other complaints are of broken bytes.
_UNSAFE = re.compile(r"Unsupported (global|class)|GLOBAL|Trying to (call|set|instantiate)")
# Training frameworks put the weights one level down, beside optimizer state.
_NESTED_KEYS = ("state_dict", "model_state_dict", "model")


class TensorInfo(NamedTuple):
    """What is known of a tensor before it is read. Two names with one `storage` are one tensor saved twice."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: tuple[str, int]


class Extent(NamedTuple):
    """Where a tensor's bytes begin: a file and an offset in it."""

    path: Path
    offset: int


class WeightsFile(Protocol):
    """One file of tensors."""

    path: Path
    tensors: Mapping[str, TensorInfo]

    def load(self, name: str) -> torch.Tensor:
        """Returns tensor `name` on the CPU."""
        ...

    def offset(self, name: str) -> int | None:
        """Byte of the file at which tensor `name` begins, in row-major order; None where that cannot be told."""
        ...


class SafetensorsFile:
    """A safetensors file, its header checked against the file's size before a tensor is touched.

    Raises:
        CheckpointError: the header is no safetensors header, or names bytes that the file does not have.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        header, self._start = _read_header(path, size)
        self._offsets: dict[str, tuple[int, int]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                self._add(name, entry, size - self._start)
        self._refuse_overlap()
        self._map: mmap.mmap | None = None

    def _add(self, name: str, entry: Any, data_bytes: int) -> None:
        try:
            dtype = SAFETENSORS_DTYPES.get(entry["dtype"])
            kind, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
            begin, end = (int(offset) for offset in entry["data_offsets"])
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise _not_safetensors(self.path, f"the header's entry for {name!r} is malformed") from error
        if dtype is None:
            raise CheckpointError(
                f"{self.path.name}: tensor {name} has dtype {kind}, which is not supported; save it as BF16, F16 or F32"
            )
        if begin < 0 or min(shape, default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
            raise _not_safetensors(self.path, f"the bytes of {name!r} do not fit its shape {list(shape)}")
        if end > data_bytes:
            raise CheckpointError(
                f"{self.path.name}: is cut short, tensor {name} ends at byte {self._start + end} of a file of "
                f"{self._start + data_bytes}; download or copy the file again"
            )
        self._offsets[name] = (begin, end)
        self.tensors[name] = TensorInfo(shape, dtype, (self.path.name, self._start + begin))

    def _refuse_overlap(self) -> None:
        last, owner = 0, ""
        for name, (begin, end) in sorted(self._offsets.items(), key=lambda item: item[1]):
            if begin < last:
                raise _not_safetensors(self.path, f"the tensors {owner!r} and {name!r} overlap")
            last, owner = end, name

    def load(self, name: str) -> torch.Tensor:
        """Returns tensor `name` as a view of the mapped file."""
        shape, dtype, _ = self.tensors[name]
        begin, end = self._offsets[name]
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        if self._map is None:
            with self.path.open("rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        offset = self._start + begin
        if offset % dtype.itemsize:  # the format allows it, aligned loads do not
            return torch.frombuffer(bytearray(self._map[offset : self._start + end]), dtype=dtype).reshape(shape)
        return torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape), offset=offset).reshape(shape)

    def offset(self, name: str) -> int:
        """Byte of the file at which tensor `name` begins."""
        return self._start + self._offsets[name][0]


class TorchFile:
    """A file written by `torch.save`, read with `weights_only=True` and mapped when its format allows.

    Args:
        path: the file; tensors saved from a GPU are mapped to the CPU.

    Attributes:
        mapped: false for the format from before torch 1.6, which cannot be mapped and is read whole into memory.

    Raises:
        CheckpointError: the file is cut short, is not a torch file, or holds anything but tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mapped = zipfile.is_zipfile(path)
        if self.mapped and _is_compressed(path):
            raise CheckpointError(
                f"{path.name}: was packed again with compression, which torch cannot map; write it with torch.save"
            )
        if not self.mapped:
            logger.warning("%s: is in torch's format from before 1.6, which is read whole into memory", path.name)
        self._tensors = _only_tensors(path, self._read())
        self.tensors = {
            name: TensorInfo(tuple(tensor.shape), tensor.dtype, (path.name, tensor.data_ptr()))
            for name, tensor in self._tensors.items()
        }

    def _read(self) -> Any:
        try:
            return torch.load(self.path, map_location="cpu", mmap=self.mapped, weights_only=True)
        except pickle.UnpicklingError as error:
            if not _UNSAFE.search(str(error)):
                raise _not_torch(self.path, error) from error
            raise CheckpointError(
                f"{self.path.name}: holds pickled objects besides tensors, which could run code and are refused; "
                "save the state dict alone (torch.save(model.state_dict(), ...)) or as safetensors"
            ) from error
        except Exception as error:  # broken bytes make torch's reader raise errors of any kind
            raise _not_torch(self.path, error) from error

    def load(self, name: str) -> torch.Tensor:
        """Returns tensor `name`, a view of the mapped file."""
        return self._tensors[name].detach().resolve_neg()

    def offset(self, name: str) -> int | None:
        """Byte of the file at which tensor `name` begins; None for a file or a system that does not tell."""
        tensor = self._tensors[name]
        as_it_lies = tensor.is_contiguous() and not tensor.is_neg() and tensor.numel() > 0
        if self._origin is None or not as_it_lies:
            return None
        return tensor.data_ptr() - self._origin

    @cached_property
    def _origin(self) -> int | None:
        """Address in memory of the file's first byte; None when the values in memory are not the file's bytes."""
        if self.mapped and _byte_order(self.path) != sys.byteorder:  # torch turned the bytes in memory
            return None
        address = next((tensor.data_ptr() for tensor in self._tensors.values() if tensor.numel()), None)
        return _mapped_at(self.path, address) if self.mapped and address is not None else None


def _mapped_at(path: Path, address: int) -> int | None:
    """Where the first byte of `path` is mapped, `address` being that of another of its bytes.

    torch does not tell where it maps a file; Linux does, a line `start-end access offset device inode path` a mapping.
    """
    try:
        lines = Path("/proc/self/maps").read_bytes().split(b"\n")  # a path may hold any other break
        inode = path.stat().st_ino
    except OSError:
        return None
    for line in filter(None, lines):
        span, _, offset, _, mapped, *_ = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in span.split(b"-"))
        if start <= address < end:
            return start - int(offset, 16) if int(mapped) == inode else None
    return None


def _is_compressed(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist())
    except zipfile.BadZipFile:
        return False  # torch says what is wrong with it


def _byte_order(path: Path) -> str:
    """The byte order that a torch file was written in, as in `sys.byteorder`."""
    with zipfile.ZipFile(path) as archive:
        record = next((name for name in archive.namelist() if name.rpartition("/")[2] == "byteorder"), None)
        return archive.read(record).decode("ascii", "replace") if record else sys.byteorder


def open_weights(path: Path) -> WeightsFile:
    """Opens one weights file by its suffix: `.safetensors`, anything else is read as a torch file."""
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path.name}: is empty; download or copy the file again")
    with path.open("rb") as stream:
        if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise CheckpointError(f"{path.name}: is a Git LFS pointer, not the weights; fetch them with git lfs pull")
    return SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """The JSON header of a safetensors file and where its data starts."""
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > MAX_HEADER_BYTES:
            raise _not_safetensors(path, "it does not begin with the length of a header")
        if 8 + length > size:
            raise CheckpointError(
                f"{path.name}: is cut short inside its header ({size} bytes, the header alone needs {8 + length}); "
                "download or copy the file again"
            )
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError) as error:  # of JSON, of UTF-8, of numbers with thousands of digits
            raise _not_safetensors(path, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _not_safetensors(path, "its header is not a table of tensors")
    return header, 8 + length


def _only_tensors(path: Path, content: Any) -> dict[str, torch.Tensor]:
    """The state dict inside what `torch.load` returned, one level down where a trainer put it."""
    if isinstance(content, dict) and not any(isinstance(value, torch.Tensor) for value in content.values()):
        nested = [content[key] for key in _NESTED_KEYS if isinstance(content.get(key), dict)]
        content = nested[0] if nested else content
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path.name}: holds a {type(content).__name__}, expected a table of tensors; save the model's state dict"
        )
    for name, value in content.items():
        if not isinstance(value, torch.Tensor) or not isinstance(name, str):
            raise CheckpointError(
                f"{path.name}: entry {name!r} is of type {type(value).__name__}, expected a tensor; "
                "save the model's state dict alone"
            )
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise CheckpointError(
                f"{path.name}: tensor {name} is sparse, quantised or without data, expected a plain tensor; save it "
                "dense"
            )
    return content


def _not_safetensors(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path.name}: is not a valid safetensors file, {why}; download or write the file again")


def _not_torch(path: Path, error: Exception) -> CheckpointError:
    # torch explains its refusals at length and over many lines; the reason follows the last of these words.
    lines = str(error).rsplit("WeightsUnpickler error:", 1)[-1].strip().splitlines() or [type(error).__name__]
    reason = lines[0].split(". ")[0]
    return CheckpointError(
        f"{path.name}: cannot be read as a torch file ({reason}); it may be cut short: download or copy the file again"
    )
