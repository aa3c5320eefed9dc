"""The identity of a checkpoint: which stage files belong to which weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from .weights import TensorInfo

_EDGE_BYTES = 2**20


def fingerprint(config_file: Path, tensors: Mapping[str, TensorInfo], checksum: Callable[[str], int]) -> str:
    """sha256 over the config and each tensor's name, shape, dtype and CRC-32 of all its bytes.

    It does not depend on where the files lie, nor on how the tensors are spread over them.

    Args:
        config_file: `config.json` or what stands for it.
        tensors: source names and what the files say of them.
        checksum: the CRC-32 of a tensor's values in row-major order, by source name.

    Returns:
        64 hexadecimal digits.
    """
    digest = _begin(config_file, tensors)
    for name in sorted(tensors):
        digest.update(f"\n{checksum(name):08x}".encode())
    return digest.hexdigest()


def edges_fingerprint(config_file: Path, files: Iterable[Path], tensors: Mapping[str, TensorInfo]) -> str:
    """The fingerprint in files written earlier, which saw of each weights file its size, first and last MiB alone.

    Args:
        config_file: as for `fingerprint`.
        files: the weight files, in the order of their names.
        tensors: as for `fingerprint`.
    """
    digest = _begin(config_file, tensors)
    for path in files:
        size = path.stat().st_size
        digest.update(f"\n{size}\n".encode())
        with path.open("rb") as stream:
            digest.update(stream.read(_EDGE_BYTES))
            stream.seek(max(0, size - _EDGE_BYTES))
            digest.update(stream.read(_EDGE_BYTES))
    return digest.hexdigest()


def _begin(config_file: Path, tensors: Mapping[str, TensorInfo]) -> hashlib._Hash:
    digest = hashlib.sha256(config_file.read_bytes())
    for name, info in sorted(tensors.items()):
        digest.update(f"\n{name} {list(info.shape)} {info.dtype}".encode())
    return digest
