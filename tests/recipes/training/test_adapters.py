"""LoRA: the new parameters go along, and adapter + base = merged = the trained model."""

import dataclasses
import json
import os
import shutil
import sys
import types

import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError, OutputExistsError, UsageError
from palimpsa_surgery.recipes.training import loop, modes
from palimpsa_surgery.recipes.training.adapter_settings import lora_settings
from palimpsa_surgery.recipes.training.adapters import find_adapter, merge, merged_tensors, save_adapter
from palimpsa_surgery.recipes.training.finetune import finetune
from palimpsa_surgery.recipes.training.modes import check_coverage, coverage, coverage_table
from palimpsa_surgery.recipes.training.recipe import dump_recipe, load_recipe
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.checkpoint.loading import load_model
from safetensors.torch import load_file, save_file
from tiny import make_model, save_folder

peft = pytest.importorskip("peft")

ADVICE = "put the files of its tokenizer there again, or remove those that are there"
IDS = torch.arange(30).view(1, 30)
PLAIN = lora_settings({"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["in_proj", "out_proj"]})


NO_CODE = ("palimpsa_surgery.modeling.bundle.bundle_remote_code", lambda folder, model_type: ())
"""Bundling the code is tested where it is written."""


@pytest.fixture(autouse=True)
def without_code(monkeypatch):
    monkeypatch.setattr(*NO_CODE)


@pytest.fixture
def lora(recipe):
    return with_lora(recipe)


def with_lora(recipe):
    return {**recipe, "mode": "lora", "lora": {"rank": 2, "alpha": 8, "dropout": 0.1}, "lr": 1e-2}


@pytest.fixture(scope="module")
def trained(model_folder, recipe_of, tmp_path_factory):
    """A finished run, and the logits of the model in memory at its end."""
    seen = {}
    original = loop.train

    def watched(training):
        original(training)
        model = training.module.model.eval()
        seen["logits"] = model(input_ids=IDS).logits.detach()
        seen["trained"] = [name for name, p in model.named_parameters() if p.requires_grad]

    folder = tmp_path_factory.mktemp("lora")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*NO_CODE)
        patch.setattr("palimpsa_surgery.recipes.training.finetune.train", watched)
        return finetune(model_folder, with_lora(recipe_of(folder)), folder / "run"), seen


@pytest.fixture
def run(trained, tmp_path):
    """The finished run in a folder that a test may change."""
    result, seen = trained
    folder = shutil.copytree(result.folder, tmp_path / "run")
    return dataclasses.replace(result, folder=folder, final=folder / "final"), seen


def close(one, other):
    return (one - other).norm() <= 1e-5 * other.norm()  # fp32


def test_a_base_with_a_damaged_tokenizer_is_refused_by_what_merge_can_do(run, model_folder, tmp_path):
    base = shutil.copytree(model_folder, tmp_path / "base")
    (base / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=rf"its tokenizer cannot be read \(.*\); {ADVICE}$"):
        merge(run[0].folder, tmp_path / "merged", base=base)
    assert not (tmp_path / "merged").exists()


def half_missing(tensors, name):
    del tensors[name]


def other_rows(tensors, name):
    tensors[name] = tensors[name][:1].contiguous()


def not_finite(tensors, name):
    tensors[name][0] = float("nan")


@pytest.mark.parametrize(
    ("damage", "part", "message"),
    [
        (half_missing, "lora_B", "the adapter's part of .* does not fit its shape"),
        (other_rows, "lora_B", "the adapter's part of .* does not fit its shape"),
        (other_rows, "beta_down", "the adapter's part of .*beta_down.* does not fit its shape"),
        (not_finite, "lora_A", "adapter_model.safetensors: tensor .*lora_A.* holds values that are not finite"),
        (None, "", "adapter_model.safetensors: .*cut short"),
    ],
)
def test_a_damaged_adapter_is_refused_by_the_tensor(run, model_folder, tmp_path, damage, part, message):
    adapter = shutil.copytree(run[0].folder / "adapter", tmp_path / "adapter")
    path = adapter / "adapter_model.safetensors"
    if damage is None:
        os.truncate(path, 2000)
    else:
        tensors = load_file(path)
        damage(tensors, next(name for name in tensors if part in name))
        save_file(tensors, path)
    with pytest.raises(CheckpointError, match=message):
        merge(adapter, tmp_path / "merged", base=model_folder)
    assert not (tmp_path / "merged").exists()


PAIR = "base_model.model.backbone.layers.0.mixer.out_proj.lora_"
NEW = "base_model.model.backbone.layers.1.mixer.metaplasticity."


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        ((f"{PAIR}A.weight", f"{PAIR}B.weight"), r"has nothing for .*layers\.0\.mixer\.out_proj\.weight, .*target_mod"),
        ((f"{NEW}beta_up.weight",), r"has nothing for .*layers\.1.*beta_up\.weight, .*modules_to_save"),
        ((f"{NEW}log_prior",), r"has nothing for .*layers\.1.*log_prior, .*the base's value would stand there"),
    ],
)
def test_an_adapter_that_lacks_a_part_is_refused_by_the_tensor(run, model_folder, tmp_path, absent, message):
    adapter = shutil.copytree(run[0].folder / "adapter", tmp_path / "adapter")
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor for name, tensor in tensors.items() if name not in absent}, path)
    assert set(absent) <= set(tensors)
    with pytest.raises(CheckpointError, match=rf"adapter_model\.safetensors: {message}"):
        merge(adapter, tmp_path / "merged", base=model_folder)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target_modules": ["in_proj"]},
            r"holds a part of .*out_proj\.weight, which target_modules .* does not cover",
        ),
        ({"layers_to_transform": [1]}, r"holds a part of .*layers\.0\..*, which target_modules .* does not cover"),
        ({"modules_to_save": None}, r"holds a part of .*metaplasticity.*, which modules_to_save .* does not cover"),
        ({"r": 4, "lora_alpha": 16}, r"adapter_config\.json:r: is 4, but the adapter's matrices of .* are of rank 2"),
        ({"r": 4}, r"adapter_config\.json: r, lora_alpha and use_rslora give a scale of 2, .* trained with 4"),
        ({"lora_alpha": 16}, r"adapter_config\.json: r, lora_alpha and use_rslora give a scale of 8, .* with 4"),
        (
            {"use_rslora": True},
            r"give a scale of 5\.65685, and the adapter was trained with 4 \(adapter_source\.json\)",
        ),
    ],
)
def test_settings_of_another_adapter_are_refused(run, model_folder, tmp_path, changes, message):
    settings = run[0].folder / "adapter" / "adapter_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=message):
        merge(run[0].folder, tmp_path / "merged", base=model_folder)
    assert not (tmp_path / "merged").exists()


