"""One file of tensors, held open: each tensor is read from it when it is asked for and looked at on the way.

The files are read, not mapped. A file that is cut short or written to meanwhile is then an error with a sentence,
where a mapped page that is gone kills the process; one that is deleted or replaced is read to its end.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from ...base.errors import ChangedFileError

PIECE_BYTES = 2**22
"""Read at a time where a tensor is only looked at: it stays in the processor's cache."""


class TensorInfo(NamedTuple):
    """What is known of a tensor before it is read. Two names with one `storage` are one tensor saved twice."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: tuple[str, int]


class Contents(NamedTuple):
    """What the values of a tensor say: CRC-32 of their bytes in row-major order, and whether all are finite."""

    checksum: int
    finite: bool


class WeightsFile(ABC):
    """One file of tensors.

    Attributes:
        path: the file.
        tensors: what is known of each tensor, by its name in the file.
    """

    tensors: Mapping[str, TensorInfo]

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = path.open("rb", buffering=0)
        self._stamp = self._state()
        self._contents: dict[str, Contents] = {}

    def __del__(self) -> None:
        if stream := getattr(self, "_stream", None):
            stream.close()

    @abstractmethod
    def load(self, name: str) -> torch.Tensor:
        """Returns tensor `name` on the CPU, in memory of its own."""

    @abstractmethod
    def offset(self, name: str) -> int | None:
        """Byte of the file at which tensor `name` begins, in row-major order; None where it does not lie so."""

    def contents(self, name: str, tensor: torch.Tensor | None = None) -> Contents:
        """Looks at every value of a tensor, once.

        Args:
            name: of the tensor.
            tensor: what `load` returned, where that is at hand; without it the file is read a piece at a time.
        """
        if name not in self._contents:
            checksum, finite = 0, True
            for piece in self.pieces(name) if tensor is None else tensor.reshape(-1).split(PIECE_BYTES):
                checksum = zlib.crc32(memoryview(piece.view(torch.uint8).numpy()), checksum)
                finite = finite and _is_finite(piece)
            self._contents[name] = self._checked(name, Contents(checksum, finite))
        return self._contents[name]

    def digest(self) -> str:
        """sha256 of the whole file: what the Hub knows a large file by."""
        digest, size = hashlib.sha256(), self._stamp[0]
        buffer = torch.empty(min(size, PIECE_BYTES), dtype=torch.uint8)
        for begin in range(0, size, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, size - begin)]
            self._read_into(piece, begin)
            digest.update(memoryview(piece.numpy()))
        return digest.hexdigest()

    def _checked(self, name: str, contents: Contents) -> Contents:
        """The contents again, where nothing in the file contradicts them."""
        return contents

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """The values of a tensor in row-major order, in pieces [n]; each is good until the next is asked for."""
        offset = self.offset(name)
        if offset is None:
            yield from self.load(name).reshape(-1).split(PIECE_BYTES // self.tensors[name].dtype.itemsize)
            return
        shape, dtype, _ = self.tensors[name]
        size = torch.Size(shape).numel() * dtype.itemsize
        buffer = torch.empty(min(size, PIECE_BYTES), dtype=torch.uint8)
        for begin in range(0, size, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, size - begin)]
            self._read_into(piece, offset + begin)
            yield piece.view(dtype)

    def _read(self, offset: int, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor whose bytes begin at `offset`, in row-major order."""
        tensor = torch.empty(tuple(shape), dtype=dtype)
        if tensor.numel():
            self._read_into(tensor.reshape(-1).view(torch.uint8), offset)
        return tensor

    def _read_into(self, target: torch.Tensor, offset: int) -> None:
        """Fills `target` [n], uint8, from the file, which nobody has written to since it was opened, nor meanwhile."""
        self._refuse_changed()
        view = memoryview(target.numpy())
        while view:  # the system gives at most 2 GiB at a time
            count = self._read_at(view, offset)
            if count == 0:
                raise self._changed("became shorter")
            view, offset = view[count:], offset + count
        self._refuse_changed()

    def _read_at(self, view: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):  # no position, which threads and forked processes would share
            return os.preadv(self._stream.fileno(), [view], offset)
        self._stream.seek(offset)
        return self._stream.readinto(view) or 0

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self._stream.fileno())
        return found.st_size, found.st_mtime_ns

    def _refuse_changed(self) -> None:
        now = self._state()
        if now != self._stamp:
            raise self._changed("became shorter" if now[0] < self._stamp[0] else "was written to")

    def _changed(self, how: str) -> ChangedFileError:
        return ChangedFileError(
            f"{self.path.name}: {how} while it was read; copy or download the file again and leave it alone meanwhile"
        )


def _is_finite(values: torch.Tensor) -> bool:
    """Whether no value is a NaN or an infinity: neither goes away in a sum, which is read at the speed of memory."""
    if not values.is_floating_point() or values.dtype.itemsize == 1:  # torch does not sum floats of 8 bits
        return True
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())
