"""What the stages know of hybrids: the hosts, their mixers, and the tensors of the class that runs them."""

import json
import math

import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError
from palimpsa_surgery.mixers.geometry import GateSpec
from palimpsa_surgery.modeling.hybrids.configuration_palimpsa_hybrid import known_hosts
from palimpsa_surgery.modeling.hybrids.hosts import HOSTS
from palimpsa_surgery.modeling.hybrids.modeling_palimpsa_hybrid import model_class
from palimpsa_surgery.modeling.hybrids.swapping import bound_step_sizes
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.families.hybrids import DELTAS, HYBRIDS, PREFIX
from palimpsa_surgery.surgery.families.registry import FAMILIES, mixers
from safetensors.torch import save_file
from tiny_hybrids import SWAPPED, VARIANTS, make_host, token_ids
from transformers import BitsAndBytesConfig, FineGrainedFP8Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

KNOWN = [variant for variant in VARIANTS if variant.partition("/")[0] in known_hosts()]


def gate(kind):
    return GateSpec(2, 1 if kind in DELTAS else 4, "abs", True)


def opened(variant, **changes):
    """The family of a variant, and its config as config.json has it."""
    kind = variant.partition("/")[0]
    keys = make_host(variant, **changes).config.to_diff_dict()
    return HYBRIDS[kind], HYBRIDS[kind].config("config.json", keys)


def swapped(variant):
    family, config = opened(variant)
    keys = {**config.keys(), **gate(family.name).keys(), "palimpsa_layers": SWAPPED[family.name]}
    return family, family.config("config.json", keys)


def test_the_families_are_the_hosts():
    assert list(HYBRIDS) == list(HOSTS)
    assert list(DELTAS) == [name for name, host in HOSTS.items() if host.delta]
    assert {f"{PREFIX}{host}" for host in HOSTS} < set(FAMILIES)


@pytest.mark.parametrize("variant", KNOWN)
def test_sites_and_shapes_are_those_of_the_class(variant):
    family, config = swapped(variant)
    with torch.device("meta"):
        model = family.model_class()(family.model_config(config))
    stored = {
        name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in family.tied(config)
    }
    assert family.shapes(config) == stored
    for layer, site in family.sites(config).items():
        mixer = model.get_submodule(site.module)
        assert site.shapes() == {site.tensor(name): tuple(p.shape) for name, p in mixer.named_parameters()}
        assert (site.gate == gate(family.name)) == (layer in SWAPPED[family.name])
        assert model.get_submodule(site.norm).weight.shape == (config.hidden_size,)
        assert mixers(model)[layer] is mixer


@pytest.mark.parametrize("variant", KNOWN)
def test_fp32_is_kept_where_the_class_keeps_it(variant):
    family, config = swapped(variant)
    state = {name: torch.zeros(shape) for name, shape in family.shapes(config).items()}
    model = family.build(config, state, torch.bfloat16)
    for name in family.shapes(config):
        kept = model.state_dict()[name].dtype == torch.float32
        assert kept == family.keeps_fp32(config, name), name


@pytest.mark.parametrize("variant", KNOWN)
def test_the_reference_is_the_host_with_the_bounds_of_its_training(variant):
    family, config = opened(variant)
    host = make_host(variant)
    with torch.no_grad():
        model = family.reference(config, host.state_dict())
        as_shipped, bounded = host(token_ids()).logits, model(token_ids()).logits
        for path in family.paths(config).values():
            bound_step_sizes(host.get_submodule(path), host.config)
        assert torch.equal(host(token_ids()).logits, bounded)
    assert type(model) is type(host)
    assert bool(family.remarks(config)) == (not torch.equal(as_shipped, bounded))


def test_a_remark_says_both_bounds():
    family, config = opened("zamba2")
    assert "bounds step sizes to (0.001, inf), the model was trained with (0, inf)" in family.remarks(config)[0]


def test_multipliers_of_a_mixer_on_meta_have_their_values():
    family, config = swapped("falcon_h1")
    host = make_host("falcon_h1")
    for mixer in family.mixers(config, 1):
        assert torch.equal(mixer.mup_vector, host.get_submodule(family.paths(config)[1]).mup_vector)
        assert next(mixer.parameters()).is_meta


