"""Whole runs on a tiny model: what is written, what is saved, what is resumed."""

import json
import math
import shutil
import subprocess
import sys

import pytest
import torch
from palimpsa_surgery.base.errors import (
    CheckpointError,
    KernelUnavailableError,
    OutputExistsError,
    SchemaError,
    TrainingError,
    UsageError,
)
from palimpsa_surgery.recipes.training import finetune as finetune_module
from palimpsa_surgery.recipes.training import loop
from palimpsa_surgery.recipes.training.finetune import finetune
from palimpsa_surgery.recipes.training.metrics import METRICS_VERSION, read_metrics
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.checkpoint.loading import load_model
from safetensors.torch import load_file
from tiny import make_model, save_folder
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(autouse=True)
def without_code(request, monkeypatch):
    """Bundling the code is tested where it is written; leaving it out makes these tests twice as fast."""
    if "bundled" not in request.fixturenames:
        monkeypatch.setattr("palimpsa_surgery.modeling.bundle.bundle_remote_code", lambda folder, model_type: ())


@pytest.fixture
def bundled():
    """Asked for by a test whose model folder needs its code."""


def tensors(folder):
    return load_file(folder / "model.safetensors")


def strict(line):
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_run_trains_and_leaves_everything_a_reader_needs(model_folder, recipe, tmp_path):
    out = tmp_path / "run"
    overrides = ["steps=12", "save_every=4", "keep=2", "importance_every=5", "lr=1e-2"]
    result = finetune(model_folder, recipe, out, overrides=overrides)
    assert result.steps == 12
    assert result.tokens == 12 * 4 * 24
    before, after = result.validation[0], result.validation[-1]
    assert (before[0], after[0]) == (0, 12)
    assert after[1] < before[1] - 0.3  # random weights learn which words there are
    assert sorted(p.name for p in out.iterdir()) == ["checkpoints", "final", "metrics.jsonl", "recipe.yaml"]
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-12", "step-8"]
    lines = [strict(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert (lines[0]["kind"], lines[0]["schema_version"]) == ("start", METRICS_VERSION)
    train = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in train] == list(range(1, 13))
    for line in train:
        assert line["tokens_per_second"] > 0
        assert line["grad_norm"] > 0
        assert line["memory_bytes"] > 1 << 20
        assert set(line["lr"]) == {"source", "source, no decay", "new", "new, no decay"}
    assert [line["step"] for line in train if "importance" in line] == [1, 5, 10, 12]
    importance = train[0]["importance"]
    assert importance["metaplasticity_ratio"] > 1
    assert set(importance["layers"]) == {"1"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"schema_version": METRICS_VERSION}, None),
        ({}, None),
        ({"schema_version": METRICS_VERSION + 1}, r"metrics\.jsonl:schema_version: is 2, newer than the 1"),
        ({"schema_version": "1"}, r"metrics\.jsonl:schema_version: is '1', expected a whole number"),
        ({"schema_version": True}, r"metrics\.jsonl:schema_version: is True, expected a whole number"),
    ],
)
def test_metrics_of_a_newer_release_are_refused_by_name(tmp_path, line, message):
    path = tmp_path / "metrics.jsonl"
    lines = [{**line, "kind": "start", "step": 0}, {"kind": "train", "step": 1, "loss": 2.0}]
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    if message is None:
        assert read_metrics(path) == lines
    else:
        with pytest.raises(SchemaError, match=message):
            read_metrics(path)


def test_the_final_model_loads_in_plain_transformers(model_folder, recipe, tmp_path, bundled):
    final = finetune(model_folder, recipe, tmp_path / "run").final
    model = AutoModelForCausalLM.from_pretrained(final)
    assert AutoTokenizer.from_pretrained(final).eos_token_id is not None
    checkpoint = open_checkpoint(final)
    assert checkpoint.palimpsa_layers == (1,)
    ids = torch.arange(20).view(1, 20)
    torch.testing.assert_close(model.eval()(ids).logits, load_model(final)(ids).logits)
    changed = [name for name, tensor in tensors(final).items() if not torch.equal(tensor, tensors(model_folder)[name])]
    assert len(changed) == len(checkpoint.tensors)
    assert "modeling_palimpsa_mamba2.py" in {p.name for p in final.iterdir()}
    assert "AutoModelForCausalLM" in json.loads((final / "config.json").read_text())["auto_map"]


