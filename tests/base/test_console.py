import io
import logging

import pytest
from palimpsa_surgery.base import console


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "quiet", "drawn"), [(Terminal, False, True), (Terminal, True, False), (io.StringIO, False, False)]
)
def test_progress_is_drawn_on_a_terminal_only(monkeypatch, stream, quiet, drawn):
    err = stream()
    monkeypatch.setattr(console.sys, "stderr", err)
    monkeypatch.setitem(console._settings, "quiet", quiet)
    assert list(console.progress(["a", "b"], "reading")) == ["a", "b"]
    with console.progress(4, "training") as bar:
        bar.set_postfix_str("loss 3.1")
        bar.update(2)
    assert bool(err.getvalue()) is drawn
    if drawn:
        assert "reading:   0%" in err.getvalue()
        assert "loss 3.1" in err.getvalue()
        assert err.getvalue().endswith("\r"), "the line is wiped at the end"


def test_progress_of_unknown_length(monkeypatch):
    err = Terminal()
    monkeypatch.setattr(console.sys, "stderr", err)
    monkeypatch.setitem(console._settings, "quiet", False)
    assert list(console.progress(iter("xyz"), "lines")) == ["x", "y", "z"]
    assert "%" not in err.getvalue()


def test_progress_wipes_its_line_after_an_error(monkeypatch):
    err = Terminal()
    monkeypatch.setattr(console.sys, "stderr", err)
    monkeypatch.setitem(console._settings, "quiet", False)
    with pytest.raises(RuntimeError), console.progress(4, "training") as bar:
        bar.update()
        raise RuntimeError
    assert err.getvalue().endswith("\r")


@pytest.mark.parametrize(("verbosity", "shown"), [(-1, "error"), (0, "info error"), (1, "debug info error")])
def test_log_levels(monkeypatch, verbosity, shown):
    err = io.StringIO()
    monkeypatch.setattr(console.sys, "stderr", err)
    console.setup_logging(verbosity)
    console.setup_logging(verbosity)  # a second call must not double the messages
    logger = logging.getLogger("palimpsa_surgery.base.files")
    for level in ("debug", "info", "error"):
        getattr(logger, level)(level)
    assert [line.split()[-1] for line in err.getvalue().splitlines()] == shown.split()


def test_table_aligns_numbers_right_and_text_left():
    text = console.table([[10, 0.123456, "a"], [9, None, "bcd"]], ["layer", "rate", "rule"])
    assert text.splitlines() == [
        "layer    rate  rule",
        "-----  ------  ----",
        "   10  0.1235  a",
        "    9       -  bcd",
    ]
    assert console.table([], ["a", "b"]).splitlines()[0] == "a  b"


@pytest.mark.parametrize(
    ("call", "value", "text"),
    [
        (console.human_bytes, 512, "512 B"),
        (console.human_bytes, 1536, "1.5 KiB"),
        (console.human_bytes, 5.4 * 2**30, "5.4 GiB"),
        (console.human_bytes, 3 * 2**40, "3.0 TiB"),
        (console.human_count, 999, "999"),
        (console.human_count, 1_470_000, "1.47 M"),
        (console.human_count, 2.7e9, "2.7 G"),
        (console.human_seconds, 0.25, "0.2 s"),
        (console.human_seconds, 75, "1 min 15 s"),
        (console.human_seconds, 59.6, "1 min 0 s"),
        (console.human_seconds, 7322, "2 h 2 min"),
    ],
)
def test_units(call, value, text):
    assert call(value) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1, "layer"), "1 layer"),
        ((0, "layer"), "0 layers"),
        ((2, "layer"), "2 layers"),
        ((1, "query", "queries"), "1 query"),
        ((12_000, "query", "queries"), "12,000 queries"),
    ],
)
def test_counts_have_the_right_noun(arguments, text):
    assert console.counted(*arguments) == text


@pytest.mark.parametrize(
    ("most", "kept"),
    [
        (9, "a1 a2 a3 a4 b1 b2 c1"),
        (7, "a1 a2 a3 a4 b1 b2 c1"),
        (5, "a1 a4 b1 b2 c1"),
        (4, "a1 a4 b2 c1"),
        (3, "a4 b2 c1"),
        (1, "a4"),
        (0, ""),
    ],
)
def test_a_shortened_table_has_something_of_every_group(most, kept):
    rows = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
    assert console.shortened(rows, lambda row: row[0], most) == kept.split()
