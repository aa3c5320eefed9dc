import gzip
import json

import numpy as np
import pytest
from palimpsa_surgery.base import text
from palimpsa_surgery.base.errors import CheckpointError, DataError, UsageError
from palimpsa_surgery.surgery.checkpoint.tokenizer import load_tokenizer


class Characters:
    """A tokenizer of one id a character, whose end-of-text token is 0."""

    eos_token_id = 0
    opening: tuple = ()
    closing: tuple = ()

    def __call__(self, document, add_special_tokens, verbose=True):
        ids = [ord(c) for c in document]
        return {"input_ids": [*self.opening, *ids, *self.closing] if add_special_tokens else ids}


class NoEnd(Characters):
    eos_token_id = None


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(text.embedded_checkpoint_path())


def write(path, content):
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize(
    ("suffix", "content", "expected"),
    [
        (".jsonl", '{"text": "one"}\n\n"two"\n{"text": "  "}\n', ["one", "two"]),
        (".json", '[{"text": "one", "id": 3}, "two"]', ["one", "two"]),
        (".json", '{"text": "one"}', ["one"]),
        (".txt", "one\n\ntwo", ["one\n\ntwo"]),
    ],
)
def test_each_format_reads(tmp_path, suffix, packed, content, expected):
    path = write(tmp_path / f"data{suffix}{packed}", content)
    assert list(text.iter_documents(path)) == expected
    assert list(text.iter_documents(str(path))) == expected


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep" / "a.txt", "third")
    write(tmp_path / "b.txt.gz", "first")
    write(tmp_path / "c.jsonl", '"second"')
    write(tmp_path / "notes.md", "not data")
    assert list(text.iter_documents(tmp_path)) == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", '{"text": "a"}\n{"text": \n', r"d\.jsonl:2: is not JSON"),
        (
            "c.jsonl",
            '{"messages": []}\n',
            r"c\.jsonl:1: has keys messages \(conversations .* data\.chat=true\); expected",
        ),
        ("d.jsonl.gz", '{"text": "a"}\n{"txt": "b"}\n', r'd\.jsonl\.gz:2: has keys txt; expected .* "text"'),
        ("d.jsonl", "3\n", r"d\.jsonl:1: has a int"),
        ("d.jsonl", b'"a"\n"\xff"\n', r"d\.jsonl:2: is not UTF-8"),
        ("d.json", '{\n"text": }', r"d\.json:2: is not JSON"),
        ("d.json", '["a", {"text": 3}]', r"d\.json\[1\]: has a int as \"text\""),
        ("d.txt", "", r"d\.txt: holds no text"),
        ("d.jsonl", "\n\n", r"d\.jsonl: holds no text"),
        ("d.csv", "a,b", r"d\.csv: is of no known kind; expected \.jsonl, \.json, \.txt"),
    ],
)
def test_faulty_files_name_file_and_line(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message):
        list(text.iter_documents(write(tmp_path / name, content)))


def test_a_truncated_archive(tmp_path):
    path = write(tmp_path / "d.txt.gz", "word " * 1000)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(DataError, match=r"d\.txt\.gz: cannot be read"):
        list(text.iter_documents(path))


@pytest.mark.parametrize("name", ["absent.jsonl", "./absent", "/absent/folder"])
def test_a_path_that_does_not_exist_is_not_taken_for_a_dataset(name):
    with pytest.raises(DataError, match="does not exist; give a file"):
        list(text.iter_documents(name))


def test_a_dataset_that_cannot_be_loaded_is_one_line():
    pytest.importorskip("datasets")
    with pytest.raises(DataError, match=r"someone/nothing: is neither a file here nor a dataset") as caught:
        list(text.iter_documents("someone/nothing"))
    assert "\n" not in str(caught.value)


def test_numbers_with_commas():
    assert text.parse_numbers("--lengths", "64, 128") == (64, 128)
    for wrong in ("", "64,", "a", "-1", "1.5"):
        with pytest.raises(UsageError, match=f"--lengths {wrong}: expected whole numbers"):
            text.parse_numbers("--lengths", wrong)


def test_an_empty_folder(tmp_path):
    with pytest.raises(DataError, match=r"holds no \.jsonl"):
        list(text.iter_documents(tmp_path))


def test_outputs_name_the_text_and_never_a_folder_of_this_machine(tmp_path):
    assert text.data_name(None) == "embedded:sqlite-docs"
    assert text.data_name(tmp_path / "docs.jsonl") == "docs.jsonl"
    assert text.data_name(tmp_path) == tmp_path.name
    assert text.data_name("wikimedia/wikipedia:en") == "wikimedia/wikipedia:en"


def test_the_embedded_text_reads(tokenizer):
    documents = list(text.iter_documents(text.EMBEDDED_TEXT))
    assert len(documents) == 64
    assert documents == list(text.iter_documents())
    assert max(max(ids) for ids in text.tokenize_documents(documents[:3], tokenizer)) < 4093


