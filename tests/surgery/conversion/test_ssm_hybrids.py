"""Surgery on mamba_ssm's hybrids from end to end, by the command line, on a tiny random model in its layout."""

import json

import pico
import pytest
import torch
from palimpsa_surgery import cli
from palimpsa_surgery.base.files import load_json
from palimpsa_surgery.modeling import metaplasticity_off
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.checkpoint.loading import load_model
from palimpsa_surgery.surgery.measure.profile import read_profile
from typer.testing import CliRunner

HYBRID = {"layers": 4, "attention": (1,), "mlp": 100, "groups": 2, "rows": 4096, "vocab": 4093, "dtype": torch.float32}
FEW = ("--tokens", "512", "--seq-len", "128")
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5]])


def invoke(*arguments, code=0):
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exit_code == code, f"{result.exit_code}: {result.output} {result.exception!r}"
    return result


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid") / "source"
    pico.write_mamba_ssm(folder, **HYBRID)
    pico.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def converted(source):
    """Measured, planned by a count of layers, and converted."""
    folder = source.parent
    invoke("measure", source, "-o", folder / "profile.json", *FEW, "-q")
    invoke("plan", source, "--profile", folder / "profile.json", "--layers", "2", "-o", folder / "plan.yaml", "-q")
    invoke("convert", source, folder / "out", "--plan", folder / "plan.yaml", "--verify", "logits", "-q")
    return folder / "out"


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def test_inspect_names_the_layers_of_attention(source):
    result = invoke("inspect", source)
    assert "attention layers  1" in result.output
    rows = [line.split()[0] for line in result.output.splitlines() if "Mamba2 " in line]
    assert rows == ["0", "2", "3"]
    assert json.loads(invoke("inspect", source, "--json").stdout)["other_layers"] == {"1": "attention"}


def test_only_mixers_are_measured_and_chosen(converted):
    profile = read_profile(converted.parent / "profile.json")
    assert [layer.layer for layer in profile.layers] == [0, 2, 3]
    swapped = open_checkpoint(converted).palimpsa_layers
    assert len(swapped) == 2
    assert set(swapped) < {0, 2, 3}


@pytest.mark.parametrize("verb", ["plan", "convert"])
def test_a_layer_of_attention_is_refused(source, tmp_path, verb):
    out = ("-o", tmp_path / "plan.yaml") if verb == "plan" else (tmp_path / "out",)
    result = invoke(verb, source, *out, "--layers", "0,1", code=2)
    message = "layer 1: has no mixer to swap (a layer of kind: attention); choose layers of Mamba2"
    assert message in " ".join(result.output.split())


def test_the_conversion_is_the_source_with_its_importance_off(source, converted, rel):
    report = load_json(converted / "surgery_report.json")
    assert report["verification"]["off_error"] < 1e-6
    expected, model = logits(load_model(source)), load_model(converted)
    assert rel(logits(model), expected) < 1e-5  # the identity start
    with metaplasticity_off(model):
        assert rel(logits(model), expected) < 1e-6
    again = open_checkpoint(converted)
    assert again.config.attn_layer_idx == (1,)
    assert again.config.attention == open_checkpoint(source).config.attention
    assert again.config.d_intermediate == 100


def test_each_mixer_is_proved_by_itself_and_the_start_may_be_calibrated(source, tmp_path):
    out = tmp_path / "out"
    invoke("convert", source, out, "--layers", "2,3", "--init", "calibrated", "--verify", "layers", *FEW, "-q")
    assert set(load_json(out / "surgery_report.json")["verification"]["layers"]) == {"2", "3"}


def test_a_converted_hybrid_is_converted_further(converted, tmp_path):
    swapped = open_checkpoint(converted).palimpsa_layers
    left = ({0, 2, 3} - {*swapped}).pop()
    invoke("convert", converted, tmp_path / "more", "--layers", f"{left},", "--verify", "logits", "-q")
    assert open_checkpoint(tmp_path / "more").palimpsa_layers == (0, 2, 3)


@pytest.mark.parametrize("layout", ["mamba_ssm", "palimpsa_mamba2"])
def test_export_with_the_importance_off_gives_the_source_back(source, converted, tmp_path, layout):
    invoke("export", converted, tmp_path / "back", "--off", "--layout", layout, "-q")
    found, expected = open_checkpoint(tmp_path / "back"), open_checkpoint(source)
    assert found.layout == layout
    assert list(found.tensors) == list(expected.tensors)
    assert all(torch.equal(found.load(name), expected.load(name)) for name in found.tensors)
    assert torch.equal(logits(load_model(tmp_path / "back")), logits(load_model(source)))
    if layout == "mamba_ssm":
        config = load_json(tmp_path / "back" / "config.json")
        assert config["attn_cfg"] == {**pico.ATTENTION, "rotary_emb_base": 10000.0}
        assert (config["attn_layer_idx"], config["d_intermediate"]) == ([1], 100)


def test_generate_goes_on_from_a_prompt(converted):
    first, second = (invoke("generate", converted, "The index", "--max-new-tokens", "6", "-q").stdout for _ in range(2))
    assert first == second
    assert first.startswith("The index")


@pytest.mark.parametrize("mode", ["lora", "new+swapped"])
def test_fine_tuning_and_merging(converted, tmp_path, mode):
    options = ("steps=2", "tokens=null", "data.seq_len=32", "batch_size=2", "micro_batch_size=1", f"mode={mode}")
    run = tmp_path / "run"
    targets = ("lora.targets=[in_proj,out_proj,fc1]",) if mode == "lora" else ()
    invoke("finetune", converted, "--recipe", "tiny_cpu", "-o", run, *options, *targets, "-q")
    before, after = open_checkpoint(converted), open_checkpoint(run / "final")
    moved = {name for name in before.tensors if not torch.equal(before.load(name), after.load(name))}
    attention = {f"backbone.layers.1.mixer.{name}.weight" for name in ("in_proj", "out_proj")}
    assert any(".metaplasticity." in name for name in moved)
    if mode == "new+swapped":
        assert not any(name.startswith("backbone.layers.1.") for name in moved)
        return
    assert moved >= {*attention, "backbone.layers.1.mlp.fc1.weight"}
    invoke("merge", run, tmp_path / "merged", "--base", converted, "-q")
    merged = open_checkpoint(tmp_path / "merged")
    assert all(torch.allclose(merged.load(name), after.load(name), atol=1e-6) for name in after.tensors)


def test_what_is_pushed_says_what_it_is(converted, tmp_path):
    invoke("push", converted, "somebody/hybrid", "--to-folder", tmp_path / "pushed", "-q")
    assert load_json(tmp_path / "pushed" / "config.json")["attn_layer_idx"] == [1]
    assert (tmp_path / "pushed" / "mixers_attention.py").is_file()
    card = (tmp_path / "pushed" / "README.md").read_text()
    assert "2 layers were replaced by Palimpsa-M" in card
