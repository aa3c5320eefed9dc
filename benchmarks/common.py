"""What the benchmarks share: where a figure comes from, and tables of rows as CSV and markdown."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def device_name(*, cpu: bool = False) -> str:
    """The card, or the processor with the threads that torch uses."""
    if torch.cuda.is_available() and not cpu:
        return torch.cuda.get_device_name()
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def commit() -> str:
    """Of the repository, with a plus when its files differ from it; empty where git is not there."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def provenance(given_commit: str | None = None, *, cpu: bool = False) -> dict[str, str]:
    """What every row of a result says of machine, day and code."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {
        "device": device_name(cpu=cpu),
        "date": today,
        "commit": given_commit or commit(),
        "torch": torch.__version__,
    }


def command_line(script: str, argv: Sequence[str] | None = None) -> str:
    """The command as a person types it, without the folders of this machine."""
    words = sys.argv[1:] if argv is None else argv
    return shlex.join(["python", f"benchmarks/{script}", *(_without_folders(word) for word in words)])


def _without_folders(word: str) -> str:
    key, equals, value = word.rpartition("=")
    return f"{key}{equals}{Path(value).name}" if os.sep in value and Path(value).is_absolute() else word


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """All rows with the columns of all of them, in the order in which they first occur."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(rows)


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The same rows for a page; what a row lacks stays empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[str(row.get(column, "")) for column in columns] for row in rows]
    lines = [columns, ["---"] * len(columns), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
