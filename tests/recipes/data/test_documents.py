"""Text to tokens: the cache is used when, and only when, it holds the same text through the same tokenizer."""

import gzip
import json

import numpy as np
import pytest
from palimpsa_surgery.base import text as text_module
from palimpsa_surgery.base.errors import DataError, OutputError
from palimpsa_surgery.base.text import EMBEDDED_TEXT, embedded_checkpoint_path
from palimpsa_surgery.recipes.data import documents as data
from palimpsa_surgery.recipes.data.documents import cache_folder, open_text, tokenizer_key
from palimpsa_surgery.surgery.checkpoint.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(embedded_checkpoint_path())


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i} " * (i + 1)}) + "\n" for i in range(5)))
    return path


def counted(monkeypatch):
    calls = []
    original = data._tokenize
    monkeypatch.setattr(data, "_tokenize", lambda *args, **kwargs: (calls.append(1), original(*args, **kwargs)))
    return calls


def test_tokens_are_those_of_the_tokenizer(text, tokenizer, tmp_path):
    store = open_text(text, tokenizer, cache=tmp_path / "cache")
    assert store.documents == 5
    third = store.tokens[store.offsets[2] : store.offsets[3]].tolist()
    assert third == [*tokenizer("document 2 " * 3, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert store.tokens.dtype == np.uint16


def test_the_same_text_is_tokenized_once(text, tokenizer, tmp_path, monkeypatch):
    calls = counted(monkeypatch)
    first = open_text(text, tokenizer, cache=tmp_path / "cache")
    packed = tmp_path / "elsewhere" / text.name
    packed.parent.mkdir()
    packed.write_bytes(text.read_bytes())
    assert open_text(packed, tokenizer, cache=tmp_path / "cache").key == first.key
    assert len(calls) == 1


@pytest.mark.parametrize("setting", ["PALIMPSA_CACHE", "XDG_CACHE_HOME"])
def test_a_cache_that_cannot_be_written_names_the_variable(text, tokenizer, tmp_path, monkeypatch, setting):
    monkeypatch.delenv("PALIMPSA_CACHE", raising=False)
    monkeypatch.setenv(setting, str(text / "below-a-file"))
    with pytest.raises(
        OutputError, match=r"tokens: the tokenized text cannot be written there .*PALIMPSA_CACHE or data"
    ):
        open_text(text, tokenizer)


@pytest.mark.parametrize("change", ["text", "end", "chat template", "more files"])
def test_anything_that_changes_the_tokens_is_another_key(change, text, tokenizer, tmp_path):
    key = open_text(text, tokenizer, cache=tmp_path / "cache").key
    other = load_tokenizer(embedded_checkpoint_path())
    source = text
    if change == "text":
        text.write_text(json.dumps({"text": "other"}) + "\n")
    elif change == "end":
        other.eos_token = "a"
    elif change == "chat template":
        other.chat_template = "{{ messages }}"
    else:
        source = [text, text]
    assert open_text(source, other, cache=tmp_path / "cache").key != key


def test_kinds_of_files_hold_the_same_text(text, tokenizer, tmp_path):
    lines = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, line in enumerate(lines):
        with gzip.open(folder / f"{number}.txt.gz", "wt") as stream:
            stream.write(line)
    packed = open_text(folder, tokenizer, cache=tmp_path / "cache")
    assert (packed.tokens[:] == open_text(text, tokenizer, cache=tmp_path / "cache").tokens[:]).all()


@pytest.mark.parametrize(("limit", "documents"), [(1, 1), (12, 2), (10_000, 5)])
def test_reading_stops_at_the_document_that_reaches_the_limit(limit, documents, text, tokenizer, tmp_path):
    whole = open_text(text, tokenizer, cache=tmp_path / "cache")
    part = open_text(text, tokenizer, max_tokens=limit, cache=tmp_path / "cache")
    assert part.documents == documents
    assert (part.offsets == whole.offsets[: documents + 1]).all()
    assert (part.tokens == whole.tokens[: len(part.tokens)]).all()


def test_a_killed_tokenizing_leaves_no_cache(text, tokenizer, tmp_path, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "_encode_texts", stop)
    with pytest.raises(KeyboardInterrupt):
        open_text(text, tokenizer, cache=tmp_path / "cache")
    monkeypatch.undo()
    assert not list((tmp_path / "cache" / "tokens").glob("*"))
    assert open_text(text, tokenizer, cache=tmp_path / "cache").documents == 5


def test_a_damaged_cache_is_named(text, tokenizer, tmp_path):
    open_text(text, tokenizer, cache=tmp_path / "cache")
    tokens = next((tmp_path / "cache").rglob("tokens.bin"))
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"cache .* is damaged; delete that folder"):
        open_text(text, tokenizer, cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "does not exist"),
        ("empty.txt", "", "holds no text"),
        ("bad.jsonl", "{", "is not JSON"),
        ("keys.jsonl", '{"words": "x"}\n', "words"),
    ],
)
def test_unreadable_text_is_named(name, content, message, tokenizer, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        open_text(path, tokenizer, cache=tmp_path / "cache")


def test_the_embedded_text_opens_by_name(tokenizer, tmp_path):
    store = open_text(EMBEDDED_TEXT, tokenizer, cache=tmp_path)
    assert store.documents > 10
    assert int(store.tokens.max()) < 4096


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("PALIMPSA_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("PALIMPSA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "palimpsa-surgery"
    assert cache_folder("given").name == "given"


def test_the_tokenizer_key_is_that_of_its_content(tokenizer):
    assert tokenizer_key(tokenizer) == tokenizer_key(load_tokenizer(embedded_checkpoint_path()))


@pytest.mark.parametrize(("kept", "ends"), [("parse", 2), ("text", 1)])
def test_special_tokens_that_a_text_spells_are_parsed_or_kept_text(tokenizer, tmp_path, kept, ends):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps("a <|endoftext|> b"))
    store = open_text(path, tokenizer, special_tokens=kept, cache=tmp_path / "cache")
    assert (store.tokens[:] == tokenizer.eos_token_id).sum() == ends
    assert tokenizer.decode(store.tokens[:-1]) == "a <|endoftext|> b"
    assert open_text(path, tokenizer, cache=tmp_path / "cache").key == store.key or kept == "text"


def test_a_very_long_document_is_tokenized_in_pieces(tokenizer, tmp_path, monkeypatch):
    content = "the quick brown fox\njumps over 3 lazy dogs " * 2000
    (tmp_path / "a.txt").write_text(content)
    whole = open_text(tmp_path / "a.txt", tokenizer, cache=tmp_path / "whole").tokens
    for module in (data, text_module):
        monkeypatch.setattr(module, "PIECE_CHARACTERS", 9000)
    pieces = open_text(tmp_path / "a.txt", tokenizer, cache=tmp_path / "pieces").tokens
    assert pieces.tolist() == whole.tolist()
    part = open_text(tmp_path / "a.txt", tokenizer, max_tokens=100, cache=tmp_path / "part").tokens
    assert 100 <= len(part) < len(whole) // 2
    assert part[:-1].tolist() == whole[: len(part) - 1].tolist()