def test_sequences_cover_the_joined_documents(tmp_path):
    path = write(tmp_path / "d.jsonl", "\n".join(json.dumps(c * 5) for c in "abc"))
    sequences, description = text.token_sequences(path, Characters(), tokens=18, seq_len=6, seed=3)
    joined = np.concatenate(sequences)
    assert sorted(set(joined)) == [0, *map(ord, "abc")]
    assert list(np.flatnonzero(joined == 0)) == [5, 11, 17], "each document ends with the end-of-text token"
    assert all(w.dtype == np.int64 and len(w) == 6 for w in sequences)
    assert description == {"data": "d.jsonl", "tokens": 18, "seq_len": 6, "windows": 3, "seed": 3}


def test_a_tokenizer_without_end_token_joins_without_one(tmp_path):
    path = write(tmp_path / "d.jsonl", '"aa"\n"bb"')
    sequences, _ = text.token_sequences(path, NoEnd(), tokens=4, seq_len=4)
    assert sorted(sequences[0]) == [97, 97, 98, 98]


def test_sequences_repeat_with_the_seed_and_change_with_it(tokenizer):
    def first(seed):
        return text.token_sequences(None, tokenizer, tokens=512, seq_len=128, seed=seed)[0]

    assert all(np.array_equal(a, b) for a, b in zip(first(1), first(1), strict=True))
    assert not np.array_equal(first(1)[0], first(2)[0])


def test_sequences_may_be_spread_over_more_text(tokenizer):
    every, _ = text.token_sequences(None, tokenizer, tokens=128 * 12, seq_len=128)
    spread, description = text.token_sequences(None, tokenizer, tokens=128 * 4, seq_len=128, spread=3)
    assert [next(i for i, sequence in enumerate(every) if np.array_equal(sequence, s)) for s in spread] == [0, 3, 6, 9]
    assert (description["windows"], description["tokens"]) == (4, 512)


def test_a_prefix_of_the_tokens_gives_the_first_sequences(tokenizer):
    few, _ = text.token_sequences(None, tokenizer, tokens=256, seq_len=128)
    more, _ = text.token_sequences(None, tokenizer, tokens=1000, seq_len=128)
    assert (len(few), len(more)) == (2, 7)
    assert all(np.array_equal(a, b) for a, b in zip(few, more, strict=False))


def test_a_short_text_gives_what_it_has(tmp_path, caplog):
    path = write(tmp_path / "d.txt", "a" * 20)
    sequences, description = text.token_sequences(path, Characters(), tokens=64, seq_len=8)
    assert [len(w) for w in sequences] == [8, 8]
    assert "holds only 16 tokens in whole sequences, 64 were asked for" in caplog.text
    sequences, description = text.token_sequences(path, Characters(), tokens=64, seq_len=64)
    assert [len(w) for w in sequences] == [21]
    assert (description["tokens"], description["seq_len"]) == (21, 21)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tokens": 64, "seq_len": 128}, UsageError, "64 tokens cannot fill one sequence of 128"),
        ({"tokens": 64, "seq_len": 1}, UsageError, "--seq-len 2 or more"),
        ({"tokens": 8, "seq_len": 8, "vocab_size": 97}, CheckpointError, "gives the id 97 .* embedding has 97 rows"),
    ],
)
def test_lengths_and_ids_that_make_no_sense(tmp_path, options, error, message):
    path = write(tmp_path / "d.txt", "aaaaaaaaaaaa")
    with pytest.raises(error, match=message):
        text.token_sequences(path, Characters(), **options)


def test_one_token_is_too_few(tmp_path):
    with pytest.raises(DataError, match="holds 1 token, too few"):
        text.token_sequences(write(tmp_path / "d.txt", "a"), NoEnd(), tokens=8, seq_len=8)


def test_only_the_first_part_of_a_huge_text_is_held(monkeypatch):
    monkeypatch.setattr(text, "_POOL_CHARACTERS", 10)
    read = []
    assert len(text._shuffled((read.append(i) or "abcd" for i in range(100)), 0)) == 3
    assert len(read) == 3


@pytest.mark.parametrize(
    ("name", "content", "most", "expected"),
    [
        ("a.jsonl", b'"one"\n"two"\n', 6, ["one"]),
        ("a.jsonl", b'"one"\n"two"\n', 8, ["one"]),
        ("a.jsonl", b'"one"\n"two"', 100, ["one", "two"]),
        ("a.txt", b"one", 3, ["one"]),
    ],
)
def test_of_a_file_no_more_than_so_many_bytes_are_read(tmp_path, name, content, most, expected):
    (tmp_path / name).write_bytes(content)
    assert list(text.documents_of_file(tmp_path / name, most_bytes=most)) == expected


def test_a_text_that_is_read_whole_is_refused_beyond_the_bound(tmp_path):
    (tmp_path / "a.txt").write_text("four")
    with pytest.raises(DataError, match=r"a\.txt: has more than 3 B; give it as \.jsonl"):
        list(text.documents_of_file(tmp_path / "a.txt", most_bytes=3))
