"""Names of source tensors to names of the model."""

import pytest
import torch
from palimpsa_surgery.surgery.checkpoint import keymap
from palimpsa_surgery.surgery.checkpoint.keymap import Rule, canonical_shape, expected_shapes, strip_wrappers, translate

LAYER = "backbone.layers.11.mixer."


@pytest.mark.parametrize("layout", keymap.TABLES)
@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("backbone.embedding.weight", "backbone.embeddings.weight"),
        ("backbone.embeddings.weight", "backbone.embeddings.weight"),
        ("model.backbone.embedding.weight", "backbone.embeddings.weight"),
        ("embeddings.weight", "backbone.embeddings.weight"),
        ("layers.3.norm.weight", "backbone.layers.3.norm.weight"),
        ("module.backbone.layers.11.mixer.A_log", LAYER + "A_log"),
        ("backbone.layers.11.mixer.conv1d.bias", LAYER + "conv1d.bias"),
        ("backbone.layers.11._orig_mod.mixer.in_proj.weight", LAYER + "in_proj.weight"),
        ("_fsdp_wrapped_module.backbone.layers.11._checkpoint_wrapped_module.mixer.D", LAYER + "D"),
        ("norm_f.weight", "backbone.norm_f.weight"),
        ("model.lm_head.weight", "lm_head.weight"),
    ],
)
def test_every_layout_knows_the_tensors_of_mamba2(layout, source, name):
    assert translate(source, layout)[0] == name


@pytest.mark.parametrize(
    "source",
    [
        "backbone.layers.0.mixer.x_proj.weight",
        "backbone.layers.0.mlp.fc1.weight",
        "backbone.layers.zero.mixer.D",
        "backbone.layers.0.mixer.D.extra",
        "prefix.backbone.layers.0.mixer.D",
        "backbone.layers.0.mixerXD",
        "lm_head.bias",
    ],
)
def test_a_stranger_is_never_matched_by_a_part_of_its_name(source):
    assert all(translate(source, layout) is None for layout in keymap.TABLES)


def test_new_tensors_are_known_to_the_converted_layout_alone():
    name = LAYER + "metaplasticity.beta_up.weight"
    assert translate(name, "palimpsa_mamba2")[0] == name
    assert translate(name, "hf_mamba2") is None


@pytest.mark.parametrize("name", ["modules.a", "my_orig_mod.a", "module_a.b", "a.module"])
def test_only_whole_wrapper_names_are_stripped(name):
    assert strip_wrappers(name) == name


def test_a_layout_is_one_table(monkeypatch):
    flat = Rule(r"conv\.(\d+)", r"backbone.layers.\1.mixer.conv1d.weight", transform=lambda w: w.unsqueeze(1))
    monkeypatch.setitem(keymap.TABLES, "other", (flat,))
    name, rule = translate("conv.7", "other")
    assert name == "backbone.layers.7.mixer.conv1d.weight"
    assert canonical_shape(rule, (40, 4)) == (40, 1, 4)
    assert canonical_shape(Rule("a", "b"), (40, 4)) == (40, 4)
    assert rule.transform(torch.zeros(40, 4)).shape == (40, 1, 4)


@pytest.mark.parametrize("swapped", [(), (0, 2)])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("bias", "conv_bias"), [(False, True), (True, False)])
def test_the_expected_tensors_are_those_of_the_model(swapped, tied, bias, conv_bias):
    from palimpsa_surgery.modeling.palimpsa_mamba2.configuration_palimpsa_mamba2 import PalimpsaMamba2Config
    from palimpsa_surgery.modeling.palimpsa_mamba2.modeling_palimpsa_mamba2 import PalimpsaMamba2ForCausalLM

    config = {
        "vocab_size": 40,
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_heads": 6,
        "head_dim": 8,
        "n_groups": 2,
        "state_size": 5,
        "expand": 2,
        "conv_kernel": 3,
        "use_bias": bias,
        "use_conv_bias": conv_bias,
        "tie_word_embeddings": tied,
        "palimpsa_layers": list(swapped),
        "beta_rank": 3,
        "beta_groups": 4,
    }
    with torch.device("meta"):
        model = PalimpsaMamba2ForCausalLM(PalimpsaMamba2Config(**config))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        del shapes["lm_head.weight"]
    assert expected_shapes(config) == shapes
