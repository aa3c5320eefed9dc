"""Where a figure comes from, and the tables."""

import csv

import common
import pytest


def test_tables_have_the_columns_of_all_rows(tmp_path):
    rows = [{"a": 1}, {"a": 2, "b": "x"}]
    assert common.markdown_table(rows) == "| a | b |\n| --- | --- |\n| 1 |  |\n| 2 | x |\n"
    common.write_csv(tmp_path / "new" / "rows.csv", rows)
    with (tmp_path / "new" / "rows.csv").open() as stream:
        assert list(csv.DictReader(stream)) == [{"a": "1", "b": ""}, {"a": "2", "b": "x"}]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-o", "/home/me/out", "steps=3"], "-o out steps=3"),
        (["data.train=/home/me/text.jsonl.gz"], "data.train=text.jsonl.gz"),
        (["../shared/model", "a b"], "../shared/model 'a b'"),
    ],
)
def test_the_command_names_no_folder_of_this_machine(words, expected):
    assert common.command_line("x.py", words) == f"python benchmarks/x.py {expected}"


def test_a_commit_is_noted_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "ROOT", tmp_path)
    assert common.commit() == ""
    assert common.provenance("abc1234")["commit"] == "abc1234"
