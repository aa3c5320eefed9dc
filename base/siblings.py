"""Hidden siblings of an output: where it is written, locked while its run lives, and how it takes its place."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import secrets
import shutil
import sys
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.getLogger(__name__)

_TOKEN_BYTES = 6


def settle_leftovers(path: Path) -> None:
    """Clears up what killed runs left beside `path`; what a live run works on is not touched.

    A run holds a lock on each of its hidden siblings, and the system drops the lock when the run ends, however it
    ends. `.NAME.tmp-*` is unfinished or replaced content and is removed. `.NAME.old-*` is what stood at `path` while
    its successor took the place: it goes back when nothing is there. What cannot be decided is named.
    """
    name = re.compile(rf"{re.escape(f'.{path.name}.')}(tmp|old)-[0-9a-f]+")
    if not path.parent.is_dir():
        return
    for left in [one for one in path.parent.iterdir() if name.fullmatch(one.name)]:
        with contextlib.ExitStack() as held:
            free = try_lock(left, held)
            if free and left.match(".*.old-*") and not path.exists():
                os.replace(left, path)
                logger.warning("%s: put back what a killed run had moved aside to replace it", path)
            elif free and left.match(".*.tmp-*") and _is_ours(left):
                _remove(left)
                logger.info("removed %s, which a killed run had left", left)
            elif free is not False:
                logger.warning("%s: was left by another run; remove it, or rename it if you miss what it holds", left)


def take_place(temporary: Path, path: Path) -> None:
    """Renames `temporary` to `path`; what was there is removed afterwards, or put back on failure.

    Where the system can exchange two names at once, `path` is there at every moment.
    """
    if not path.exists():
        os.replace(temporary, path)
        return
    if _exchange(temporary, path):
        _remove(temporary)
        return
    old = sibling(path, "old")
    with contextlib.ExitStack() as held:
        try_lock(path, held)
        os.replace(path, old)
        try:
            os.replace(temporary, path)
        except BaseException:
            os.replace(old, path)
            raise
        os.replace(old, temporary)  # from here on a killed run leaves what the next one may remove
    _remove(temporary)


def _exchange(first: Path, second: Path) -> bool:
    """Exchanges two names in one step of the system; False where it cannot."""
    names = os.fsencode(first), os.fsencode(second)
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform in ("linux", "darwin") else None
    if hasattr(libc, "renameat2"):
        at_cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        return libc.renameat2(at_cwd, names[0], at_cwd, names[1], exchange) == 0
    if hasattr(libc, "renamex_np"):
        return libc.renamex_np(*names, 2) == 0  # RENAME_SWAP
    return False


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sibling(path: Path, kind: str) -> Path:
    """A new hidden name beside `path`; `kind` is `tmp` or `old`."""
    return path.parent / f".{path.name}.{kind}-{secrets.token_hex(_TOKEN_BYTES)}"


def _is_ours(left: Path) -> bool:
    """Releases that held no lock gave 8 digits, to what they moved aside, too: such a folder is only named."""
    return len(left.name.rpartition("-")[2]) == 2 * _TOKEN_BYTES


def locked_folder(path: Path, held: contextlib.ExitStack) -> Path:
    """A new temporary sibling of `path`, locked until `held` closes."""
    while True:
        temporary = sibling(path, "tmp")
        temporary.mkdir()
        free = try_lock(temporary, held)
        # Between the two lines above another run may have taken it for a leftover.
        if free is not False and temporary.exists():
            return temporary


def try_lock(path: Path, held: contextlib.ExitStack) -> bool | None:
    """Locks `path` until `held` closes. False: another process holds it. None: nobody can tell on this system."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False  # its run has just finished
    except OSError:  # Windows opens no folders
        return None
    held.callback(os.close, descriptor)
    return lock(descriptor)


def lock(descriptor: int) -> bool | None:
    """Locks an open file for this process: False where another holds it, None where the system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True
