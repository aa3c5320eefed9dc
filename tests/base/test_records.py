"""Records with their place: what each kind of file, fault and folder gives."""

import gzip
import json
import tracemalloc

import pytest
from palimpsa_surgery.base import records
from palimpsa_surgery.base.errors import DataError
from palimpsa_surgery.base.text import iter_documents


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", '"one"\n"two"\n', ["one", "two"]),
        ("a.jsonl.gz", '{"text": "one"}\n', ["one"]),
        ("a.json", '["one"]', ["one"]),
        ("a.txt", "one", ["one"]),
        ("a.jsonl", '{"text": "\\ud83d\\ude00 \\\\ud83d"}', ["\U0001f600 \\ud83d"]),
    ],
)
def test_a_byte_order_mark_is_no_text_and_whole_pairs_are_characters(tmp_path, name, content, expected):
    path = tmp_path / name
    encoded = content.encode("utf-8-sig")
    path.write_bytes(gzip.compress(encoded) if name.endswith(".gz") else encoded)
    assert list(iter_documents(path)) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a\\ud83d"}', r"holds half a character \(\\ud83d without its other half\)"),
        ('{"text": "a", "more": ["\\uDC00"]}', "holds half a character"),
        ('{"text": null}', 'has null as "text"; expected a string'),
    ],
)
def test_a_line_that_cannot_be_a_text_is_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('"fine"\n' + line + "\n")
    with pytest.raises(DataError, match=rf"a\.jsonl:2: {message}"):
        list(iter_documents(tmp_path / "a.jsonl"))


def test_every_file_of_a_folder_is_read_or_said_to_be_left_out(tmp_path, caplog):
    for name in (".hidden/a.txt", ".b.txt", "deep/c.txt", "d.txt", "LICENSE.txt", "e.md", "f.jsonl.zst"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    (tmp_path / "again").symlink_to(tmp_path / "deep")
    for _ in range(2):
        assert list(iter_documents(tmp_path)) == ["d.txt", "deep/c.txt"]
    [said] = [record.message for record in caplog.records]
    assert "2 files read, d.txt, deep/c.txt; left out: " in said
    for fate in (
        ".b.txt, .hidden (hidden)",
        "LICENSE.txt (about the files, not of them)",
        "e.md, f.jsonl.zst (of another kind)",
        "loop.txt (no regular file)",
        "again (a link to a folder)",
    ):
        assert fate in said


@pytest.mark.parametrize("there", [True, False])
def test_parquet_is_read_or_named(tmp_path, caplog, monkeypatch, there):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["one", "two"], "id": [1, 2]}), tmp_path / "a.parquet")
    (tmp_path / "b.txt").write_text("three")
    if not there:
        monkeypatch.setattr(records.importlib.util, "find_spec", lambda name: None)
    assert list(iter_documents(tmp_path)) == (["one", "two", "three"] if there else ["three"])
    assert there or "a.parquet (needs palimpsa-surgery[train])" in caplog.text


def test_a_damaged_parquet_file_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read"):
        list(iter_documents(tmp_path / "a.parquet"))


def test_a_name_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "a.txt").write_text("one")
    assert list(iter_documents("~/a.txt")) == ["one"]


def test_of_a_long_text_only_the_part_that_is_wanted_is_in_memory(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(("\u00e9" * 20_000_000).encode(), 1))
    tracemalloc.start()
    try:
        assert list(iter_documents(path, longest=1001)) == ["\u00e9" * 1001]
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_json_of_several_lines_names_the_line(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(["a", "b"], indent=1).replace('"b"', "b"))
    with pytest.raises(DataError, match=r"a\.json:3: is not JSON"):
        list(iter_documents(tmp_path / "a.json"))