@pytest.mark.parametrize(
    ("asked", "matrices"), [("source", torch.bfloat16), ("float32", torch.float32), ("float16", torch.float16)]
)
def test_the_saved_dtype_is_as_asked_in_tensors_and_config(asked, matrices, recipe, tmp_path):
    folder = save_folder(make_model().to(torch.bfloat16), tmp_path / "model")
    final = finetune(folder, {**recipe, "steps": 1, "save_dtype": asked}, tmp_path / "run").final
    for name, tensor in tensors(final).items():
        fp32 = name.rsplit(".", 1)[-1] in ("A_log", "D", "dt_bias", "beta_scale", "log_prior")
        assert tensor.dtype == (torch.float32 if fp32 else matrices), name
    assert json.loads((final / "config.json").read_text())["dtype"] == str(matrices).removeprefix("torch.")


def test_frozen_tensors_are_saved_bit_for_bit(recipe, tmp_path):
    folder = save_folder(make_model().to(torch.bfloat16), tmp_path / "model")
    final = finetune(folder, {**recipe, "mode": "new", "precision": "bf16"}, tmp_path / "run").final
    source = tensors(folder)
    for name, tensor in tensors(final).items():
        assert torch.equal(tensor, source[name]) is (".metaplasticity." not in name), name


def test_a_plain_source_model_trains_too(recipe, tmp_path):
    folder = save_folder(make_model(layers=[]), tmp_path / "model")
    result = finetune(folder, recipe, tmp_path / "run")
    assert open_checkpoint(result.final).palimpsa_layers == ()
    assert "importance" not in json.dumps(read_metrics(tmp_path / "run" / "metrics.jsonl"))


def test_micro_batches_do_not_change_the_result(model_folder, recipe, tmp_path):
    losses = [
        finetune(model_folder, {**recipe, "micro_batch_size": micro}, tmp_path / str(micro)).loss for micro in (1, 2, 4)
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)  # fp32


@pytest.mark.parametrize(
    "changes", [{}, {"mode": "new+swapped"}, {"precision": "bf16"}, {"gradient_checkpointing": True}]
)
def test_a_killed_run_goes_on_bit_for_bit(changes, model_folder, recipe, tmp_path, interrupted):
    recipe = {**recipe, **changes, "steps": 5, "save_every": 2, "eval_every": 3}
    whole = finetune(model_folder, recipe, tmp_path / "whole")
    interrupted(3, model_folder, recipe, tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "tr')
    result = finetune(model_folder, recipe, tmp_path / "run", resume=True)
    for name, tensor in tensors(result.final).items():
        assert torch.equal(tensor, tensors(whole.final)[name]), name
    keys = ("kind", "step", "loss", "grad_norm")
    lines = [
        [{key: line.get(key) for key in keys} for line in read_metrics(run.folder / "metrics.jsonl") if "loss" in line]
        for run in (whole, result)
    ]
    assert lines[0] == lines[1]


def test_resuming_a_finished_run_changes_nothing(model_folder, recipe, tmp_path):
    recipe = {**recipe, "save_every": 2}
    first = tensors(finetune(model_folder, recipe, tmp_path / "run").final)
    second = tensors(finetune(model_folder, recipe, tmp_path / "run", resume=True).final)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_other_swapped_layers_cannot_resume(model_folder, recipe, tmp_path):
    recipe = {**recipe, "save_every": 2}
    finetune(model_folder, recipe, tmp_path / "run")
    other = save_folder(make_model(layers=[0]), tmp_path / "other")
    with pytest.raises(TrainingError, match=r"step-4: cannot be resumed, other layers are swapped"):
        finetune(other, recipe, tmp_path / "run", resume=True)


def test_a_used_folder_is_refused_and_replaced_by_force(model_folder, recipe, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    finetune(model_folder, recipe, tmp_path / "run")
    with pytest.raises(OutputExistsError, match=r"holds a run .*--resume to go on, or --force"):
        finetune(model_folder, recipe, tmp_path / "run")
    finetune(model_folder, recipe, tmp_path / "run", overrides=["steps=2"], force=True)
    assert [line["kind"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")].count("train") == 2
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {}}, r"data\.train: is missing"),
        ({"batch_size": 3, "micro_batch_size": 3, "loss": "liger"}, "liger was asked for"),
        ({"mode": "qlora"}, "qlora needs a CUDA device"),
    ],
)
def test_what_cannot_run_is_said_before_training(changes, message, model_folder, recipe, tmp_path):
    with pytest.raises(UsageError, match=message):
        finetune(model_folder, {**recipe, **changes}, tmp_path / "run")


