"""Weight files read lazily: opening one reads its table of tensors and no tensor."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ...base.errors import CheckpointError
from .torch_file import TorchFile
from .weights import TensorInfo, WeightsFile

_DTYPES = {
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
_LFS_POINTER = b"version https://git-lfs"


class SafetensorsFile(WeightsFile):
    """A safetensors file, whose header the library checks against the file's size before a tensor is touched.

    The library reads through a map, and a mapped page that is gone kills the process (see `weights`), so only the
    header is read by it. Its tensors lie one after the other without gaps, which it checks.

    Raises:
        CheckpointError: the header is no safetensors header, or the tensors in it do not cover the file's bytes.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.tensors: dict[str, TensorInfo] = {}
        begin = 8 + int.from_bytes(self._stream.read(8), "little")
        try:
            with safe_open(path, "pt") as file:
                for name in file.offset_keys():
                    entry = file.get_slice(name)
                    info = TensorInfo(tuple(entry.get_shape()), self._dtype(name, entry), (path.name, begin))
                    self.tensors[name] = info
                    begin += torch.Size(info.shape).numel() * info.dtype.itemsize
        except SafetensorError as error:
            reason = str(error).removeprefix("Error while deserializing header: ")
            raise CheckpointError(
                f"{path.name}: is not a valid safetensors file ({reason}); it may be cut short: download or copy the "
                "file again"
            ) from error

    def _dtype(self, name: str, entry: safe_open) -> torch.dtype:
        if (code := entry.get_dtype()) not in _DTYPES:
            raise CheckpointError(
                f"{self.path.name}: tensor {name} has dtype {code}, which is not supported; save it as BF16, F16 or F32"
            )
        return _DTYPES[code]

    def load(self, name: str) -> torch.Tensor:
        """Returns tensor `name` in memory of its own."""
        shape, dtype, _ = self.tensors[name]
        return self._read(self.offset(name), shape, dtype)

    def offset(self, name: str) -> int:
        """Byte of the file at which tensor `name` begins."""
        return self.tensors[name].storage[1]


def open_weights(path: Path) -> WeightsFile:
    """Opens one weights file by its suffix: `.safetensors`, anything else is read as a torch file."""
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path.name}: is empty; download or copy the file again")
    with path.open("rb") as stream:
        if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise CheckpointError(f"{path.name}: is a Git LFS pointer, not the weights; fetch them with git lfs pull")
    return SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)
