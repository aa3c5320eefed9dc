"""Files that `torch.save` wrote. torch vouches for them; their tensors are read where they lie in the archive."""

from __future__ import annotations

import io
import logging
import pickle
import re
import sys
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from ...base.errors import CheckpointError
from .weights import PIECE_BYTES, Contents, TensorInfo, WeightsFile

logger = logging.getLogger(__name__)

# What torch says of a pickle that wants to build anything but tensors; its other complaints are of broken bytes.
_UNSAFE = re.compile(r"Unsupported (global|class)|GLOBAL|Trying to (call|set|instantiate)")
# Training frameworks put the weights one level down, beside optimizer state.
_NESTED_KEYS = ("state_dict", "model_state_dict", "model")
_ARCHIVE = b"PK\x03\x04"  # how a record of a zip file begins, and so every file of torch since 1.6
_LOCAL_HEADER = 30  # bytes before the name in the header that stands before each record of a zip file


class _Record(NamedTuple):
    """One record of the archive: where its bytes begin in the file, how many they are, their CRC-32."""

    offset: int
    size: int
    checksum: int


class _Place(NamedTuple):
    """Where a tensor lies: its record, and the first element, strides and sign with which it is read from it."""

    record: str
    first: int
    stride: tuple[int, ...]
    contiguous: bool
    negated: bool


class TorchFile(WeightsFile):
    """A file written by `torch.save`, read with `weights_only=True`.

    Args:
        path: the file; tensors saved from a GPU are read to the CPU.

    Attributes:
        is_archive: false for the format from before torch 1.6, which is read whole into memory.

    Raises:
        CheckpointError: the file is cut short, is not a torch file, or holds anything but tensors.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with path.open("rb") as stream:
            self.is_archive = stream.read(len(_ARCHIVE)) == _ARCHIVE
        self._intact: set[str] = set()
        self._tensors: dict[str, torch.Tensor] = {}
        if self.is_archive:
            self._records, pickled, order = _read_archive(path)
            self._swapped = order != sys.byteorder
            self._has_checksums = self._records["data.pkl"].checksum != 0  # torch writes 0 where told not to compute
        else:
            logger.warning("%s: is in torch's format from before 1.6, which is read whole into memory", path.name)
        found = _only_tensors(path, _vouched(path, mapped=self.is_archive))
        if not self.is_archive:
            self._tensors = found
            self.tensors = {
                name: TensorInfo(tuple(tensor.shape), tensor.dtype, (path.name, tensor.data_ptr()))
                for name, tensor in found.items()
            }
            return
        self._places = self._find_places(found, pickled)
        self.tensors = {
            name: TensorInfo(tuple(tensor.shape), tensor.dtype, (path.name, self._begin(name, tensor.dtype)))
            for name, tensor in found.items()
        }

    def _find_places(self, found: dict[str, torch.Tensor], pickled: bytes) -> dict[str, _Place]:
        keys = _record_keys(self.path, pickled)
        places = {}
        for name, tensor in found.items():
            record, first = f"data/{keys.get(name)}", tensor.storage_offset()
            last = first + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            if tensor.numel() and record not in self._records:
                raise CheckpointError(
                    f"{self.path.name}: tensor {name} is of a kind whose bytes cannot be found in the file, expected a "
                    "plain tensor; save the model's state dict alone"
                )
            if tensor.numel() and (last + 1) * tensor.dtype.itemsize > self._records[record].size:
                raise CheckpointError(
                    f"{self.path.name}: tensor {name} is larger than its record; download or copy the file again"
                )
            places[name] = _Place(record, first, tensor.stride(), tensor.is_contiguous(), tensor.is_neg())
        return places

    def _begin(self, name: str, dtype: torch.dtype) -> int:
        """Byte of the file at which the first element of a tensor lies; 0 for a tensor of no elements."""
        place = self._places[name]
        record = self._records.get(place.record)
        return 0 if record is None else record.offset + place.first * dtype.itemsize

    def load(self, name: str) -> torch.Tensor:
        """Returns tensor `name`, contiguous and in memory of its own."""
        if not self.is_archive:
            return self._tensors[name].detach().resolve_neg().clone(memory_format=torch.contiguous_format)
        shape, dtype, _ = self.tensors[name]
        if not torch.Size(shape).numel():
            return torch.empty(shape, dtype=dtype)
        place = self._places[name]
        count = 1 + sum((n - 1) * step for n, step in zip(shape, place.stride, strict=True))
        stored = self._read(self._begin(name, dtype), (count,), dtype)
        if self._swapped and dtype.itemsize > 1:
            stored = stored.view(torch.uint8).reshape(-1, dtype.itemsize).flip(1).reshape(-1).view(dtype)
        tensor = stored.reshape(shape) if place.contiguous else stored.as_strided(shape, place.stride).contiguous()
        return -tensor if place.negated else tensor

    def offset(self, name: str) -> int | None:
        """Byte of the file at which tensor `name` begins; None where its bytes do not lie as it is read."""
        shape, dtype, _ = self.tensors[name]
        if not self.is_archive or self._swapped or not torch.Size(shape).numel():
            return None
        place = self._places[name]
        return self._begin(name, dtype) if place.contiguous and not place.negated else None

    def _checked(self, name: str, contents: Contents) -> Contents:
        """Compares the archive's checksum, which is that of a whole record: often a tensor, at times a part of it."""
        shape, dtype, _ = self.tensors[name]
        record = self._records.get(self._places[name].record) if self.is_archive else None
        if record is None or not self._has_checksums or self._places[name].record in self._intact:
            return contents
        whole = self.offset(name) == record.offset and torch.Size(shape).numel() * dtype.itemsize == record.size
        if (contents.checksum if whole else self._checksum(record)) != record.checksum:
            raise CheckpointError(
                f"{self.path.name}: the bytes of tensor {name} do not match their checksum, so the file is damaged; "
                "download or copy it again"
            )
        self._intact.add(self._places[name].record)
        return contents

    def _checksum(self, record: _Record) -> int:
        checksum = 0
        buffer = torch.empty(min(record.size, PIECE_BYTES), dtype=torch.uint8)
        for begin in range(0, record.size, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, record.size - begin)]
            self._read_into(piece, record.offset + begin)
            checksum = zlib.crc32(memoryview(piece.numpy()), checksum)
        return checksum