def test_a_tensor_that_is_missing_is_an_error_and_no_random_layer():
    family, config = opened("bamba")
    state = {name: torch.zeros(shape) for name, shape in family.shapes(config).items()}
    del state["model.layers.0.mamba.D"]
    with pytest.raises((RuntimeError, CheckpointError), match=r"model\.layers\.0\.mamba\.D"):
        family.build(config, state, torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "wide"}, "transformers refuses it as the config of a bamba model .*hidden_size"),
        ({"attn_layer_indices": [0, 1, 2]}, "none of which has a Mamba2 mixer"),
        (
            {"palimpsa_layers": [1], **gate("bamba").keys()},
            "palimpsa_layers: names layer 1, which holds no Mamba2 mixer",
        ),
        (
            {"palimpsa_layers": [0], **gate("bamba").keys(), "beta_groups": 3},
            "beta_groups: 3 does not divide head_dim 8",
        ),
    ],
)
def test_configs_that_are_none_are_refused(changes, message):
    keys = make_host("bamba").config.to_diff_dict() | changes
    with pytest.raises(CheckpointError, match=message):
        HYBRIDS["bamba"].config("config.json", keys)


ALL_MIXERS = {
    "bamba": {"attn_layer_indices": []},
    "granitemoehybrid": {"layer_types": ["mamba"] * 3},
    "zamba2": {"layers_block_type": ["mamba"] * 4},
    "nemotron_h": {"layers_block_type": ["mamba", "mlp", "mamba"]},
    "qwen3_5_text": {"layer_types": ["linear_attention"] * 4},
    "qwen3_next": {"layer_types": ["linear_attention"] * 4},
}
"""Not falcon_h1, whose layers have both, nor olmo_hybrid, whose config refuses it."""


@pytest.mark.parametrize("kind", [kind for kind in ALL_MIXERS if kind in known_hosts()])
def test_a_model_without_attention_is_refused_as_its_class_takes_no_cache(kind):
    with pytest.raises(ValueError, match="get_seq_length"):
        make_host(kind, **ALL_MIXERS[kind])(token_ids(), use_cache=True)
    with pytest.raises(CheckpointError, match=f"a {kind} model without a layer of attention, .* run with a cache"):
        opened(kind, **ALL_MIXERS[kind])


def opened_folder(folder, content):
    (folder / "config.json").write_text(json.dumps(content, default=str))
    save_file({f"layers.{layer}": torch.zeros(1) for layer in range(99)}, folder / "model.safetensors")
    return open_checkpoint(folder)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        *((kind, "whose mixers are Mamba1, expected Mamba2") for kind in ("mamba", "falcon_mamba", "jamba", "zamba")),
        ("nemotron_h_omni", r"more than text around nemotron_h; save its language model alone \(as nemotron_h, with"),
        ("qwen3_5", r"more than text around qwen3_5_text; save its language model alone \(as qwen3_5_text, with"),
        *((kind, "expected mamba2 .* or one of bamba") for kind in ("qwen3_5_moe", "kimi_linear", "granite4_vision")),
    ],
)
def test_configs_of_other_kinds_as_their_classes_write_them_are_refused(kind, message, tmp_path):
    if kind not in CONFIG_MAPPING:
        pytest.skip("not in this release")
    with pytest.raises(CheckpointError, match=f"config.json:model_type: is '{kind}', .*{message}"):
        opened_folder(tmp_path, CONFIG_MAPPING[kind]().to_dict())


@pytest.mark.parametrize("kind", known_hosts())
@pytest.mark.parametrize("quantization", [FineGrainedFP8Config(), BitsAndBytesConfig(load_in_4bit=True)])
def test_quantized_weights_as_their_classes_write_them_are_refused(kind, quantization, tmp_path):
    config = CONFIG_MAPPING[kind](**VARIANTS[kind], quantization_config=quantization.to_dict())
    with pytest.raises(CheckpointError, match=r"config\.json:quantization_config: the weights are quantized"):
        opened_folder(tmp_path, config.to_dict())


def test_config_files_are_strict_json_and_say_the_same(tmp_path):
    from palimpsa_surgery.base.files import load_json
    from palimpsa_surgery.surgery.checkpoint.sources import read_foreign_json

    family, config = swapped("granitemoehybrid")
    family.write_config(config, tmp_path, dtype="bfloat16")
    assert load_json(tmp_path / "config.json")["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    keys = read_foreign_json(tmp_path / "config.json")
    assert keys["time_step_limit"] == [0.0, math.inf]
    assert (keys["model_type"], keys["dtype"]) == ("palimpsa_granitemoehybrid", "bfloat16")
    assert family.config("config.json", keys).arguments() == config.arguments()
    model_config = model_class("granitemoehybrid").config_class.from_pretrained(tmp_path)
    assert model_config.palimpsa_layers == SWAPPED["granitemoehybrid"]
