"""What may start in a run folder, what may go on there, and that nothing is lost before something takes its place."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import textwrap
import types

import numpy as np
import pytest
from palimpsa_surgery.base.errors import (
    DataError,
    OutputError,
    OutputExistsError,
    PalimpsaError,
    TrainingError,
    UsageError,
)
from palimpsa_surgery.recipes.data.packing import IGNORED, TokenSequence, TokenStream
from palimpsa_surgery.recipes.training import loop, run_folder
from palimpsa_surgery.recipes.training.finetune import finetune
from palimpsa_surgery.recipes.training.loop import check_batch
from palimpsa_surgery.recipes.training.metrics import read_metrics
from palimpsa_surgery.recipes.training.recipe import load_recipe
from palimpsa_surgery.recipes.training.run_folder import MAY_CHANGE, recipe_changes
from palimpsa_surgery.recipes.training.validation import evaluate_loss
from transformers import AutoTokenizer


def snapshot(folder):
    """Path -> content of every file below, and every folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def ended(model_folder, recipe_of, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ended")
    recipe = {**recipe_of(folder), "steps": 2, "save_every": 1}
    finetune(model_folder, recipe, folder / "run")
    return recipe, folder / "run"


@pytest.fixture
def finished(ended, tmp_path):
    """The recipe and the folder of a run that ended, with a checkpoint; a test may change the folder."""
    recipe, folder = ended
    return recipe, shutil.copytree(folder, tmp_path / "run")


FAULTS = {
    "no such text": ["data.train=typo.jsonl"],
    "no such tokenizer": ["data.tokenizer=nowhere"],
    "held-out text missing": ["data.val=typo.jsonl"],
    "no such target": ["mode=lora", "lora.targets=[typo]"],
    "no such device": ["mode=qlora"],
    "no such loss": ["loss=liger"],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_force_costs_nothing_when_the_new_run_cannot_start(fault, model_folder, finished):
    recipe, out = finished
    before = snapshot(out)
    with pytest.raises(PalimpsaError):
        finetune(model_folder, recipe, out, overrides=FAULTS[fault], force=True)
    assert snapshot(out) == before


@pytest.mark.parametrize("fault", FAULTS)
def test_a_refused_run_leaves_no_folder(fault, model_folder, recipe, tmp_path):
    with pytest.raises(PalimpsaError):
        finetune(model_folder, recipe, tmp_path / "new" / "run", overrides=FAULTS[fault])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lr=0.5", r"run: was started with another recipe \(lr: [0-9.e-]+, now 0\.5\); go on with the recipe\.yaml"),
        ("schedule=constant", "schedule: cosine, now constant"),
        ("batch_size=8", "batch_size: 4, now 8"),
        ("lora.alpha=5", r"lora\.alpha: 32\.0, now 5\.0"),
        ("data.seq_len=12", r"data\.seq_len: \d+, now 12"),
        ("steps=1", "steps: 2, now 1, and a run may only grow longer"),
    ],
)
def test_a_run_goes_on_as_it_was_started(override, message, model_folder, finished):
    recipe, out = finished
    before = snapshot(out)
    with pytest.raises(UsageError, match=message):
        finetune(model_folder, recipe, out, overrides=[override], resume=True)
    assert snapshot(out) == before


def test_every_difference_is_named_at_once(recipe):
    before, now = (load_recipe(recipe, changes) for changes in ((), ("lr=0.5", "seed=7", "lora.rank=3")))
    assert [change.split(":")[0] for change in recipe_changes(before, now)] == ["lora.rank", "lr", "seed"]


@pytest.mark.parametrize("key", sorted(MAY_CHANGE - {"steps", "tokens"}))
def test_what_may_change_is_a_key_and_changes(key, recipe):
    before = load_recipe(recipe)
    value = before
    for part in key.split("."):
        value = getattr(value, part)
    others = {"loss": "chunked", "save_dtype": "float32", "trackers": "[tensorboard]"}
    other = others.get(key) or {bool: str(not value), int: "2" if value != 2 else "1"}.get(type(value), "other")
    assert recipe_changes(before, load_recipe(recipe, [f"{key}={other}"])) == []


def test_a_longer_run_may_not_move_the_stages_of_a_curriculum(recipe):
    stages = {**recipe, "data": {**recipe["data"], "curriculum": [{"until": 0.5, "seq_len": 8}]}}
    before, now = load_recipe(stages), load_recipe(stages, ["steps=100"])
    assert "moves the stages of data.curriculum" in recipe_changes(before, now)[0]
    assert recipe_changes(load_recipe(recipe), load_recipe(recipe, ["steps=100"])) == []


