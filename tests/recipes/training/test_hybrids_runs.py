"""Whole runs on hybrids: training, resuming, merging, generating, and the estimate of each mode."""

import pytest
import torch
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.mixers.geometry import GATE
from palimpsa_surgery.modeling.hybrids.configuration_palimpsa_hybrid import known_hosts
from palimpsa_surgery.modeling.hybrids.hosts import HOSTS
from palimpsa_surgery.recipes.evaluation.generation import generate
from palimpsa_surgery.recipes.training.adapters import merge
from palimpsa_surgery.recipes.training.estimate import estimate
from palimpsa_surgery.recipes.training.finetune import finetune
from palimpsa_surgery.recipes.training.modes import prepare_mode
from palimpsa_surgery.recipes.training.recipe import load_recipe
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.checkpoint.loading import load_model
from safetensors.torch import load_file
from tiny import save_folder
from tiny_hybrids import DELTAS, PROJECTIONS, make_hybrid, same, token_ids
from transformers import AutoModelForCausalLM

pytest.importorskip("peft")

FP32 = 1e-5  # relative L2


@pytest.fixture(scope="module", params=known_hosts())
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    return save_folder(make_hybrid(kind, vocab_size=4096), tmp_path_factory.mktemp(kind) / "model")


@pytest.fixture
def recipe(recipe):
    recipe["data"]["packing"] = "stream"  # which every host can
    return {**recipe, "lora": {"rank": 2, "alpha": 4}, "gradient_checkpointing": True}


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=token_ids()).logits


def close(one, other):
    return (one - other).norm() <= FP32 * other.norm()


def test_a_lora_run_goes_on_merges_and_generates(kind, folder, recipe, tmp_path):
    recipe["lora"]["targets"] = list(PROJECTIONS[kind])
    recipe = {**recipe, "mode": "lora", "steps": 2, "save_every": 1}
    run = finetune(folder, recipe, tmp_path / "run")
    final, base = load_model(run.final), load_model(folder)
    assert not close(logits(final), logits(base))
    assert close(logits(load_model(merge(run.folder, tmp_path / "merged", base=folder))), logits(final))
    assert same(kind, logits(AutoModelForCausalLM.from_pretrained(run.final)), logits(final))
    assert isinstance(generate(run.final, "the quick", max_new_tokens=4), str)
    assert finetune(folder, recipe, tmp_path / "run", resume=True).steps == run.steps


@pytest.mark.parametrize("mode", ["full", "new", "new+swapped", "lora"])
def test_the_estimate_counts_what_trains(mode, kind, folder):
    lora = {"rank": 3, "targets": list(PROJECTIONS[kind])}
    checkpoint, recipe = open_checkpoint(folder), load_recipe({"steps": 1, "mode": mode, "lora": lora})
    model = prepare_mode(load_model(checkpoint), checkpoint, recipe)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    # nemotron_h stores a few numbers that no gradient reaches.
    assert 0 <= estimate(checkpoint, recipe).trained - trained < 1e-4 * trained


@pytest.mark.parametrize("mode", ["full", "new"])
def test_a_mode_changes_exactly_its_tensors_in_the_files(mode, recipe, tmp_path):
    folder = save_folder(make_hybrid("falcon_h1", vocab_size=4096), tmp_path / "model")
    final = finetune(folder, {**recipe, "mode": mode}, tmp_path / "run").final
    before, after = (load_file(place / "model.safetensors") for place in (folder, final))
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if mode == "full" or GATE in name}


def test_frozen_layers_in_bf16_run_beside_trained_ones(folder, recipe, tmp_path):
    short = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    source = save_folder(short, tmp_path / "model")
    run = finetune(source, {**recipe, "mode": "new+swapped", "precision": "bf16", "steps": 2}, tmp_path / "run")
    assert run.loss < 20.0
    assert open_checkpoint(run.final).dtype == torch.bfloat16


def test_documents_are_kept_apart_or_refused_before_anything_is_written(kind, folder, recipe, tmp_path):
    recipe = {**recipe, "data": {**recipe["data"], "packing": "documents"}, "steps": 1}
    if HOSTS[kind].keeps_documents_apart and kind not in DELTAS:
        assert finetune(folder, recipe, tmp_path / "run").loss < 20.0
        return
    with pytest.raises(UsageError, match=r"data.packing: .*set data.packing=stream"):
        finetune(folder, recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