def test_an_adapter_of_an_earlier_release_does_not_say_its_scale(run, model_folder, tmp_path):
    source = run[0].folder / "adapter" / "adapter_source.json"
    content = json.loads(source.read_text())
    assert content.pop("scale") == 4
    source.write_text(json.dumps(content))
    assert close(
        load_model(merge(run[0].folder, tmp_path / "merged", base=model_folder))(input_ids=IDS).logits, run[1]["logits"]
    )


def test_a_prior_that_does_not_train_is_in_the_adapter_as_it_was(lora, tmp_path):
    base = save_folder(make_model(train_prior=False), tmp_path / "base")
    run = finetune(base, lora, tmp_path / "run")
    before, after = (load_file(folder / "model.safetensors") for folder in (base, run.final))
    name = "backbone.layers.1.mixer.metaplasticity.log_prior"
    assert torch.equal(before[name], after[name])
    merge(run.folder, tmp_path / "merged", base=base)


def test_adapter_and_base_merged_and_trained_are_one_model(run, model_folder, tmp_path):
    result, seen = run
    base = load_model(model_folder)(input_ids=IDS).logits
    assert (seen["logits"] - base).norm() > 1e-2 * base.norm()
    adapted = peft.PeftModel.from_pretrained(load_model(model_folder), str(result.folder / "adapter")).eval()
    assert close(adapted(input_ids=IDS).logits, seen["logits"])
    assert close(load_model(result.final)(input_ids=IDS).logits, seen["logits"])
    merged = merge(result.folder, tmp_path / "merged", base=model_folder)
    assert close(load_model(merged)(input_ids=IDS).logits, seen["logits"])


