"""An evaluation says when its text was trained on: the same file, a copy, a part, or only a text of the same name."""

import json
import os
import shutil

import pytest
import yaml
from palimpsa_surgery.recipes.evaluation import seen
from palimpsa_surgery.recipes.evaluation.evaluate import evaluate
from palimpsa_surgery.recipes.evaluation.report import SeenText, read_report
from palimpsa_surgery.recipes.evaluation.seen import seen_text
from palimpsa_surgery.recipes.training.finetune import finetune
from palimpsa_surgery.surgery.checkpoint.sources import recipe_files
from palimpsa_surgery.surgery.conversion.convert import convert

TRAINED = [f"document {number} of the training text" for number in range(6)]
OTHERS = [f"something else, number {number}" for number in range(4)]


def write(path, documents):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


@pytest.fixture
def model(tmp_path):
    """A folder with a recipe: a function of the training text."""

    def folder(train):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "recipe.yaml").write_text(yaml.safe_dump({"data": {"train": train}}))
        return tmp_path / "model"

    return folder


@pytest.mark.parametrize(
    ("documents", "count"),
    [
        (TRAINED, 6),
        (TRAINED[2:3], 1),
        ([f"  {TRAINED[0]}\n", *OTHERS], 1),
        ([*OTHERS, *TRAINED[:3]], 3),
        ([TRAINED[0], TRAINED[0], OTHERS[0]], 2),
        (OTHERS, None),
    ],
)
def test_documents_are_compared_by_their_content(model, tmp_path, documents, count):
    train = write(tmp_path / "train.jsonl", TRAINED)
    found = seen_text(model(str(train)), write(tmp_path / "copy.jsonl", documents))
    assert found == (None if count is None else SeenText(name="train.jsonl", documents=count, of=len(documents)))


def test_several_training_texts_count_together(model, tmp_path):
    sources = [str(write(tmp_path / f"{i}.jsonl", TRAINED[2 * i : 2 * i + 2])) for i in range(3)]
    found = seen_text(model(sources), write(tmp_path / "eval.jsonl", TRAINED[1:3] + OTHERS))
    assert found == SeenText(name="0.jsonl, 1.jsonl", documents=2, of=6)


@pytest.mark.parametrize("data", [None, "embedded:sqlite-docs"])
def test_the_embedded_text_is_known_by_either_name(model, data):
    found = seen_text(model("embedded:sqlite-docs"), data)
    assert found.name == "embedded:sqlite-docs"
    assert found.documents == found.of > 50


def test_of_a_text_that_is_gone_only_the_name_is_compared(model, tmp_path, caplog):
    folder = model("/somewhere/else/train.jsonl")
    same = seen_text(folder, write(tmp_path / "train.jsonl", OTHERS))
    assert same == SeenText(name="train.jsonl", documents=None, of=4)
    assert seen_text(folder, write(tmp_path / "other.jsonl", OTHERS)) is None
    assert caplog.messages[-1].endswith("train.jsonl, which the model was trained on, is not here: " + seen._UNKNOWN)


@pytest.mark.parametrize("recipe", [None, "data: [", "just text", "data: {train: null}", "data: {train: [3]}", "[]"])
def test_without_a_recipe_that_says_so_nothing_is_claimed(tmp_path, recipe):
    if recipe is not None:
        (tmp_path / "recipe.yaml").write_text(recipe)
    assert seen_text(tmp_path, write(tmp_path / "eval.jsonl", OTHERS)) is None


@pytest.mark.parametrize(
    "recipe",
    [
        "data: {train: 5}",
        "data: {train: true}",
        "data: {train: [3]}",
        "data: {train: [[a]]}",
        f"data: {{train: {'x' * 5000}.txt}}",
        'data: {train: "x\\0y.txt"}',
        'data: {train: "\\e[31m.txt"}',
        "? [1]\n: 2",
        "#" * (2 << 20),
        "data: {train: null}",
        "data: {}",
        "{schema_version: 99, data: {train: a.jsonl}}",
        "just text",
    ],
)
def test_a_damaged_recipe_is_a_warning(tmp_path, caplog, recipe):
    (tmp_path / "recipe.yaml").write_text(recipe)
    assert seen_text(tmp_path, write(tmp_path / "eval.jsonl", OTHERS)) is None
    assert caplog.messages[0].endswith("what the model was trained on is not known")


@pytest.mark.parametrize(
    ("below", "other", "documents"),
    [("project/run/final", TRAINED, 6), ("project/run/final", OTHERS, None), ("elsewhere/final", OTHERS, "name")],
)
def test_a_relative_name_is_not_that_of_the_current_folder(tmp_path, monkeypatch, below, other, documents):
    for folder in ("project", "other", below):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    write(tmp_path / "project" / "t.jsonl", TRAINED)
    write(tmp_path / "other" / "t.jsonl", other)
    (tmp_path / below / "recipe.yaml").write_text("data: {train: t.jsonl}")
    monkeypatch.chdir(tmp_path / "other")
    found = seen_text(tmp_path / below, "t.jsonl")
    if documents is None:
        assert found is None
    else:
        count = None if documents == "name" else documents
        assert found == SeenText(name="t.jsonl", documents=count, of=len(other))