def test_a_loss_that_is_not_finite_stops_and_names_the_layer(recipe, tmp_path):
    model = make_model()
    with torch.no_grad():
        model.backbone.layers[1].mixer.out_proj.weight.fill_(3e38)  # finite, and too large for any sum
    folder = save_folder(model, tmp_path / "model")
    with pytest.raises(
        TrainingError, match=r"step 1: the loss \(nan\).*first in the output of .*layers\.1\.mixer\.out_proj"
    ):
        finetune(folder, {**recipe, "data": {**recipe["data"], "val_fraction": 0}}, tmp_path / "run")
    assert not (tmp_path / "run" / "final").exists()


def test_a_gradient_that_is_not_finite_stops_before_the_step(model_folder, recipe, tmp_path, monkeypatch):
    original = finetune_module.CausalLoss.forward

    def forward(self, *args, **kwargs):
        self.causal.backbone.layers[0].norm.weight.register_hook(lambda grad: grad * float("inf"))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(finetune_module.CausalLoss, "forward", forward)
    with pytest.raises(TrainingError, match=r"first in the gradient of model\.backbone\.layers\.0\.norm\.weight"):
        finetune(model_folder, recipe, tmp_path / "run")


def test_deterministic_runs_are_equal_and_the_switch_is_put_back(model_folder, recipe, tmp_path):
    runs = [finetune(model_folder, {**recipe, "deterministic": True}, tmp_path / name) for name in "ab"]
    assert all(torch.equal(tensors(runs[0].final)[n], t) for n, t in tensors(runs[1].final).items())
    assert not torch.are_deterministic_algorithms_enabled()


def test_required_kernels_stop_the_run_where_there_are_none(model_folder, recipe, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("kernels may run here")
    with pytest.raises(KernelUnavailableError):
        finetune(model_folder, {**recipe, "require_kernels": True}, tmp_path / "run")
    finetune(model_folder, {**recipe, "steps": 1}, tmp_path / "other")


def test_another_seed_is_another_run(model_folder, recipe, tmp_path):
    runs = [finetune(model_folder, {**recipe, "seed": seed}, tmp_path / str(seed)) for seed in (0, 1)]
    assert runs[0].loss != runs[1].loss


def test_a_curriculum_grows_the_windows(model_folder, recipe, tmp_path):
    data = {**recipe["data"], "curriculum": [{"until": 0.5, "seq_len": 8}]}
    result = finetune(model_folder, {**recipe, "data": data}, tmp_path / "run")
    assert result.tokens == 2 * 4 * 8 + 2 * 4 * 24
    assert math.isfinite(result.loss)


@pytest.mark.parametrize(
    ("name", "message"),
    [("nonsense", "there is no nonsense; expected some of .*tensorboard"), ("wandb", "the package of wandb is not in")],
)
def test_a_tracker_that_would_track_nothing_is_refused(model_folder, recipe, tmp_path, monkeypatch, name, message):
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: [])
    with pytest.raises(UsageError, match=f"trackers: {message}"):
        finetune(model_folder, {**recipe, "trackers": [name]}, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_trackers_write_offline(model_folder, recipe, tmp_path):
    pytest.importorskip("tensorboard")
    finetune(model_folder, {**recipe, "trackers": ["tensorboard"]}, tmp_path / "run")
    assert list((tmp_path / "run").rglob("events.out.tfevents*"))


def during(monkeypatch, step, act):
    """Calls `act` in the middle of a run, before this step (from 0)."""
    original = loop.optimizer_step

    def optimizer_step(run, number):
        if number == step:
            act()
        return original(run, number)

    monkeypatch.setattr(loop, "optimizer_step", optimizer_step)


def replace_by_another(model):
    shutil.rmtree(model)
    save_folder(make_model(layers=[0], seed=3), model)


@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda model: model.rename(model.with_name("moved")), "cannot be read"),
        (lambda model: (model / "tokenizer.json").unlink(), "tokenizer.json cannot be read"),
        (replace_by_another, "config.json was replaced while the model was in use"),
    ],
    ids=["moved", "without a tokenizer", "another model"],
)
def test_a_model_folder_that_changes_during_training_costs_no_training(
    recipe, tmp_path, monkeypatch, mode, act, message
):
    if mode == "lora":
        pytest.importorskip("peft")
    recipe = {**recipe, "mode": mode, "lora": {"rank": 2}}
    model, aside = save_folder(make_model(), tmp_path / "model"), tmp_path / "aside"
    shutil.copytree(model, aside)
    expected = tensors(finetune(model, recipe, tmp_path / "undisturbed").final)
    with monkeypatch.context() as patch:
        during(patch, 3, lambda: act(model))
        with pytest.raises(TrainingError, match=rf"{message}.*checkpoints/step-4: mend that and run again with --resu"):
            finetune(model, recipe, tmp_path / "run")
    assert not (tmp_path / "run" / "final").exists()
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(aside, model)
    found = tensors(finetune(model, recipe, tmp_path / "run", resume=True).final)
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_a_disk_that_refuses_a_line_of_metrics_ends_no_training(model_folder, recipe, tmp_path, monkeypatch, caplog):
    path, refusals = tmp_path / "run" / "metrics.jsonl", []
    original = type(path).open

    def refuses(self, mode="r", **options):
        if self == path and mode == "a" and not refusals:
            refusals.append(1)
            raise OSError(28, "No space left on device")
        return original(self, mode, **options)

    monkeypatch.setattr(type(path), "open", refuses)
    finetune(model_folder, recipe, tmp_path / "run")
    assert "metrics.jsonl cannot be written ([Errno 28] No space left on device); the run goes on" in caplog.text
    assert [line["step"] for line in read_metrics(path) if line["kind"] == "train"] == [1, 2, 3, 4]


