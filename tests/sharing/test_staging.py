"""What goes along with a push, and what never does."""

import json
import os
from pathlib import Path

import pico
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.errors import HFValidationError
from palimpsa_surgery.base.errors import CheckpointError, SchemaError, UsageError
from palimpsa_surgery.base.schemas import write_model
from palimpsa_surgery.recipes.evaluation.report import (
    EvalData,
    EvalFigure,
    EvalReport,
    EvalRow,
    EvalSuite,
    EvaluatedModel,
    SeenText,
)
from palimpsa_surgery.sharing.staging import prepare_upload
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.conversion.card import MARKER
from palimpsa_surgery.surgery.conversion.convert import convert
from safetensors.torch import load_file, save_file

NAME = "alice/my-model"
RECIPE = {
    "schema_version": 1,
    "mode": "full",
    "steps": 40,
    "batch_size": 4,
    "data": {"train": "/home/somebody/secret-project/text.jsonl", "val": "texts/val.txt.gz", "seq_len": 512},
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("upload")
    pico.write_mamba_ssm(folder / "source")
    convert(folder / "source", folder / "model", layers=(0, 2), verify="layers")
    return folder / "model"


@pytest.fixture
def model(converted, tmp_path):
    """A copy that a test may change."""
    target = tmp_path / "model"
    target.mkdir()
    for path in converted.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.fixture
def staging(tmp_path):
    folder = tmp_path / "staging"
    folder.mkdir()
    return folder


@pytest.fixture
def adapter(tmp_path):
    """An adapter folder as `finetune` writes it."""
    folder = tmp_path / "run" / "adapter"
    folder.mkdir(parents=True)
    save_file({"base_model.model.x.lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["out_proj", "in_proj"]}
    config |= {"modules_to_save": ["metaplasticity"], "base_model_name_or_path": "model"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    source = {"schema_version": 1, "base": "model", "fingerprint": "0" * 64, "palimpsa_layers": [1, 3]}
    (folder / "adapter_source.json").write_text(json.dumps(source))
    (folder.parent / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "mode": "lora"}))
    return folder


def evaluation(fingerprint, path, plot="eval-loss.png"):
    """eval.json as `evaluate` writes it, with a picture beside it."""

    def row(name, value, **changes):
        figure = EvalFigure(value=value, error=0.01)
        other, difference = EvalFigure(value=value + 1, error=None), EvalFigure(value=-1.0, error=0.002)
        shape = {"unit": "nats", "samples": 3, "better": "lower", "at": {"length": 2048}, **changes}
        return EvalRow(name=name, model=figure, against=other, difference=difference, **shape)

    subject = {"layout": "palimpsa_mamba2", "parameters": 7, "dtype": "float32", "palimpsa_layers": [0]}
    seen = SeenText(name="train.jsonl", documents=3, of=9)
    report = EvalReport(
        version="0",
        model=EvaluatedModel(name="final", fingerprint=fingerprint, seen=seen, **subject),
        against=EvaluatedModel(name="source", fingerprint="1" * 64, **subject),
        data=EvalData(name="embedded:sqlite-docs", tokens=9, tokenizer="final"),
        device="cpu",
        suites={
            "loss": EvalSuite(rows=[row("loss", 2.5), row("hidden", 1.0, detail=True)], plot=plot),
            "importance": EvalSuite(rows=[row("head spread", 7.0, better=None, at={"layer": 1})]),
            "speed": EvalSuite(rows=[row("decode", 100.0, unit="tokens/s", better="higher")]),
            "lm_eval": EvalSuite(rows=[row("arc_easy acc", 0.25, unit="", better="higher", at={})]),
        },
    )
    write_model(report, path)
    (path.parent / plot).write_bytes(b"\x89PNG picture")
    return path


def test_a_model_goes_with_its_code_its_card_and_how_it_was_made(model, staging):
    upload = prepare_upload(model, staging, NAME)
    assert upload.kind == "model"
    assert set(upload.files) >= {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_palimpsa_mamba2.py",
        "plan.yaml",
        "profile.json",
        "profile.png",
        "surgery_report.json",
    }
    assert upload.files["model.safetensors"] == model / "model.safetensors", "weights are not copied"
    assert not (staging / "model.safetensors").exists()
    assert upload.own_card
    assert not upload.notes


def test_what_is_no_part_of_a_model_stays_and_is_named(model, staging):
    for name in ("notes.txt", "optimizer.bin", ".env", "train.log", "setup.py"):
        (model / name).write_text("mine")
    (model / "checkpoints").mkdir()
    upload = prepare_upload(model, staging, NAME)
    assert not {"notes.txt", "optimizer.bin", ".env", "train.log", "setup.py", "checkpoints"} & set(upload.files)
    assert upload.notes == ("not part of a model, so not uploaded: notes.txt, optimizer.bin, setup.py, train.log",)


def test_paths_are_cut_to_their_last_part(model, staging):
    (model / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    (model / "tokenizer_config.json").write_text(json.dumps({"name_or_path": "/home/somebody/x", "eos_token": "/s"}))
    prepare_upload(model, staging, NAME)
    recipe = yaml.safe_load((staging / "recipe.yaml").read_text())
    assert recipe["data"] == {"train": "text.jsonl", "val": "val.txt.gz", "seq_len": 512}
    assert json.loads((staging / "tokenizer_config.json").read_text()) == {"eos_token": "/s"}
    assert not [path for path in staging.iterdir() if b"somebody" in path.read_bytes()]
    assert (staging / "plan.yaml").read_bytes() == (model / "plan.yaml").read_bytes(), (
        "a file without paths is as it was"
    )
    card = (staging / "README.md").read_text()
    assert "mode `full`, 40 steps, 4 sequences of 512 a step" in card
    assert "text: `text.jsonl`" in card


def test_the_card_says_what_a_model_was_made_from_was_trained_on(model, staging):
    for number, name in enumerate(("recipe-1.yaml", "recipe.yaml"), 3):
        (model / name).write_text(yaml.safe_dump({**RECIPE, "steps": number}))
    upload = prepare_upload(model, staging, NAME)
    card = upload.files["README.md"].read_text()
    first = (
        "what it was made from (`recipe-1.yaml`): mode `full`, 3 steps, 4 sequences of 512 a step, text: `text.jsonl`"
    )
    assert f"## Training\n\n- {first}\n- mode `full`, 4 steps" in card
    assert yaml.safe_load(upload.files["recipe-1.yaml"].read_text())["data"]["train"] == "text.jsonl"


def test_a_data_set_of_the_hub_keeps_its_name(model, staging):
    (model / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "data": {"train": "owner/texts"}}))
    prepare_upload(model, staging, NAME)
    assert yaml.safe_load((staging / "recipe.yaml").read_text())["data"]["train"] == "owner/texts"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("my token is hf_" + "x" * 34, "README.md: holds what looks like a Hub token"),
        ("see {folder}/notes", "README.md: holds a path of this machine"),
        ("see `{home}`", "README.md: holds a path of this machine"),
    ],
)
def test_a_token_or_a_path_that_is_left_stops_the_push(model, staging, text, message):
    (model / "README.md").write_text(text.format(folder=model, home=Path.home()))
    with pytest.raises(CheckpointError, match=message):
        prepare_upload(model, staging, NAME)