def test_a_longer_run_goes_on(model_folder, finished):
    recipe, out = finished
    assert finetune(model_folder, recipe, out, overrides=["steps=3", "keep=1"], resume=True).steps == 3
    assert "steps: 3" in (out / "recipe.yaml").read_text()


def test_resume_needs_something_to_go_on_from(model_folder, recipe, finished, tmp_path):
    with pytest.raises(UsageError, match=r"nothing: --resume finds no run here .*start it without --resume"):
        finetune(model_folder, recipe, tmp_path / "nothing", resume=True)
    assert not (tmp_path / "nothing").exists()
    recipe, out = finished
    shutil.rmtree(out / "checkpoints")
    before = snapshot(out)
    with pytest.raises(
        UsageError, match=r"run: --resume finds no checkpoint, and from the start it would replace final/"
    ):
        finetune(model_folder, recipe, out, resume=True)
    assert snapshot(out) == before


def test_a_run_stopped_before_its_first_checkpoint_validates_its_start_once(
    model_folder, recipe, tmp_path, interrupted
):
    recipe = {**recipe, "steps": 3, "save_every": 3, "eval_every": 1}
    interrupted(1, model_folder, recipe, tmp_path / "run")
    finetune(model_folder, recipe, tmp_path / "run", resume=True)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "validation"] == [0, 1, 2, 3]
    assert [line["step"] for line in lines if line["kind"] == "start"] == [0]


def test_what_no_run_wrote_is_not_replaced(model_folder, recipe, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "mine.txt").write_text("mine")
    with pytest.raises(OutputExistsError, match=r"holds checkpoints and no recipe\.yaml, so no run wrote that"):
        finetune(model_folder, recipe, tmp_path, force=True)
    assert (tmp_path / "checkpoints" / "mine.txt").is_file()


INPUTS = {
    "data.train": ("checkpoints/a.jsonl", "data.train"),
    "data.val": ("final/val.jsonl", "data.val"),
    "a folder of texts around it": (".", "data.train"),
    "data.tokenizer": ("final", "data.tokenizer"),
    "data.cache": ("checkpoints/cache", "data.cache"),
    "the recipe": ("recipe.yaml", None),
    "a recipe beside": ("checkpoints/my.yaml", None),
    "the model to train": ("final", "model"),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("linked", [False, True])
def test_force_never_deletes_an_input(name, linked, model_folder, text, finished, tmp_path):
    recipe, out = finished
    place, key = INPUTS[name]
    (out / "checkpoints" / "cache").mkdir()
    (out / "checkpoints" / "my.yaml").write_text((out / "recipe.yaml").read_text())
    for file in ("checkpoints/a.jsonl", "final/val.jsonl"):
        shutil.copyfile(text, out / file)
    given = out / place
    if linked:
        given = tmp_path / f"link{given.suffix}"
        given.symlink_to(out / place)
    before = snapshot(out)
    changes = [f"{key}={given}"] if key not in (None, "model") else []
    what = key if changes else "the recipe" if key is None else "the model to train"
    message = rf"run: replacing this run would delete [\w.]+, (and )?{what}[ ;].*give another run folder"
    with pytest.raises(OutputExistsError, match=message):
        finetune(
            given if key == "model" else model_folder,
            given if key is None else recipe,
            out,
            overrides=changes,
            force=True,
        )
    assert snapshot(out) == before


@pytest.mark.parametrize("key", ["data.val", "data.tokenizer"])
def test_going_on_replaces_no_input_either(key, model_folder, text, finished):
    recipe, out = finished
    shutil.copyfile(text, out / "final" / "text.jsonl")
    before = snapshot(out)
    given = out / "final" / ("text.jsonl" if key == "data.val" else "")
    with pytest.raises(OutputExistsError, match=rf"would delete final, (and )?{key}[ ;]"):
        finetune(model_folder, recipe, out, overrides=[f"{key}={given}"], resume=True)
    assert snapshot(out) == before


@pytest.mark.parametrize("part", ["checkpoints", "final", "metrics.jsonl"])
@pytest.mark.parametrize("there", [True, False])
def test_a_linked_part_of_a_run_is_refused_before_anything_goes(part, there, model_folder, finished, tmp_path):
    recipe, out = finished
    (out / part).rename(tmp_path / "moved")
    (out / part).symlink_to(tmp_path / ("moved" if there else "gone"))
    before = snapshot(tmp_path)
    with pytest.raises(OutputExistsError, match=f"run/{part}: is a link, .*; remove the link yourself"):
        finetune(model_folder, recipe, out, force=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(("free", "refused"), [(1000, True), (10**9, False)])
def test_a_run_that_the_disk_cannot_hold_is_refused_before_anything_goes(
    resume, free, refused, model_folder, finished, monkeypatch
):
    recipe, out = finished
    shutil.rmtree(out / "final")  # on a resume nothing else is needed
    (out / "final").mkdir()
    before = snapshot(out)
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free))
    how = {"resume": True} if resume else {"force": True}
    changes = ["keep=9", "steps=3"]
    if refused:
        with pytest.raises(
            OutputError, match=r"run: the run needs about .* for checkpoints\), and the disk has .*make room"
        ):
            finetune(model_folder, recipe, out, overrides=changes, **how)
        assert snapshot(out) == before
    else:
        finetune(model_folder, recipe, out, overrides=changes, **how)


