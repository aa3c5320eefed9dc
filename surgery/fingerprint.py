"""The identity of a checkpoint: which stage files belong to which weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from .lazy import TensorInfo

EDGE_BYTES = 2**20


def fingerprint(config_file: Path, files: Iterable[Path], tensors: Mapping[str, TensorInfo]) -> str:
    """sha256 over the config, the tensors' names, shapes and dtypes, and size, first and last MiB of each weights file.

    It reads at most 2 MiB a file, so it costs the same for any model; it does not depend on where the files lie.

    Args:
        config_file: `config.json` or what stands for it.
        files: the weight files, in the order of their names.
        tensors: source names and what the files say of them.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256(config_file.read_bytes())
    for name, info in sorted(tensors.items()):
        digest.update(f"\n{name} {list(info.shape)} {info.dtype}".encode())
    for path in files:
        size = path.stat().st_size
        digest.update(f"\n{size}\n".encode())
        with path.open("rb") as stream:
            digest.update(stream.read(EDGE_BYTES))
            stream.seek(max(0, size - EDGE_BYTES))
            digest.update(stream.read(EDGE_BYTES))
    return digest.hexdigest()
