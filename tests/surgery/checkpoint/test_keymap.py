"""Names of source tensors to names of the model."""

import pytest
import torch
from palimpsa_surgery.surgery.checkpoint import keymap
from palimpsa_surgery.surgery.checkpoint.keymap import Rule, canonical_shape, strip_wrappers, translate

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
        "backbone.layers.0.mlp.fc3.weight",
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
