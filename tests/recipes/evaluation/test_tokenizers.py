"""Every verb that needs a tokenizer opens it in one way, and begins each text as the tokenizer does."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pico
import pytest
from palimpsa_surgery.base.errors import CheckpointError, UsageError
from palimpsa_surgery.base.text import embedded_checkpoint_path, token_sequences
from palimpsa_surgery.recipes.data.documents import open_text, tokenizer_key
from palimpsa_surgery.recipes.evaluation import harness
from palimpsa_surgery.recipes.evaluation.evaluate import evaluate
from palimpsa_surgery.recipes.evaluation.generation import generate
from palimpsa_surgery.recipes.evaluation.suites import needle as suite_needle
from palimpsa_surgery.recipes.evaluation.suites import recall as suite_recall
from palimpsa_surgery.recipes.evaluation.suites.suite import EvalText
from palimpsa_surgery.recipes.training.finetune import finetune
from palimpsa_surgery.surgery.checkpoint.tokenizer import load_tokenizer
from palimpsa_surgery.surgery.conversion.convert import MeasureOptions, convert
from palimpsa_surgery.surgery.conversion.export import export
from palimpsa_surgery.surgery.measure.forgetting import measure
from tiny import make_model, save_folder

EMBEDDED = embedded_checkpoint_path()
VERBS = {
    "measure": lambda folder, recipe, out: measure(folder, tokens=64, seq_len=32),
    "evaluate": lambda folder, recipe, out: evaluate(folder, suites=("loss",), lengths=(32,), tokens=64),
    "probe": lambda folder, recipe, out: evaluate(folder, suites=("recall",), lengths=(32,), tokens=64, trials=1),
    "generate": lambda folder, recipe, out: generate(folder, "a", max_new_tokens=1),
    "convert": lambda folder, recipe, out: convert(folder, out, layers=1),
    "finetune": lambda folder, recipe, out: finetune(folder, recipe, out),
    "export": lambda folder, recipe, out: export(folder, out),
}
ADVICE = {
    "finetune": "give one with data.tokenizer,",
    "export": "put the files of its tokenizer there again, or remove",
}
"""What a verb says that has no `--tokenizer`."""


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path.parent


def no_files(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()


def own_code(folder):
    edit_json(
        folder / "tokenizer_config.json", lambda content: content.update(auto_map={"AutoTokenizer": ["my.T", None]})
    )


def damaged(folder):
    (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("fault", "message", "advises"),
    [
        (no_files, "m: has no tokenizer; ", True),
        (own_code, r"own \(my\.T\)", False),
        (damaged, r"m: its tokenizer cannot be read \(.*\); ", True),
    ],
)
@pytest.mark.parametrize("layout", ["hf", "palimpsa"])
@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_makes_a_tokenizer_up(tmp_path, recipe, verb, layout, fault, message, advises):
    if verb == "export" and (fault is no_files or layout == "palimpsa"):
        pytest.skip("a model is exported without a tokenizer, and with swapped layers not in this layout")
    message += ADVICE.get(verb, "give one with --tokenizer,") if advises else ""
    sizes = {"rows": 4096, "vocab": 4093, **({"swapped": (1,)} if layout == "palimpsa" else {})}
    pico.write_hf(tmp_path / "m", config={"time_step_limit": [0.0, None]}, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "m" / name).write_bytes((EMBEDDED / name).read_bytes())
    fault(tmp_path / "m")
    with pytest.raises(CheckpointError, match=message):
        VERBS[verb](tmp_path / "m", recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_hands_on_the_tokenizer_that_its_recipe_names(tmp_path, recipe):
    make_model(eos_token_id=None).save_pretrained(tmp_path / "bare")
    recipe["data"]["tokenizer"] = str(EMBEDDED)
    final = finetune(tmp_path / "bare", {**recipe, "steps": 1}, tmp_path / "run").final
    assert load_tokenizer(final).eos_token_id == json.loads((final / "config.json").read_text())["eos_token_id"] == 0
    assert json.loads((final / "generation_config.json").read_text())["eos_token_id"] == 0


# The start of a text.


@pytest.fixture
def begins(tmp_path):
    """A tokenizer that puts id 0 before a text."""
    folder = tmp_path / "begins"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((EMBEDDED / name).read_bytes())
    return load_tokenizer(edit_json(folder / "tokenizer.json", pico.with_first_token))


@pytest.fixture
def documents(tmp_path):
    path = tmp_path / "two.jsonl"
    path.write_text('"the first row"\n"a second column"\n')
    return path


def test_documents_begin_as_the_tokenizer_begins_a_text(begins, documents, tmp_path):
    expected = [*begins("the first row")["input_ids"], 0, *begins("a second column")["input_ids"], 0]
    assert expected[0] == 0
    store = open_text(documents, begins, cache=tmp_path / "cache")
    assert store.tokens.tolist() == expected
    [sequence], _ = token_sequences(documents, begins, tokens=512, seq_len=512)
    assert sorted(sequence.tolist()) == sorted(expected)
    assert sequence[0] == 0


def test_a_document_in_pieces_begins_once(begins, tmp_path, monkeypatch):
    from palimpsa_surgery.base import text
    from palimpsa_surgery.recipes.data import documents as data

    for module in (data, text):
        monkeypatch.setattr(module, "PIECE_CHARACTERS", 5000)
    (tmp_path / "long.txt").write_text("the quick brown fox\n" * 1000)
    store = open_text(tmp_path / "long.txt", begins, cache=tmp_path / "cache")
    assert np.flatnonzero(store.tokens == 0).tolist() == [0, len(store.tokens) - 1]


def test_tokens_of_another_beginning_are_another_cache_entry(begins):
    assert tokenizer_key(begins) != tokenizer_key(load_tokenizer(EMBEDDED))


def test_probes_begin_as_the_tokenizer_begins_a_text(begins):
    plain, other = (
        EvalText(None, tokenizer, longest=128, tokens=2048, seed=0, vocab_size=4096)
        for tokenizer in (load_tokenizer(EMBEDDED), begins)
    )
    ids, key = suite_needle.needle_sequence(other, 64, 0.5, 0)
    assert (ids[0], len(ids)) == (0, 64)
    assert ids[-len(key) :].tolist() == key.tolist()
    before, after = (suite_recall.recall_sequence(text, 4, 32, 0) for text in (plain, other))
    assert after[0][0] == 0
    assert len(after[0]) == len(before[0]) + 1
    assert (after[2] == before[2] + 1).all()
    assert (after[0][after[2] + 1] == after[1]).all()


def test_the_harness_begins_as_the_tokenizer_begins_a_text(begins, monkeypatch):
    asked = []

    class Model:
        def __init__(self, **options):
            asked.append(options["add_bos_token"])
            raise ValueError("enough")

    manager = SimpleNamespace(match_tasks=lambda names: names)
    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=None))
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", SimpleNamespace(HFLM=Model))
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", SimpleNamespace(TaskManager=lambda **options: manager))
    for tokenizer in (begins, load_tokenizer(EMBEDDED)):
        with pytest.raises(ValueError, match=r"the harness stopped .*enough"):
            harness.run_tasks(None, tokenizer, harness.open_tasks(["x"]), length=8)
    assert asked == [True, False]


# Comparing two models.


def test_models_whose_tokenizers_split_a_text_otherwise_are_not_compared(model_folder, tmp_path):
    """One vocabulary, other rules."""
    other = save_folder(make_model(), tmp_path / "other")
    edit_json(other / "tokenizer.json", lambda content: content.update(normalizer={"type": "Lowercase"}))
    with pytest.raises(UsageError, match="model and other have different tokenizers"):
        evaluate(model_folder, other, suites=("loss",), lengths=(32,), tokens=64)


# A tokenizer that was named although the model has one.


@pytest.mark.parametrize("changed", [True, False], ids=["other ids", "the same ids"])
@pytest.mark.parametrize("verb", ["measure", "evaluate", "generate", "convert", "finetune"])
def test_a_tokenizer_that_gives_other_ids_than_the_models_own_is_said(
    verb, changed, model_folder, recipe, tmp_path, caplog
):
    other = tmp_path / "other"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((EMBEDDED / name).read_bytes())
    edit_json(
        other / "tokenizer.json", lambda content: content.update(normalizer={"type": "Lowercase"} if changed else None)
    )
    named = {"tokenizer": other}
    texts = {
        "measure": lambda: measure(model_folder, tokens=64, seq_len=32, **named),
        "evaluate": lambda: evaluate(model_folder, suites=("loss",), lengths=(32,), tokens=64, **named),
        "generate": lambda: generate(model_folder, "a", max_new_tokens=1, **named),
        "convert": lambda: convert(
            make_plain(tmp_path), tmp_path / "out", layers=(1,), measuring=MeasureOptions(**named)
        ),
        "finetune": lambda: finetune(
            model_folder, {**recipe, "steps": 1, "data": {**recipe["data"], "tokenizer": str(other)}}, tmp_path / "run"
        ),
    }
    result = texts[verb]()
    said = "\n".join(result.notes) if verb == "evaluate" else caplog.text
    assert ("other gives texts other ids than the one in" in said) == changed


def make_plain(folder):
    return save_folder(make_model(layers=()), folder / "plain")