def test_new_parameters_are_trained_and_stored_with_the_adapter(run, model_folder):
    result, seen = run
    assert sum(".metaplasticity.modules_to_save." in name for name in seen["trained"]) == 4
    assert all("lora_" in name or ".metaplasticity.modules_to_save." in name for name in seen["trained"])
    stored = load_file(result.folder / "adapter" / "adapter_model.safetensors")
    source = load_file(model_folder / "model.safetensors")
    for part in ("beta_down.weight", "beta_up.weight", "beta_scale", "log_prior"):
        name = f"backbone.layers.1.mixer.metaplasticity.{part}"
        assert not torch.equal(stored[f"base_model.model.{name}"], source[name]), part


def test_the_final_model_differs_from_the_base_only_where_it_trained(run, model_folder):
    final, source = (load_file(f / "model.safetensors") for f in (run[0].final, model_folder))
    changed = {name for name, tensor in final.items() if not torch.equal(tensor, source[name])}
    assert changed == {n for n in source if "metaplasticity" in n or "in_proj.weight" in n or "out_proj.weight" in n}


def test_files_name_the_base_without_its_path(run, model_folder):
    folder = run[0].folder / "adapter"
    for name in ("adapter_config.json", "adapter_source.json"):
        assert str(model_folder.parent) not in (folder / name).read_text()
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == model_folder.name


def test_a_base_in_a_folder_must_be_given(run, tmp_path):
    with pytest.raises(UsageError, match=r"a model folder named 'model', .*--base"):
        merge(run[0].folder, tmp_path / "out")


def test_another_base_is_refused(run, tmp_path):
    other = save_folder(make_model(layers=[0]), tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"not the model that the adapter was trained on \(model, layers \[1\]"):
        merge(run[0].folder, tmp_path / "merged", base=other)


