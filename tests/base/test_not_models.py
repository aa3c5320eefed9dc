"""Folders and files that are given for a model: the sentence says what they are and what to give."""

import shutil

import pico
import pytest
from palimpsa_surgery.base.errors import CheckpointError
from palimpsa_surgery.base.files import write_json, write_text
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint


@pytest.fixture
def run(tmp_path):
    """A run folder, with a finished model, an adapter and a checkpoint in it."""
    run = tmp_path / "run"
    pico.write_hf(run / "final")
    touched(run, "recipe.yaml", "metrics.jsonl", "adapter/adapter_model.safetensors", "adapter/adapter_config.json")
    return touched(run, "checkpoints/step-2/state.json", "checkpoints/step-2/training.safetensors")


def touched(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    return folder


PARTS = (
    ("", "is a run folder, not a model"),
    ("checkpoints", "holds the checkpoints of a run, not a model"),
    ("checkpoints/step-2", "is a checkpoint that a run goes on from, not a model"),
)


@pytest.mark.parametrize(("part", "what"), PARTS)
def test_of_a_run_its_final_model_is_meant(run, part, what):
    with pytest.raises(CheckpointError, match=rf"^{run / part}: {what}; give {run}/final, the model that was trained$"):
        open_checkpoint(run / part)


@pytest.mark.parametrize(("part", "what"), PARTS)
def test_a_run_without_a_final_model_goes_on(run, part, what):
    shutil.rmtree(run / "final")
    with pytest.raises(
        CheckpointError, match=rf"{what}; the run has not come to its end, .*finetune -o {run} --resume"
    ):
        open_checkpoint(run / part)


def test_a_checkpoint_that_was_copied_out_of_its_run(run, tmp_path):
    alone = shutil.copytree(run / "checkpoints" / "step-2", tmp_path / "kept" / "here" / "step-2")
    with pytest.raises(
        CheckpointError, match="a checkpoint that a run goes on from, not a model; give final/ of its run"
    ):
        open_checkpoint(alone)


def test_an_adapter_of_a_run_is_merged_in_its_final_model(run, tmp_path):
    told = r"holds an adapter, not a model; merge it into its base first \(palimpsa merge\)"
    with pytest.raises(CheckpointError, match=rf"{told}, or give {run}/final, where it is merged$"):
        open_checkpoint(run / "adapter")
    with pytest.raises(CheckpointError, match=rf"{told}$"):
        open_checkpoint(shutil.copytree(run / "adapter", tmp_path / "kept"))


@pytest.mark.parametrize("mark", ["trainer_state.json", "optimizer.bin", "random_states_0.pkl", "rng_state_1.pth"])
@pytest.mark.parametrize("weights", [True, False])
def test_a_trainers_checkpoint_without_a_config(tmp_path, mark, weights):
    pico.write_hf(tmp_path)
    (tmp_path / "config.json").unlink()
    if not weights:
        (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"is a checkpoint of a Trainer .* no config\.json; copy config.json and"):
        open_checkpoint(touched(tmp_path, mark))


def test_a_trainers_checkpoint_with_a_config_is_a_model(tmp_path):
    pico.write_hf(tmp_path)
    assert open_checkpoint(touched(tmp_path, "trainer_state.json", "optimizer.pt", "rng_state.pth")).num_layers


def test_of_a_trainers_folder_its_newest_checkpoint_is_named(tmp_path):
    touched(tmp_path, "checkpoint-500/config.json", "checkpoint-1000/config.json")
    with pytest.raises(CheckpointError, match=r"checkpoints of a Trainer \(2\), not a model; give .*/checkpoint-1000$"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.json", {"layers": [], "seq_len": 8, "fingerprint": "a"}, "is a profile, .*this file with --profile"),
        ("plan.json", {"layers": [1], "beta_rank": 2}, "is a plan, .*with --plan"),
        ("eval.json", {"suites": {}, "data": {}}, "is the report of an evaluation, .*with --eval"),
        ("recipe.json", {"data": {"train": "x"}, "lr": 1}, "is a recipe, .*with --recipe"),
        ("config.json", {"d_model": 4}, "is a file, expected the folder that holds it; give "),
        ("list.json", [], "is a file, expected the folder that holds it; give "),
    ],
)
def test_a_file_of_a_stage_for_a_folder(tmp_path, name, content, message):
    write_json(tmp_path / name, content)
    with pytest.raises(CheckpointError, match=rf"{name}: {message}"):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize(("text", "what"), [("layers: [1]\nbeta_rank: 2\n", "is a plan"), ("a: [", "is a file")])
def test_a_yaml_file_for_a_folder(tmp_path, text, what):
    write_text(tmp_path / "plan.yaml", text)
    with pytest.raises(CheckpointError, match=rf"plan\.yaml: {what}, expected the folder"):
        open_checkpoint(tmp_path / "plan.yaml")
