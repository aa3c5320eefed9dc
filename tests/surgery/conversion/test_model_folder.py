"""The files beside the weights: copied without paths of a machine, refused in one line when they are broken."""

import json

import pytest
from palimpsa_surgery.base.errors import CheckpointError
from palimpsa_surgery.surgery.conversion.model_folder import copy_without_paths


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("added_tokens.json", b"{bad", r"added_tokens\.json: is no JSON in UTF-8 \(Expecting property name"),
        ("tokenizer.json", b'{"a": "\xff"}', r"tokenizer\.json: is no JSON in UTF-8 \('utf-8' codec can't decode"),
        ("tokenizer.json", b"", r"tokenizer\.json: is no JSON in UTF-8 \(Expecting value"),
    ],
)
def test_a_broken_file_of_the_tokenizer_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        copy_without_paths(tmp_path / name, tmp_path / "copy.json")
    assert not (tmp_path / "copy.json").exists()


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        ({"a": "/home/x/y", "b": "</s>"}, {"b": "</s>"}),
        ({"a": "C:\\x", "b": 1}, {"b": 1}),
        ({"a": "/"}, {"a": "/"}),
        ([1], [1]),
    ],
)
def test_entries_that_are_paths_of_a_machine_stay_behind(tmp_path, content, kept):
    (tmp_path / "a.json").write_text(json.dumps(content))
    copy_without_paths(tmp_path / "a.json", tmp_path / "copy.json")
    assert json.loads((tmp_path / "copy.json").read_text()) == kept