@pytest.mark.parametrize(
    ("out", "kept"),
    [("tuned", "adapter"), (".", "[^ ]+"), ("models", "base"), ("tuned/adapter", "adapter"), ("free", "mine.txt")],
)
def test_force_deletes_neither_the_adapter_nor_its_base(run, model_folder, tmp_path, out, kept):
    adapter, base = tmp_path / "tuned" / "adapter", tmp_path / "models" / "base"
    shutil.copytree(run[0].folder / "adapter", adapter)
    shutil.copytree(model_folder, base)
    (tmp_path / "free").mkdir()
    (tmp_path / "free" / "mine.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OutputExistsError, match=rf"replacing (this|it) would delete {kept}[,;]"):
        merge(adapter, tmp_path / out, base=base, force=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_merging_over_something_needs_force(run, model_folder, tmp_path):
    target = tmp_path / "merged"
    merge(run[0].folder, target, base=model_folder)
    with pytest.raises(OutputExistsError, match="--force"):
        merge(run[0].folder, target, base=model_folder)
    merge(run[0].folder / "adapter", target, base=model_folder, dtype="bfloat16", force=True)
    assert load_file(target / "model.safetensors")["backbone.embeddings.weight"].dtype == torch.bfloat16


def test_a_dtype_that_is_none_is_named(tmp_path):
    with pytest.raises(UsageError, match="--dtype int8: there is no such dtype; choose one of source, float32"):
        merge(tmp_path, tmp_path / "merged", dtype="int8")


def test_a_folder_without_an_adapter_is_named(model_folder):
    with pytest.raises(UsageError, match="holds no adapter"):
        find_adapter(model_folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("embeddings.weight", r"changes backbone\.embeddings\.weight, to which the head of model is tied"),
        (
            "embeddings.lora_embedding_A",
            r"low-rank part of backbone\.embeddings\.weight: embedding_A, which is no pair",
        ),
        ("layers.0.mixer.in_proj.lora_magnitude_vector.weight", r"in_proj\.weight: magnitude_vector, which is no pair"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(name, message, model_folder):
    with pytest.raises(CheckpointError, match=rf"adapter_model\.safetensors: the adapter .*{message}"):
        merged_tensors(
            {f"base_model.model.backbone.{name}": torch.ones(4096, 16)}, PLAIN, open_checkpoint(model_folder)
        )


@pytest.mark.parametrize("kept", ["in its run", "alone", "alone, without a recipe"])
def test_a_merged_model_has_the_recipe_of_the_adapter_and_never_that_of_the_base(
    kept, model_folder, lora, tmp_path, caplog
):
    base = shutil.copytree(model_folder, tmp_path / "base")
    (base / "recipe.yaml").write_text(dump_recipe(load_recipe({**lora, "mode": "full", "seed": 77})))
    for name in ("eval.json", "eval-loss.png"):
        (base / name).write_text("{}")
    run = finetune(base, lora, tmp_path / "run")
    assert not list(run.final.glob("eval*"))
    adapter = run.folder if kept == "in its run" else shutil.copytree(run.folder / "adapter", tmp_path / "kept")
    if "without" in kept:
        (adapter / "recipe.yaml").unlink()
    merged = merge(adapter, tmp_path / "merged", base=base)
    assert load_recipe(merged / "recipe-1.yaml").seed == 77
    assert (merged / "recipe.yaml").exists() == ("without" not in kept)
    assert ("what the adapter was trained on is not known" in caplog.text) == ("without" in kept)
    for folder in [run.final, *([merged] if "without" not in kept else [])]:
        assert load_recipe(folder / "recipe.yaml").mode == "lora"
    assert not list(merged.glob("eval*"))


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"])
def test_an_adapter_whose_start_changes_its_base_is_refused(run, model_folder, tmp_path, start):
    settings = run[0].folder / "adapter" / "adapter_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "init_lora_weights": start}))
    with pytest.raises(UsageError, match=rf"init_lora_weights: is '{start}', .*path_initial_model_for_weight_conver"):
        merge(run[0].folder, tmp_path / "out", base=model_folder)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": r".*layers\.1.*\.in_proj"},
        {"target_modules": "all-linear"},
        {"target_modules": ["in_proj", "out_proj"], "exclude_modules": ["layers.0.mixer.in_proj"]},
        {"target_modules": ["in_proj"], "exclude_modules": r".*\.0\..*"},
        {"target_modules": ["in_proj"], "layers_to_transform": 1},
        {"target_modules": ["in_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
        {"target_modules": ["in_proj"], "modules_to_save": ["norm", "metaplasticity", "out_proj"]},
        {"target_modules": ["in_proj"], "use_rslora": True, "r": 3, "lora_alpha": 5},
    ],
    ids=str,
)
def test_what_the_settings_cover_is_what_peft_writes(model_folder, tmp_path, options):
    checkpoint = open_checkpoint(model_folder)
    tuned = peft.get_peft_model(load_model(checkpoint), peft.LoraConfig(**{"r": 2, **options}))
    trained = {}
    for name, parameter in tuned.named_parameters():
        if "lora_" in name or ".modules_to_save." in name:
            torch.nn.init.normal_(parameter.data, std=0.05)
        trained[name] = parameter.detach()
    save_adapter(tuned, trained, checkpoint, tmp_path / "adapter")
    merged = load_model(merge(tmp_path / "adapter", tmp_path / "merged", base=model_folder))
    assert close(merged(input_ids=IDS).logits, tuned.eval()(input_ids=IDS).logits)


@pytest.mark.parametrize("start", ["gaussian", "orthogonal", "mica"])
def test_an_adapter_whose_start_keeps_its_base_is_merged_as_peft_does(model_folder, tmp_path, start):
    checkpoint = open_checkpoint(model_folder)
    config = peft.LoraConfig(r=2, target_modules=["in_proj", "out_proj"], init_lora_weights=start)
    tuned = peft.get_peft_model(load_model(checkpoint), config)
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter.data, std=0.05)
    trained = {name: parameter.detach() for name, parameter in tuned.named_parameters()}
    save_adapter(tuned, trained, checkpoint, tmp_path / "adapter")
    merged = load_model(merge(tmp_path / "adapter", tmp_path / "merged", base=model_folder))
    assert close(merged(input_ids=IDS).logits, tuned.eval()(input_ids=IDS).logits)


def test_a_killed_lora_run_goes_on_bit_for_bit(model_folder, lora, tmp_path, interrupted):
    lora = {**lora, "steps": 4, "save_every": 2}
    whole = finetune(model_folder, lora, tmp_path / "whole")
    interrupted(3, model_folder, lora, tmp_path / "run")
    result = finetune(model_folder, lora, tmp_path / "run", resume=True)
    ours, theirs = (load_file(r.folder / "adapter" / "adapter_model.safetensors") for r in (result, whole))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj"], "q_proj matches no module"),
        (["lm_head"], "lm_head is tied"),
        (["embeddings"], "embeddings is tied"),
        (["beta_up"], "beta_up is new and is trained whole"),
        (["layers.0.mixer.in_proj"], "none of them is in a swapped layer"),
    ],
)
def test_targets_that_make_no_sense_are_refused(targets, message, model):
    recipe = load_recipe({"steps": 1, "mode": "lora", "lora": {"targets": targets}})
    with pytest.raises(UsageError, match=message):
        check_coverage(coverage(model, targets, [1]), recipe, [1], tied=True)


@pytest.mark.parametrize(
    ("targets", "kind"),
    [
        (["in_proj", "conv1d"], "conv1d is a CausalConv1d"),
        (["in_proj", "embeddings"], "embeddings is a"),
        (["norm"], "norm is"),
    ],
)
def test_targets_that_are_no_matrices_are_refused(targets, kind):
    model = make_model(layers=[1], tie_word_embeddings=False)
    recipe = load_recipe({"steps": 1, "mode": "lora", "lora": {"targets": targets, "rank": 4}})
    with pytest.raises(UsageError, match=f"lora.targets: {kind}.*expected a linear layer such as in_proj"):
        modes.add_adapters(model, recipe, [1])


def test_force_allows_adapters_on_source_layers_alone(model):
    targets = ["layers.0.mixer.in_proj"]
    recipe = load_recipe({"steps": 1, "mode": "lora", "lora": {"targets": targets, "force": True}})
    check_coverage(coverage(model, targets, [1]), recipe, [1], tied=True)


def test_the_table_counts_both_kinds_of_layer():
    model = make_model(layers=[1, 2], num_hidden_layers=5)
    text = coverage_table(coverage(model, ["in_proj", "lm_head"], [1, 2]), [1, 2], model)
    rows = [line.split() for line in text.splitlines()]
    assert rows[2:] == [["in_proj", "2", "3"], ["lm_head", "0", "1"]]


def test_without_peft_the_message_says_what_to_install(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match=r"needs the package peft, .*install palimpsa-surgery\[train\]"):
        modes.add_adapters(model, load_recipe({"steps": 1, "mode": "lora"}), [1])


@pytest.fixture
def bitsandbytes(monkeypatch):
    """Stands in for the package, which needs a GPU: remembers what it was asked to quantize."""

    class Params4bit(torch.nn.Parameter):
        def __new__(cls, data, requires_grad=True, quant_type=None):
            parameter = super().__new__(cls, data, requires_grad)
            parameter.quant_type = quant_type
            return parameter

    class Linear4bit(torch.nn.Linear):
        def __init__(self, inputs, outputs, bias, compute_dtype, quant_type):
            super().__init__(inputs, outputs, bias=bias)

    module = types.ModuleType("bitsandbytes.nn")
    module.Linear4bit, module.Params4bit = Linear4bit, Params4bit
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return module


def test_only_input_projections_are_quantized(bitsandbytes, model):
    before = model(input_ids=IDS).logits
    modes.quantize_frozen(model)
    short = {name for name, module in model.named_modules() if isinstance(module, bitsandbytes.Linear4bit)}
    assert short == {f"backbone.layers.{layer}.mixer.in_proj" for layer in (0, 1)}
    assert not any(model.get_submodule(name).weight.requires_grad for name in short)
    torch.testing.assert_close(model(input_ids=IDS).logits, before)


def test_without_bitsandbytes_the_message_says_so(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn", None)
    with pytest.raises(UsageError, match=r"needs the package bitsandbytes, .*install palimpsa-surgery\[qlora\]"):
        modes.quantize_frozen(model)
