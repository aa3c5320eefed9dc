import errno
import os

import pytest
from palimpsa_surgery.base import files
from palimpsa_surgery.base import siblings as beside
from palimpsa_surgery.base.errors import OutputError


@pytest.fixture
def no_exchange(monkeypatch):
    """A system that cannot exchange two names at once."""
    monkeypatch.setattr(beside, "_exchange", lambda first, second: False)


def siblings(path):
    return sorted(entry.name for entry in path.iterdir())


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.usefixtures("no_exchange")
def test_the_old_folder_comes_back_when_the_new_one_cannot_take_its_place(tmp_path, monkeypatch, failing):
    path = tmp_path / "out"
    path.mkdir()
    (path / "old").write_text("old")
    real, calls = os.replace, []

    def replace(source, target):
        calls.append((source, target))
        if failing == "replace" and len(calls) == 2:
            raise OSError(errno.EBUSY, "Device or resource busy")
        real(source, target)

    def fsync(handle):
        if failing == "fsync":
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(files.os, "replace", replace)
    monkeypatch.setattr(files.os, "fsync", fsync)
    with pytest.raises(OutputError, match=r"busy|quota"), files.output_folder(path, force=True) as folder:
        (folder / "new").write_text("new")
    assert siblings(path) == ["old"]
    assert siblings(tmp_path) == ["out"]


def killed(work):
    """Runs `work` in a process that is killed at its end."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)


def half(path):
    with files.output_folder(path, force=True) as folder:
        (folder / "config.json").write_text("{}")
        os.kill(os.getpid(), 9)


@pytest.mark.parametrize("start", [lambda path: files.refuse_existing(path, force=True), lambda path: half(path)])
def test_a_killed_process_leaves_no_half_valid_folder_and_the_next_run_clears_up(tmp_path, start):
    killed(lambda: half(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    (left,) = siblings(tmp_path)
    assert left.startswith(".out.tmp-")
    killed(lambda: start(tmp_path / "out"))
    assert left not in siblings(tmp_path)
    with files.output_folder(tmp_path / "out"):
        pass
    assert siblings(tmp_path) == ["out"]


def test_a_killed_write_of_a_file_is_cleared_by_the_next(tmp_path, monkeypatch):
    def work():
        monkeypatch.setattr(files.os, "fsync", lambda handle: os.kill(os.getpid(), 9))
        files.write_json(tmp_path / "a.json", 1)

    killed(work)
    assert len(siblings(tmp_path)) == 1
    files.write_json(tmp_path / "a.json", 2)
    assert siblings(tmp_path) == ["a.json"]


def test_what_a_live_run_writes_is_never_cleared(tmp_path):
    with files.output_folder(tmp_path / "out") as folder:
        (folder / "mine").write_text("mine")
        killed(lambda: half(tmp_path / "out"))
        files.refuse_existing(tmp_path / "out", force=True)
    assert siblings(tmp_path / "out") == ["mine"]
    assert siblings(tmp_path) == ["out"]


@pytest.mark.parametrize("system", ["exchange", "two renames"])
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_killed_after_any_rename_the_next_run_finds_old_or_new(tmp_path, monkeypatch, system, calls):
    path, real, done = tmp_path / "out", os.replace, []
    path.mkdir()
    (path / "old").write_text("old")
    if system == "two renames":
        monkeypatch.setattr(beside, "_exchange", lambda first, second: False)

    def replace(source, target):
        real(source, target)
        done.append(target)
        if len(done) == calls:
            os.kill(os.getpid(), 9)

    def work():
        monkeypatch.setattr(files.os, "replace", replace)
        monkeypatch.setattr(beside.shutil, "rmtree", lambda *_, **__: os.kill(os.getpid(), 9))
        with files.output_folder(path, force=True) as folder:
            (folder / "new").write_text("new")

    killed(work)
    files.refuse_existing(path, force=True)
    assert siblings(path) == (["old"] if system == "two renames" and calls == 1 else ["new"])
    assert [name for name in siblings(tmp_path) if name != "out"] == (
        siblings(tmp_path)[:1] if system == "two renames" and calls == 2 else []
    ), "only what nobody can decide on stays"


@pytest.mark.parametrize("name", [".out.old-0123456789ab", ".out.tmp-01234567"])
def test_leftovers_that_may_be_missed_are_named(tmp_path, caplog, name):
    (tmp_path / "out").mkdir()
    (tmp_path / name).mkdir()
    files.refuse_existing(tmp_path / "out", force=True)
    assert f"{name}: was left by another run" in caplog.text
    assert siblings(tmp_path) == [name, "out"]


@pytest.mark.usefixtures("no_exchange")
def test_a_system_without_locks_and_exchange_names_what_is_left(tmp_path, monkeypatch, caplog):
    """Windows, and some network disks."""
    monkeypatch.setattr(beside, "fcntl", None)
    (tmp_path / ".out.tmp-0123456789ab").mkdir()
    for content in ("first", "second"):
        with files.output_folder(tmp_path / "out", force=True) as folder:
            (folder / content).write_text(content)
    assert siblings(tmp_path / "out") == ["second"]
    assert siblings(tmp_path) == [".out.tmp-0123456789ab", "out"]
    assert "was left by another run" in caplog.text
