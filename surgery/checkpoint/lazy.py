"""Weight files read lazily: opening one reads its table of tensors and no tensor."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from ...base.errors import CheckpointError
from .torch_file import TorchFile
from .weights import TensorInfo, WeightsFile

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


class SafetensorsFile(WeightsFile):
    """A safetensors file, its header checked against the file's size before a tensor is touched.

    Raises:
        CheckpointError: the header is no safetensors header, names bytes that the file does not have, or leaves bytes
            of it to no tensor.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        size = path.stat().st_size
        header, self._start = _read_header(path, size)
        self._offsets: dict[str, tuple[int, int]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for name, entry in header.items():
            if name == "__metadata__":
                _check_metadata(path, entry)
            else:
                self._add(name, entry, size - self._start)
        self._refuse_gaps(size - self._start)

    def _add(self, name: str, entry: Any, data_bytes: int) -> None:
        try:
            dtype = SAFETENSORS_DTYPES.get(entry["dtype"])
            kind, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
        except (TypeError, KeyError, ValueError) as error:
            raise _not_safetensors(self.path, f"the header's entry for {name!r} is malformed") from error
        if any(type(number) is not int for number in (*shape, begin, end)):
            raise _not_safetensors(self.path, f"the header's entry for {name!r} is malformed")
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

    def _refuse_gaps(self, data_bytes: int) -> None:
        """Every byte of the data belongs to exactly one tensor, as the format demands."""
        last, owner = 0, ""
        for name, (begin, end) in sorted(self._offsets.items(), key=lambda item: item[1]):
            if begin < last:
                raise _not_safetensors(self.path, f"the tensors {owner!r} and {name!r} overlap")
            if begin > last:
                raise _not_safetensors(self.path, f"{begin - last} bytes before {name!r} belong to no tensor")
            last, owner = end, name
        if last < data_bytes:
            raise _not_safetensors(self.path, f"its last {data_bytes - last} bytes belong to no tensor")

    def load(self, name: str) -> torch.Tensor:
        """Returns tensor `name` in memory of its own."""
        shape, dtype, _ = self.tensors[name]
        return self._read(self.offset(name), shape, dtype)

    def offset(self, name: str) -> int:
        """Byte of the file at which tensor `name` begins."""
        return self._start + self._offsets[name][0]


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
        text = stream.read(length)

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twin = next(name for name in names if names.count(name) > 1)
            raise _not_safetensors(path, f"its header holds {twin!r} twice")
        return found

    try:
        header = json.loads(text, object_pairs_hook=table)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # of JSON, of UTF-8, of numbers with thousands of digits
        raise _not_safetensors(path, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _not_safetensors(path, "its header is not a table of tensors")
    return header, 8 + length


def _check_metadata(path: Path, metadata: Any) -> None:
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise _not_safetensors(path, "its __metadata__ is no table of texts")


def _not_safetensors(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path.name}: is not a valid safetensors file, {why}; download or write the file again")