def test_a_setting_of_another_mode_is_said_to_have_no_effect(model_folder, recipe, tmp_path, caplog):
    finetune(model_folder, recipe, tmp_path / "run", overrides=["steps=1", "lora.rank=4"])
    assert "lora.rank (mode is full) has no effect in this run; leave it out, or change the other" in caplog.text


def test_from_the_identity_start_everything_new_moves_within_a_few_steps(recipe, tmp_path):
    model = make_model()
    gate = model.backbone.layers[1].mixer.metaplasticity
    with torch.no_grad():
        gate.beta_scale.fill_(1e-7)
    folder = save_folder(model, tmp_path / "model")
    result = finetune(folder, {**recipe, "lr_new": 1e-3, "lr": 1e-5}, tmp_path / "run")
    trained = load_model(result.final).backbone.layers[1].mixer.metaplasticity
    assert (trained.scale() > 10 * gate.scale()).all()
    assert (trained.prior() > 0).all()
    for part in ("beta_down", "beta_up"):
        before, after = getattr(gate, part).weight, getattr(trained, part).weight
        assert (after - before).norm() > 1e-3 * before.norm(), part


def test_force_keeps_the_run_when_the_model_is_in_it_or_cannot_be_read(model_folder, recipe, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(model_folder, out / "final")
    (out / "metrics.jsonl").write_text("")
    with pytest.raises(OutputExistsError, match="would delete final, the model to train"):
        finetune(out / "final", recipe, out, overrides=["steps=1"], force=True)
    with pytest.raises(CheckpointError, match="missing"):
        finetune(tmp_path / "missing", recipe, out, overrides=["steps=1"], force=True)
    assert (out / "metrics.jsonl").exists()
    assert tensors(out / "final").keys() == tensors(model_folder).keys()


def test_without_the_extra_for_training_the_missing_package_is_named(model_folder, tmp_path):
    code = f"""
import sys
sys.modules |= dict.fromkeys(("accelerate", "psutil"))  # as in an install of the package alone
from palimpsa_surgery.cli import app
app(["finetune", {str(model_folder)!r}, "--recipe", "tiny_cpu", "-o", {str(tmp_path / "run")!r}])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.endswith("which is not installed; install palimpsa-surgery[train]\n"), done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_qlora_run_trains_over_four_bits_and_saves_the_source_with_its_adapter(model_folder, recipe, tmp_path):
    pytest.importorskip("bitsandbytes")
    recipe = {**recipe, "mode": "qlora", "steps": 8, "lr": 1e-2, "lora": {"rank": 4, "alpha": 8}}
    result = finetune(model_folder, recipe, tmp_path / "run")
    assert result.validation[-1][1] < result.validation[0][1] - 0.02
    before, after = tensors(model_folder), tensors(result.final)
    assert {name: t.shape for name, t in after.items()} == {name: t.shape for name, t in before.items()}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "backbone.layers.1.mixer.in_proj.weight" in changed
    assert not any("embeddings" in name or "conv1d" in name for name in changed)
    values = torch.linalg.svdvals(
        (after["backbone.layers.1.mixer.in_proj.weight"] - before["backbone.layers.1.mixer.in_proj.weight"]).float()
    )
    assert values[4] < 1e-4 * values[0]  # of the adapter's rank: the rounding to four bits is not in it
