"""What an earlier release wrote still loads: `tests/data/written-at-d4cbf87.tar.gz`, made by its own commands.

In it are a source of three tiny layers, its profile and plan, the conversion, a run of four steps with its last
checkpoint, a run of an adapter, an evaluation, and the logits that release computed.
"""

import tarfile
from pathlib import Path

import pytest
import torch
from palimpsa_surgery import evaluate, finetune, load_model, merge, open_checkpoint, read_plan, read_profile
from palimpsa_surgery.recipes.evaluation.report import read_report
from palimpsa_surgery.recipes.training.metrics import read_metrics
from palimpsa_surgery.surgery.conversion.convert import convert
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

LOGITS = 1e-6  # fp32, relative L2: the same arithmetic in another order


@pytest.fixture
def old(tmp_path, monkeypatch) -> Path:
    with tarfile.open(Path(__file__).parent / "data" / "written-at-d4cbf87.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_profile_plan_and_evaluation_are_read(old):
    profile, plan = read_profile("profile.json"), read_plan("plan.yaml")
    assert len(profile.layers) == 3
    assert plan.layers == (1,)
    assert open_checkpoint("source").matches(plan.fingerprint)
    assert read_report(old / "eval.json").row("loss", "loss", length=16).model.value > 0


@pytest.mark.parametrize("name", ["converted", "run/final"])
@pytest.mark.parametrize("load", [lambda name: load_model(open_checkpoint(name)), AutoModelForCausalLM.from_pretrained])
def test_models_load_and_compute_the_same(old, name, load):
    expected = load_file("logits.safetensors")
    model = load(name).float().eval()
    with torch.no_grad():
        logits = model(expected["ids"]).logits
    assert (logits - expected[name]).norm() / expected[name].norm() < LOGITS


def test_a_plan_makes_the_same_model_again(old):
    convert("source", old / "again", plan="plan.yaml")
    first, again = (load_file(f"{name}/model.safetensors") for name in ("converted", "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_run_goes_on(old):
    finetune("converted", "run/recipe.yaml", "run", resume=True, overrides=["steps=6"])
    lines = [line for line in read_metrics(old / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["step"] for line in lines if line["step"] > 4] == [5, 6]
    assert open_checkpoint("run/final").palimpsa_layers == (1,)


def test_an_adapter_is_merged(old):
    merge("adapter_run", old / "merged", base="converted")
    whole, merged = (load_model(open_checkpoint(name)).float().state_dict() for name in ("adapter_run/final", "merged"))
    assert all(torch.equal(whole[name], merged[name]) for name in whole)


def test_a_converted_model_is_evaluated(old):
    report = evaluate("converted", "source", suites=["loss"], data="text.jsonl", lengths=(16,), tokens=64)
    before = read_report(old / "eval.json").row("loss", "loss", length=16)
    now = report.row("loss", "loss", length=16)
    assert now.model.value == pytest.approx(before.model.value, rel=1e-3)  # bf16
