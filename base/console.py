"""What a person sees: progress on stderr, tables, units, log levels. Nothing here prints to stdout."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence, Sized
from types import TracebackType
from typing import Any, TypeVar

_LOGGER_NAME = __package__.rsplit(".", 1)[0] if __package__ else "palimpsa_surgery"
_REDRAW_SECONDS = 0.1
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


class Progress:
    """One line on stderr, redrawn at most ten times a second; silent when stderr is not a terminal or with `-q`.

    An iterator (`for x in progress(items, "reading")`) or a context (`with progress(100, "training") as bar:
    bar.advance()`).
    """

    def __init__(self, items: Iterable[Any] | int | None, description: str) -> None:
        self._items = items if isinstance(items, Iterable) else None
        self._total = len(items) if isinstance(items, Sized) else items if isinstance(items, int) else None
        self._description = description
        self._done = 0
        self._note = ""
        self._started = self._drawn = time.monotonic()
        self._width = 0

    def __enter__(self) -> Progress:
        self._started = self._drawn = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
            self._width = 0

    def __iter__(self) -> Iterator[Any]:
        with self:
            for item in self._items if self._items is not None else range(self._total or 0):
                yield item
                self.advance()

    def advance(self, count: int = 1, note: str = "") -> None:
        """Counts `count` more as done; `note` is a short text such as the last loss."""
        self._done += count
        self._note = note or self._note
        now = time.monotonic()
        if bars_are_drawn() and now - self._drawn >= _REDRAW_SECONDS:
            self._drawn = now
            self._draw(now - self._started)

    def _draw(self, elapsed: float) -> None:
        parts = [self._description]
        if self._total:
            parts.append(f"{self._done}/{self._total} {100 * self._done // self._total}%")
            parts.append(f"{human_seconds(elapsed * (self._total - self._done) / max(self._done, 1))} left")
        else:
            parts.append(str(self._done))
        line = "  ".join([*parts, self._note] if self._note else parts)
        sys.stderr.write("\r" + line.ljust(self._width))
        sys.stderr.flush()
        self._width = max(self._width, len(line))


def progress(items: Iterable[Any] | int | None, description: str) -> Progress:
    """A `Progress` over `items`, over a number of steps, or of unknown length (None)."""
    return Progress(items, description)


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


def listed(noun: str, items: Collection[Any]) -> str:
    """('layer', [3]) -> 'layer 3'; ('layer', [1, 3]) -> 'layers 1, 3'."""
    return f"{noun if len(items) == 1 else noun + 's'} {', '.join(map(str, items))}"


def are(count: int) -> str:
    """The verb that goes with a count."""
    return "is" if count == 1 else "are"


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