def test_what_only_looks_like_a_path_of_this_machine_passes(model, staging):
    (model / "README.md").write_text(f"https://example.org{Path.home()}/x and {Path.home()}-like")
    (model / "vocab.json").write_text(json.dumps({f"{Path.home()}": 1}))
    assert "vocab.json" in prepare_upload(model, staging, NAME).files


def test_a_card_of_the_users_own_goes_along_as_it_is(model, staging):
    (model / "README.md").write_text("my own words")
    upload = prepare_upload(model, staging, NAME)
    assert (staging / "README.md").read_text() == "my own words"
    assert not upload.own_card


def test_the_card_says_what_the_model_is(model, staging):
    evaluation(open_checkpoint(model).fingerprint, model / "eval.json")
    upload = prepare_upload(model, staging, NAME)
    card = ModelCard.load(staging / "README.md")
    assert MARKER in card.text
    assert (card.data.license, card.data.base_model) == (None, None), "nothing is invented"
    assert "names no license" in card.text
    assert "| 0 |" in card.text
    assert "| 2 |" in card.text
    assert "(profile.png)" in card.text
    assert "| loss | loss | length 2,048 | nats | 2.5 ± 0.01 | 3.5 | -1 ± 0.002 |" in card.text
    assert "hidden" not in card.text
    assert "head spread" not in card.text
    assert "(eval-loss.png)" in card.text
    assert "**Not held out:** 3 of the 9 documents of the text are in train.jsonl, which this model was" in card.text
    assert {"eval.json", "eval-loss.png"} <= set(upload.files)
    results = {(r.dataset_type, r.metric_type, r.metric_name): r.metric_value for r in card.data.eval_results}
    assert results == {
        ("sqlite-docs", "loss", "loss (length 2,048)"): 2.5,
        ("arc_easy", "acc", "acc"): 0.25,
    }
    assert card.data.model_name == "my-model"


