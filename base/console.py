"""What a person sees: progress on stderr, tables, units, log levels. Nothing here prints to stdout."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from tqdm import tqdm

_LOGGER_NAME = __package__.rsplit(".", 1)[0] if __package__ else "palimpsa_surgery"
Row = TypeVar("Row")
_settings = {"quiet": False}


def setup_logging(verbosity: int = 0) -> None:
    """Messages of this package go to stderr: errors only (-1), progress notes (0), everything (1)."""
    _settings["quiet"] = verbosity < 0
    level = {-1: logging.ERROR, 0: logging.INFO}.get(verbosity, logging.DEBUG)
    logger = logging.getLogger(_LOGGER_NAME)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s" if level >= logging.INFO else "%(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    if verbosity < 1:
        warnings.filterwarnings("ignore", category=FutureWarning)
    if not bars_are_drawn():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def bars_are_drawn() -> bool:
    """Whether progress is shown as a line that is redrawn: on a terminal, unless `-q`."""
    return not _settings["quiet"] and sys.stderr.isatty()


def progress(items: Iterable[Any] | int, description: str) -> tqdm[Any]:
    """A bar over `items`, or a context over a number of steps: on stderr, only on a terminal, not with `-q`."""
    from tqdm import tqdm

    iterable, total = (None, items) if isinstance(items, int) else (items, None)
    return tqdm(iterable, total=total, desc=description, leave=False, disable=True if _settings["quiet"] else None)


def table(rows: Iterable[Sequence[Any]], headers: Sequence[str]) -> str:
    """A plain-text table: numbers to the right, everything else to the left, no trailing spaces."""
    cells = [[_cell(value) for value in row] for row in rows]
    rows = [list(headers), *cells]
    widths = [max(len(row[column]) for row in rows) for column in range(len(headers))]
    right = [bool(cells) and all(_is_number(row[column]) for row in cells) for column in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            text.rjust(width) if is_right else text.ljust(width)
            for text, width, is_right in zip(row, widths, right, strict=True)
        ).rstrip()

    return "\n".join([line(rows[0]), line(["-" * width for width in widths]), *(line(row) for row in cells)])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", ""))
    except ValueError:
        return text == "-"
    return True


def shortened(rows: Sequence[Row], group: Callable[[Row], Hashable], most: int) -> list[Row]:
    """At most `most` of the rows, in their order, for a table that can be taken in at a glance.

    Every group gives its last row, where the longest and hardest stands, then its first, then those between, in turn
    with the other groups.
    """
    groups: dict[Hashable, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(group(row), []).append(number)
    order = [[numbers[-1], *numbers[:-1]] for numbers in groups.values()]
    turns = (numbers[turn] for turn in range(len(rows)) for numbers in order if turn < len(numbers))
    return [rows[number] for number in sorted(itertools.islice(turns, most))]


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """(1, 'layer') -> '1 layer'; (3, 'layer') -> '3 layers'. `plural` where it is not the noun with an s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_count(count: float) -> str:
    """1_470_000 -> '1.47 M'."""
    for unit in ("", "k", "M"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}".rstrip()
        count /= 1000
    return f"{count:.3g} G"


def human_seconds(seconds: float) -> str:
    """75 -> '1 min 15 s'."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
