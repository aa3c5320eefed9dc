"""Checkpoints of hybrids: names in files of any release, tensors in parts, and what is refused by name."""

import json

import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError
from palimpsa_surgery.modeling.hybrids.configuration_palimpsa_hybrid import known_hosts
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from safetensors.torch import load_file, save_file
from tiny_hybrids import VARIANTS, make_host, save_host

KNOWN = [variant for variant in VARIANTS if variant.partition("/")[0] in known_hosts()]
WEIGHTS, CONFIG = "model.safetensors", "config.json"


def edit_weights(folder, change):
    tensors = load_file(folder / WEIGHTS)
    tensors = change(tensors) or tensors
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def edit_config(folder, **changes):
    content = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(content))


def refused(folder, match):
    with pytest.raises(CheckpointError, match=match) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("variant", KNOWN)
def test_every_tensor_of_a_host_is_known_by_the_name_of_its_class(variant, tmp_path):
    host = make_host(variant)
    checkpoint = open_checkpoint(save_host(variant, tmp_path))
    assert checkpoint.layout == variant.partition("/")[0]
    assert not checkpoint.dropped
    assert len(checkpoint.tensors) == len(load_file(tmp_path / WEIGHTS))
    state = host.state_dict()
    for name in checkpoint.tensors:
        if name in state:
            assert torch.equal(checkpoint.load(name), state[name])
    for name in checkpoint.parts:
        assert torch.equal(checkpoint.load_whole(name), state[name])
    assert set(checkpoint.shapes(checkpoint.config)) == set(checkpoint.tensors)


@pytest.mark.parametrize("variant", KNOWN)
def test_names_of_the_class_itself_are_read_too(variant, tmp_path):
    save_host(variant, tmp_path)
    host = make_host(variant)
    first = {tensor.data_ptr(): name for name, tensor in reversed(host.state_dict().items())}
    save_file({name: t for name, t in host.state_dict().items() if first[t.data_ptr()] == name}, tmp_path / WEIGHTS)
    assert not open_checkpoint(tmp_path).parts


def test_a_tensor_that_is_saved_under_both_of_its_names_is_one(tmp_path):
    save_host("zamba2", tmp_path)
    edit_weights(tmp_path, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    ((name, reason),) = open_checkpoint(tmp_path).dropped
    assert {name} < {"lm_head.weight", "model.embed_tokens.weight"}
    assert "the same values as" in reason


def expert(number):
    return f"backbone.layers.1.mixer.experts.{number}.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("backbone.layers.0.mixer.D"), r"1 missing \(model\.layers\.0\.mixer\.D\)"),
        (lambda tensors: tensors.update({"other.weight": torch.ones(2)}), r"1 unexpected \(other\.weight\)"),
        (
            lambda tensors: tensors.pop(expert(2)),
            r"experts\.0\.up_proj\.weight is \[3, 16, 32\] instead of \[4, 16, 32\]",
        ),
        (
            lambda tensors: tensors.update({expert(1): torch.ones(16, 31)}),
            r"other parts of .*up_proj do not go together",
        ),
        (
            lambda tensors: tensors.update({"backbone.layers.4.norm.weight": torch.ones(31)}),
            r"backbone\.layers\.4\.norm\.weight is \[31\] instead of \[32\]",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.mixer.D": torch.ones(8)}),
            r"both stand for model\.layers\.0\.mixer\.D and differ",
        ),
    ],
)
def test_tensors_that_do_not_add_up_are_named(change, message, tmp_path):
    save_host("nemotron_h", tmp_path)

    def edit(tensors):
        change(tensors)

    edit_weights(tmp_path, edit)
    refused(tmp_path, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "config.json:quantization_config: the weights are quantized",
        ),
        ({"quantization_config": {"load_in_4bit": True}}, "use the original model"),
        *(
            ({"model_type": kind}, f"is '{kind}', whose mixers are Mamba1, expected Mamba2; choose .* nemotron_h")
            for kind in ("jamba", "zamba", "falcon_mamba", "mamba")
        ),
        (
            {"model_type": "nemotron_h_omni"},
            "a model of more than text around nemotron_h; save its language model alone",
        ),
        (
            {"model_type": "seeing", "text_config": {"model_type": "bamba"}},
            r"is 'seeing', a model of more than text around bamba; save its language model alone \(as bamba",
        ),
        ({"model_type": "palimpsa_bamba"}, "palimpsa_layers: is None, expected a list of layers"),
        (
            {"model_type": "palimpsa_bamba", "palimpsa_layers": [0], "beta_rank": 2, "beta_groups": 8},
            "beta_scale_form: is None, which no importance gate has",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000, but the weights are 38 tensors in all"),
        ({"hidden_size": 33}, "transformers (refuses it as the config of|cannot build) a bamba model"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, message, tmp_path):
    save_host("bamba", tmp_path)
    edit_config(tmp_path, **changes)
    refused(tmp_path, message)


def test_the_other_file_that_tells_of_quantized_weights(tmp_path):
    save_host("nemotron_h", tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    refused(tmp_path, r"hf_quant_config\.json:quantization: the weights are quantized")


def test_weights_of_eight_bits_are_refused(tmp_path):
    save_host("bamba", tmp_path)

    def edit(tensors):
        name = "model.layers.0.mamba.in_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    edit_weights(tmp_path, edit)
    refused(tmp_path, r"in_proj\.weight is stored as float8_e4m3fn, expected weights in float32")


def test_code_of_a_source_is_not_asked_for(tmp_path):
    save_host("nemotron_h", tmp_path)
    edit_config(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"})
    config = open_checkpoint(tmp_path).config
    assert "auto_map" not in config.arguments()


def test_a_pattern_of_letters_stands_for_the_kinds_of_layers(tmp_path):
    save_host("nemotron_h", tmp_path)
    content = json.loads((tmp_path / CONFIG).read_text())
    del content["layers_block_type"]
    (tmp_path / CONFIG).write_text(json.dumps(content | {"hybrid_override_pattern": "ME*-MM", "num_hidden_layers": 6}))
    assert list(open_checkpoint(tmp_path).sites) == [0, 4, 5]