def test_an_evaluation_may_lie_elsewhere_and_lose_its_pictures(model, staging, tmp_path):
    path = evaluation(open_checkpoint(model).fingerprint, tmp_path / "figures.json")
    (tmp_path / "eval-loss.png").unlink()
    upload = prepare_upload(model, staging, NAME, evaluation=path)
    assert "eval.json" in upload.files
    assert "eval-loss.png" not in (staging / "README.md").read_text()


def test_an_evaluation_of_another_model_is_refused(model, staging, tmp_path):
    path = evaluation("2" * 64, tmp_path / "eval.json")
    with pytest.raises(SchemaError, match=r"the evaluation is of another model \(2{12}"):
        prepare_upload(model, staging, NAME, evaluation=path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 99}, "eval.json:schema_version: is 99, newer than the 1"),
        ({"schema_version": None}, "eval.json:schema_version: is missing"),
        ({"model": None}, "eval.json:model: is None"),
        (
            {"suites": {"loss": {"rows": [{"name": "loss", "unit": "nats", "samples": 3}]}}},
            "eval.json:suites.loss.rows.0: has neither `model` nor `against`",
        ),
    ],
)
def test_an_evaluation_that_does_not_follow_its_schema_is_refused(model, staging, change, message):
    path = evaluation(open_checkpoint(model).fingerprint, model / "eval.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(SchemaError, match=message):
        prepare_upload(model, staging, NAME)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("recipe.yaml", {**RECIPE, "schema_version": 7}, "recipe.yaml:schema_version: is 7, newer than the 1"),
        ("recipe.yaml", {**RECIPE, "learning": 1}, "recipe.yaml:learning: there is no such key"),
        ("adapter_source.json", {"schema_version": 1, "base": "model"}, "adapter_source.json:fingerprint: is missing"),
        ("adapter_source.json", [], "adapter_source.json: is a list"),
        ("adapter_config.json", [], "adapter_config.json: holds a list, expected PEFT's table of settings"),
    ],
)
def test_the_other_files_are_held_to_their_schemas_too(adapter, staging, file, content, message):
    write = json.dumps if file.endswith(".json") else yaml.safe_dump
    (adapter / file).write_text(write(content))
    with pytest.raises((SchemaError, CheckpointError), match=f"{adapter}/{message}"):
        prepare_upload(adapter, staging, NAME, base="alice/base")


def test_an_adapter_whose_start_changes_its_base_is_refused(adapter, staging):
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "init_lora_weights": "pissa"}))
    with pytest.raises(UsageError, match=r"adapter_config.json:init_lora_weights: is 'pissa', a start that changes"):
        prepare_upload(adapter, staging, NAME, base="alice/base")