def test_a_text_that_was_changed_after_the_training_is_not_compared(model, tmp_path, caplog):
    train = write(tmp_path / "train.jsonl", TRAINED)
    folder = model(str(train))
    later = (folder / "recipe.yaml").stat().st_mtime + 10
    os.utime(train, (later, later))
    assert seen_text(folder, write(tmp_path / "eval.jsonl", TRAINED)) is None
    assert "was changed after the training" in caplog.text
    assert seen_text(folder, train) == SeenText(name="train.jsonl", documents=None, of=6)


def test_of_a_folder_only_a_bounded_number_of_regular_text_files_is_read(model, tmp_path, monkeypatch):
    texts = tmp_path / "texts"
    (texts / "part").mkdir(parents=True)
    train, copy = write(texts / "part" / "a.jsonl", TRAINED), write(tmp_path / "copy.jsonl", TRAINED)
    os.mkfifo(texts / "b.txt")
    assert seen_text(model(str(texts)), copy).documents == 6
    monkeypatch.setattr(seen, "MOST_BYTES", train.stat().st_size // 2)
    assert seen_text(model(str(texts)), copy).documents < 6
    monkeypatch.setattr(seen, "MOST_ENTRIES", 2)
    assert seen_text(model(str(texts)), copy) is None


@pytest.mark.parametrize("name", ["/", "/dev/zero", "fifo.txt"])
def test_a_disk_a_device_and_a_pipe_are_never_opened(model, tmp_path, monkeypatch, name):
    os.mkfifo(tmp_path / "fifo.txt")

    def refuse(*args, **kwargs):
        raise AssertionError(args)

    copy = write(tmp_path / "copy.jsonl", TRAINED)
    monkeypatch.setattr(seen, "documents_of_file", refuse)
    monkeypatch.setattr(os, "walk", refuse)
    assert seen_text(model(str(tmp_path / name)), copy) is None


def test_conversations_are_no_documents_to_compare(model, tmp_path, caplog):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n")
    assert seen_text(model(str(path)), write(tmp_path / "eval.jsonl", OTHERS)) is None
    assert caplog.messages[-1].endswith(seen._UNKNOWN)


def test_of_a_very_long_text_the_beginning_is_compared(model, tmp_path, monkeypatch):
    monkeypatch.setattr(seen, "MOST_CHARACTERS", len(TRAINED[0]) + 1)
    train = write(tmp_path / "train.jsonl", TRAINED)
    assert seen_text(model(str(train)), write(tmp_path / "eval.jsonl", TRAINED)).of == 2


def test_what_a_model_was_made_from_counts_too(model_folder, recipe, text, tmp_path):
    """Fine-tuned, converted again and fine-tuned on another text: the first text is not held out."""
    other = write(tmp_path / "other.jsonl", [f"{one} and more words of it" for one in OTHERS * 9])
    first = finetune(model_folder, {**recipe, "steps": 1}, tmp_path / "first").final
    again = tmp_path / "again"
    convert(first, again, layers=(0,), verify="none")
    assert [path.name for path in recipe_files(again)] == ["recipe-1.yaml"]
    assert (again / "recipe-1.yaml").stat().st_mtime == (first / "recipe.yaml").stat().st_mtime
    assert seen_text(again, text) == SeenText(name="text.jsonl", documents=40, of=40)
    changes = {"steps": 1, "data": {**recipe["data"], "train": str(other), "val_fraction": 0}}
    last = finetune(again, {**recipe, **changes}, tmp_path / "last").final
    assert [path.name for path in recipe_files(last)] == ["recipe-1.yaml", "recipe.yaml"]
    assert seen_text(last, text) == SeenText(name="text.jsonl", documents=40, of=40)
    assert seen_text(last, other).name == "other.jsonl"


def test_earlier_recipes_are_counted_in_order_and_a_strange_one_is_left_out(model_folder, tmp_path, caplog):
    source = shutil.copytree(model_folder, tmp_path / "source")
    ours = "{{schema_version: 1, mode: full, seed: {}, data: {{train: a.jsonl}}}}"
    for name, seed in (("recipe-2", 2), ("recipe-10", 10), ("recipe", 11)):
        (source / f"{name}.yaml").write_text(ours.format(seed))
    (source / "recipe-1.yaml").write_text("flour: 200 g")
    (source / "recipe-of-mine.yaml").write_text("{}")
    convert(source, tmp_path / "out", layers=(0,), verify="none")
    seeds = [yaml.safe_load(path.read_text())["seed"] for path in recipe_files(tmp_path / "out")]
    assert seeds == [2, 10, 11]
    assert "recipe-1.yaml: is no recipe of this program and is not carried along" in caplog.text


def test_an_evaluation_of_the_training_text_says_so(model_folder, text, tmp_path):
    tuned = tmp_path / "tuned"
    shutil.copytree(model_folder, tuned)
    (tuned / "recipe.yaml").write_text(yaml.safe_dump({"data": {"train": str(text)}}))
    out = tmp_path / "eval.json"
    small = {"suites": ("loss",), "lengths": (32,), "tokens": 64}
    report = evaluate(tuned, model_folder, data=text, **small, out=out)
    assert report.model.seen == SeenText(name="text.jsonl", documents=40, of=40)
    assert report.against.seen is None
    sentence = "not held out: all 40 documents of the text are in text.jsonl, which tuned was trained on"
    assert report.notes[0] == sentence
    assert read_report(out) == report
    assert str(tmp_path) not in out.read_text()
    assert evaluate(tuned, **small).model.seen is None, "the embedded text is another"