def _vouched(path: Path, *, mapped: bool) -> Any:
    """What torch reads from the file, refusing all that is not plain data; mapped, so that no value is read yet."""
    try:
        return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except pickle.UnpicklingError as error:
        if not _UNSAFE.search(str(error)):
            raise _not_torch(path, error) from error
        raise CheckpointError(
            f"{path.name}: holds pickled objects besides tensors, which could run code and are refused; "
            "save the state dict alone (torch.save(model.state_dict(), ...)) or as safetensors"
        ) from error
    except Exception as error:  # broken bytes make torch's reader raise errors of any kind
        raise _not_torch(path, error) from error


def _read_archive(path: Path) -> tuple[dict[str, _Record], bytes, str]:
    """The records of a torch file by name, without the folder they lie in, its pickle, and its byte order."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as stream:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise CheckpointError(
                    f"{path.name}: was packed again with compression, which torch cannot map; write it with torch.save"
                )
            records = {
                member.filename.partition("/")[2]: _Record(_data_offset(stream, member), member.file_size, member.CRC)
                for member in members
            }
            pickled = _content(stream, records["data.pkl"])
            order = _content(stream, records["byteorder"]) if "byteorder" in records else sys.byteorder.encode()
    except CheckpointError:
        raise
    except Exception as error:  # damaged directories make zipfile raise errors of any kind
        raise _not_torch(path, error) from error
    return records, pickled, order.decode("ascii", "replace")


def _data_offset(stream: IO[bytes], member: zipfile.ZipInfo) -> int:
    """Where the bytes of a record begin: after a header whose last numbers are the lengths of its name and padding."""
    stream.seek(member.header_offset)
    header = stream.read(_LOCAL_HEADER)
    if len(header) < _LOCAL_HEADER or not header.startswith(_ARCHIVE):
        raise zipfile.BadZipFile(f"no header where {member.filename} should begin")
    name, padding = (int.from_bytes(header[begin : begin + 2], "little") for begin in (26, 28))
    return member.header_offset + _LOCAL_HEADER + name + padding


def _content(stream: IO[bytes], record: _Record) -> bytes:
    stream.seek(record.offset)
    content = stream.read(record.size)
    if record.checksum and zlib.crc32(content) != record.checksum:
        raise zipfile.BadZipFile("its table of tensors does not match its checksum")
    return content


class _Built:
    """Stands for whatever a pickle builds: its name and arguments are kept, nothing is called."""

    name = ""

    def __new__(cls, *arguments: Any, **_: Any) -> _Built:
        built = super().__new__(cls)
        built.arguments = arguments
        return built

    def __setstate__(self, state: Any) -> None:
        """The state is not needed; neither is what is put into a container."""

    __setitem__ = append = extend = add = lambda self, *_: None


class _Places(pickle.Unpickler):
    """Reads a pickle that torch has vouched for once more, for the one thing torch does not tell: the records."""

    def find_class(self, module: str, name: str) -> type:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return type(name, (_Built,), {"name": name})

    def persistent_load(self, identity: Any) -> Any:
        return identity


def _record_keys(path: Path, pickled: bytes) -> dict[Any, str]:
    """The record of each tensor of the state dict, by name."""
    try:
        content = _state_dict(_Places(io.BytesIO(pickled)).load())
    except Exception as error:
        raise _not_torch(path, error) from error
    return {name: _key(value) for name, value in content.items()}


def _key(value: Any) -> str | None:
    """The record's key in what stands for a tensor: the third part of its storage's identity."""
    while isinstance(value, _Built) and value.arguments:
        if value.name.startswith("_rebuild_tensor") and isinstance(value.arguments[0], tuple):
            return str(value.arguments[0][2])
        if not value.name.startswith("_rebuild_parameter"):
            return None
        value = value.arguments[0]
    return None


def _state_dict(content: Any) -> Any:
    """The state dict in what a file holds, one level down where a trainer put it."""
    if isinstance(content, dict) and not any(_is_tensor(value) for value in content.values()):
        nested = [content[key] for key in _NESTED_KEYS if isinstance(content.get(key), dict)]
        return nested[0] if nested else content
    return content


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, _Built) and value.name.startswith("_rebuild_"))


def _only_tensors(path: Path, content: Any) -> dict[str, torch.Tensor]:
    """The state dict inside what `torch.load` returned."""
    content = _state_dict(content)
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
                f"{path.name}: tensor {name} is sparse, quantized or without data, expected a plain tensor; save it "
                "dense"
            )
    return content


def _not_torch(path: Path, error: Exception) -> CheckpointError:
    # torch explains its refusals at length and over many lines; the reason follows the last of these words.
    lines = str(error).rsplit("WeightsUnpickler error:", 1)[-1].strip().splitlines() or [type(error).__name__]
    reason = lines[0].split(". ")[0]
    return CheckpointError(
        f"{path.name}: cannot be read as a torch file ({reason}); it may be cut short: download or copy the file again"
    )