def test_going_on_keeps_what_the_user_put_into_the_model(model_folder, finished):
    recipe, out = finished
    final = out / "final"
    (final / "notes.txt").write_text("mine")
    (final / "figures").mkdir()
    (final / "figures" / "a.csv").write_text("1")
    (final / "README.md").write_text("# My own words")
    (final / "model.safetensors.index.json").write_text("{}")  # of an earlier save in shards
    finetune(model_folder, recipe, out, overrides=["steps=3"], resume=True)
    assert [(final / name).read_text() for name in ("notes.txt", "figures/a.csv", "README.md")] == [
        *("mine", "1"),
        "# My own words",
    ]
    assert not (final / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("key", ["data.train", "data.val"])
def test_a_run_goes_on_with_the_same_text_under_another_name_alone(key, model_folder, recipe, text, tmp_path):
    first, copy = (tmp_path / name for name in ("first.jsonl", "copy.jsonl"))
    for path in (first, copy):
        shutil.copyfile(text, path)
    finetune(model_folder, recipe, tmp_path / "run", overrides=["steps=2", "save_every=1", f"{key}={first}"])
    finetune(model_folder, recipe, tmp_path / "run", overrides=["save_every=1", f"{key}={copy}"], resume=True)
    copy.write_text("".join(copy.read_text().splitlines(keepends=True)[::-1][:30]))
    what = "the training text" if key == "data.train" else "the validation text is another, so"
    with pytest.raises(TrainingError, match=f"step-4: cannot be resumed, {what}"):
        finetune(
            model_folder, recipe, tmp_path / "run", overrides=["save_every=1", "steps=5", f"{key}={copy}"], resume=True
        )


@pytest.mark.parametrize("inside", [".", "run", "a/b"])
def test_a_run_does_not_go_into_the_model_it_trains(inside, model_folder, recipe, tmp_path):
    model = shutil.copytree(model_folder, tmp_path / "model")
    before = snapshot(model)
    with pytest.raises(OutputExistsError, match="is the model to train, or inside it; give a run folder of its own"):
        finetune(model, recipe, model / inside, force=True)
    assert snapshot(model) == before


def test_a_folder_in_use_is_refused(model_folder, finished):
    recipe, out = finished
    holder = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from palimpsa_surgery.recipes.training.run_folder import held
        with held(Path({str(out)!r})):
            print("held", flush=True)
            sys.stdin.read()
    """)
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ.copy()
    ) as process:
        assert process.stdout.readline() == "held\n"
        before = snapshot(out)
        for how in ({"resume": True}, {"force": True}):
            with pytest.raises(OutputExistsError, match="run: another process trains here now; wait for it"):
                finetune(model_folder, recipe, out, **how)
        assert snapshot(out) == before
        process.kill()
    finetune(model_folder, recipe, out, resume=True)  # a killed run holds nothing


def test_without_locks_the_run_goes_on_and_says_so(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(run_folder, "try_lock", lambda path, held: None)
    with run_folder.held(tmp_path / "run"):
        (tmp_path / "run" / "x").touch()
    assert "cannot be locked on this system; start no second run there" in caplog.text
    assert (tmp_path / "run" / "x").exists()


def test_a_place_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    def mkdir(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(run_folder.Path, "mkdir", mkdir)
    message = r"run: cannot be made \(Read-only file system\); give another run folder"
    with pytest.raises(OutputError, match=message), run_folder.held(tmp_path / "run"):
        pass


@pytest.fixture
def blank(monkeypatch, recipe):
    """blank(steps) -> a recipe in whose steps of these numbers (from 0) nothing is to be predicted."""
    original, tokens = TokenStream.sequence, recipe["batch_size"] * recipe["data"]["seq_len"]

    def make(steps):
        def sequence(self, position, length):
            found = original(self, position, length)
            if position // tokens not in steps:
                return found
            return dataclasses.replace(found, targets=np.full_like(found.targets, IGNORED))

        monkeypatch.setattr(TokenStream, "sequence", sequence)
        return {**recipe, "data": {**recipe["data"], "val_fraction": 0}}

    return make


@pytest.mark.parametrize("steps", [{0}, {1, 2}, {3}], ids=str)
def test_batches_with_nothing_to_predict_are_left_out(steps, model_folder, blank, tmp_path, caplog):
    finetune(model_folder, blank(steps), tmp_path / "run")
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["step"] - 1 for line in lines] == sorted(set(range(4)) - steps)
    assert all(line["loss"] > 0 for line in lines)
    assert caplog.text.count("holds nothing to predict, so it trains nothing") == 1


def test_batches_with_nothing_to_predict_end_no_run_that_has_begun(model_folder, blank, tmp_path, monkeypatch, caplog):
    recipe = {**blank(range(3, 99)), "save_every": 8}
    monkeypatch.setattr(loop, "LOOKED_AT", 3)
    run = finetune(model_folder, recipe, tmp_path / "run", overrides=["steps=20"])
    assert run.final.is_dir()
    assert "17 of the batches held nothing to predict and trained nothing" in caplog.text
    monkeypatch.setattr(loop, "LOOKED_AT", 64)
    longer = finetune(model_folder, recipe, run.folder, overrides=["steps=40"], resume=True)
    assert (longer.steps, longer.loss) == (40, run.loss)


@pytest.mark.parametrize(
    ("steps", "empty", "said"),
    [
        (4, range(4), "all 4 batches of this run hold"),
        (1, range(4), "the only batch holds"),
        (40, range(99), "16 of the first 16 batches hold"),
        (40, range(0, 99, 2), "16 of the first 31 batches hold"),
    ],
)
def test_targets_that_are_not_there_are_found_before_the_old_run_goes(
    steps, empty, said, model_folder, blank, finished
):
    _, out = finished
    before = snapshot(out)
    with pytest.raises(TrainingError, match=f"^{said} nothing to predict; raise data.seq_len or batch_size"):
        finetune(model_folder, blank(empty), out, overrides=[f"steps={steps}"], force=True)
    assert snapshot(out) == before


def test_conversations_cut_before_their_answers_cost_nothing_with_force(model_folder, finished, tmp_path):
    recipe, out = finished
    question = [{"role": "user", "content": "row " * 40000}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": question}))
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = {**recipe["data"], "train": str(tmp_path / "talk.jsonl"), "chat": True, "val_fraction": 0}
    data["tokenizer"] = str(tmp_path / "tokenizer")
    before = snapshot(out)
    with pytest.raises(TrainingError, match="16 of the first 16 batches hold nothing to predict"):
        finetune(model_folder, {**recipe, "data": data, "steps": 40}, out, force=True)
    assert snapshot(out) == before


@pytest.mark.parametrize("named", [True, False], ids=["data.val", "data.val_fraction"])
def test_a_validation_without_targets_is_said_and_is_no_loss_of_nothing(
    named, model_folder, recipe, text, tmp_path, caplog, monkeypatch
):
    original = TokenStream.sequences
    monkeypatch.setattr(
        TokenStream,
        "sequences",
        lambda *asked: [dataclasses.replace(w, targets=np.full_like(w.targets, IGNORED)) for w in original(*asked)],
    )
    data = {**recipe["data"], **({"val": str(text), "val_fraction": 0} if named else {})}
    result = finetune(model_folder, {**recipe, "data": data}, tmp_path / "run")
    assert result.validation == ()
    assert (
        "no validation: nothing is to be predicted in 2 sequences of the held-out text; raise data.seq_len"
        in caplog.text
    )
    assert "validation loss" not in caplog.text
    assert not [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "validation"]


def test_a_loss_over_no_target_is_refused(model):
    sequence = TokenSequence(np.arange(4), np.full(4, IGNORED))
    with pytest.raises(DataError, match="nothing is to be predicted in 2 sequences; give longer sequences"):
        evaluate_loss(model, [sequence, sequence])


@pytest.mark.parametrize(("warmup", "said"), [(4, True), (9, True), (3, False), (0.5, False)])
def test_a_warmup_as_long_as_the_run_is_said(warmup, said, model_folder, recipe, tmp_path, caplog):
    finetune(model_folder, {**recipe, "warmup": warmup}, tmp_path / "run")
    assert ("of 4 steps, so the learning rate never stays at its full height" in caplog.text) == said


def test_a_batch_that_cannot_be_shared_is_refused_before_anything(model_folder, recipe):
    with pytest.raises(
        UsageError, match=r"batch_size \(4\) must be a multiple of micro_batch_size x processes \(2 x 3\)"
    ):
        check_batch(load_recipe({**recipe, "batch_size": 4, "micro_batch_size": 2}), 3)