def test_a_fine_tuned_model_without_a_surgery_has_a_card_too(staging, tmp_path):
    pico.write_hf(tmp_path / "model", swapped=(1,))
    upload = prepare_upload(tmp_path / "model", staging, NAME)
    card = (staging / "README.md").read_text()
    assert "with 1 Palimpsa-M layer" in card
    assert "plan.yaml" not in card
    config = json.loads((staging / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"].endswith("PalimpsaMamba2ForCausalLM")
    assert upload.identity["source_fingerprint"] is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"palimpsa_layers": [1]}, r"alice/base: is not the model .* its layers \[1\] are swapped, expected \[1, 3\]"),
        (
            {"palimpsa_layers": [3, 1], "num_hidden_layers": 3},
            r"alice/base: has 3 layers, and the adapter holds .*\.3\.",
        ),
        ({"palimpsa_layers": [1, 3], "hidden_size": 8}, r"alice/base: is 8 wide, and the adapter's .* is for 2"),
        ({"palimpsa_layers": [1, 3], "hidden_size": 2, "num_hidden_layers": 4}, None),
    ],
)
def test_the_base_of_an_adapter_is_looked_at(config, message, adapter, staging, monkeypatch, tmp_path):
    name = "base_model.model.backbone.layers.3.mixer.in_proj.lora_A.weight"
    save_file({name: torch.ones(2, 2)}, adapter / "adapter_model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(tmp_path / "config.json"))
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_tree", lambda *_, **__: iter(()))
    if message is None:
        said = prepare_upload(adapter, staging, NAME, base="alice/base").notes
        assert "fit the adapter; its weights were not compared" in said[-1]
        return
    with pytest.raises(CheckpointError, match=message):
        prepare_upload(adapter, staging, NAME, base="alice/base")


def test_a_base_that_is_none_is_refused_and_one_out_of_reach_is_said(adapter, staging, monkeypatch):
    assert (
        "alice/base: was not looked at (the Hub cannot be reached)"
        in prepare_upload(adapter, staging, NAME, base="alice/base").notes[-1]
    )
    with pytest.raises(UsageError, match=r"--base \./runs/model: is no Hub id, expected owner/name"):
        prepare_upload(adapter, staging, NAME, base="./runs/model")

    def missing(*args, **kwargs):
        raise HFValidationError("nothing there")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", missing)
    with pytest.raises(UsageError, match="alice/base: is no model on the Hub that you may read; push it first"):
        prepare_upload(adapter, staging, NAME, base="alice/base")


def test_an_adapter_names_a_base_that_others_have(adapter, staging):
    with pytest.raises(UsageError, match=r"model folder named 'model', which nobody else has.*--base owner/name"):
        prepare_upload(adapter, staging, NAME)
    upload = prepare_upload(adapter, staging, NAME, base="alice/base")
    assert set(upload.files) == {"README.md", "adapter_config.json", "adapter_model.safetensors", "adapter_source.json"}
    assert json.loads((staging / "adapter_config.json").read_text())["base_model_name_or_path"] == "alice/base"
    assert json.loads((staging / "adapter_source.json").read_text())["base"] == "alice/base"
    card = ModelCard.load(staging / "README.md")
    assert (card.data.base_model, card.data.library_name, card.data.license) == ("alice/base", "peft", None)
    assert "rank 2, alpha 4, on `in_proj`, `out_proj`" in card.text
    assert "(`metaplasticity`) of its swapped layers (1, 3)" in card.text
    assert "mode `lora`" in card.text


def refused(folder, staging, **options):
    with pytest.raises((UsageError, CheckpointError)) as caught:
        prepare_upload(folder, staging, NAME, **options)
    return str(caught.value)


def test_what_is_neither_a_model_nor_an_adapter(adapter, model, staging, tmp_path):
    assert "no such folder" in refused(tmp_path / "absent", staging)
    assert f"give {adapter}" in refused(adapter.parent, staging), "a run folder"
    (tmp_path / "empty").mkdir()
    assert "give a folder with config.json or adapter_config.json" in refused(tmp_path / "empty", staging)
    assert "--base: is for adapters" in refused(model, staging, base="alice/base")
    assert "--eval nowhere.json: no such file" in refused(model, staging, evaluation="nowhere.json")
    (adapter / "adapter_model.safetensors").unlink()
    assert "has no adapter_model.safetensors" in refused(adapter, staging)


def test_a_source_is_not_ours_to_push(staging, tmp_path):
    pico.write_mamba_ssm(tmp_path / "bin")
    assert "its weights are in pytorch_model.bin" in refused(tmp_path / "bin", staging)
    pico.write_hf(tmp_path / "plain")
    assert "is in the layout hf_mamba2" in refused(tmp_path / "plain", staging)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: os.truncate(path, 40), r"adapter_model.safetensors: .*cut short"),
        (
            lambda path: save_file({"a": torch.tensor([float("nan")])}, path),
            "tensor a holds values that are not finite",
        ),
    ],
    ids=["cut short", "nan"],
)
def test_a_damaged_adapter_is_not_pushed(adapter, staging, change, message):
    change(adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        prepare_upload(adapter, staging, NAME, base="alice/base")


def test_a_value_that_is_not_finite_is_not_pushed(model, staging):
    path = model / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors["backbone.embeddings.weight"][-1, 0] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"tensor backbone.embeddings.weight holds values that are not finite"):
        prepare_upload(model, staging, NAME)
