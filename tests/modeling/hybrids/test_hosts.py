import json
import math

import pytest
import torch
from palimpsa_surgery.mixers.mixer import Mamba2Mixer
from palimpsa_surgery.modeling.hybrids.hosts import (
    HOSTS,
    logits_factor,
    mixer_path,
    mixer_paths,
    norm_path,
    time_step_limit,
)
from palimpsa_surgery.modeling.hybrids.mixer_hybrid import host_geometry
from palimpsa_surgery.modeling.hybrids.modeling_palimpsa_hybrid import host_class
from tiny_hybrids import SWAPPED, VARIANTS, make_host, token_ids
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def test_the_table_and_the_tests_name_the_same_hosts():
    assert set(HOSTS) == set(SWAPPED) == {variant.partition("/")[0] for variant in VARIANTS}


def test_paths_lead_to_every_mixer_and_to_nothing_else(variant, host):
    model = host(variant)
    paths = mixer_paths(model.config)
    found = {name.removesuffix(".A_log") for name, _ in model.named_parameters() if name.endswith(".A_log")}
    assert set(paths.values()) == found
    assert all(model.get_submodule(path).layer_idx == layer for layer, path in paths.items())
    others = set(range(model.config.num_hidden_layers)) - set(paths)
    assert all(mixer_path(model.config, layer) is norm_path(model.config, layer) is None for layer in others)


def test_the_attributes_of_a_mixer_are_there(mamba_kind, host):
    """What our mixer replaces has no parameters but those of ours."""
    model = host(mamba_kind)
    for path in mixer_paths(model.config).values():
        mixer = model.get_submodule(path)
        ours = Mamba2Mixer(host_geometry(mixer, model.config))
        assert {name for name, _ in mixer.named_parameters()} <= {name for name, _ in ours.named_parameters()}


@torch.no_grad()
def test_the_norm_before_a_mixer_gives_its_input(kind):
    model, seen = make_host(kind), {}
    for layer, path in mixer_paths(model.config).items():
        norm, mixer = model.get_submodule(norm_path(model.config, layer)), model.get_submodule(path)
        norm.register_forward_hook(lambda _, inputs, output, at=layer: seen.update({(at, "norm"): output}))
        mixer.register_forward_pre_hook(
            lambda _, inputs, named, at=layer: seen.update({(at, "mixer"): (*inputs, *named.values())[0]}),
            with_kwargs=True,
        )
    model(token_ids(), use_cache=False)
    for layer in mixer_paths(model.config):
        torch.testing.assert_close(seen[layer, "norm"], seen[layer, "mixer"])


@torch.no_grad()
def test_logits_are_the_heads_output_times_the_factor(kind, host):
    model = host(kind)
    hidden = model.base_model(token_ids()).last_hidden_state
    expected = model.get_output_embeddings()(hidden) * logits_factor(model.config)
    torch.testing.assert_close(model(token_ids()).logits, expected)


def config_of(kind, **changes):
    return CONFIG_MAPPING[kind](**{**VARIANTS[kind], **changes})


@pytest.mark.parametrize("kind", ["bamba", "granitemoehybrid", "falcon_h1", "nemotron_h"])
def test_bounds_of_the_step_size_come_from_the_config(kind):
    assert time_step_limit(config_of(kind)) == (0.0, math.inf)
    assert time_step_limit(config_of(kind, time_step_limit=(0.01, 0.5))) == (0.01, 0.5)
    assert time_step_limit(config_of(kind, time_step_limit=(0.0, 3.4028234663852886e38))) == (0.0, math.inf)


def test_zamba2_was_trained_without_bounds_whatever_its_class_does():
    assert time_step_limit(config_of("zamba2", time_step_min=0.01)) == (0.0, math.inf)


def test_bounds_survive_config_json(tmp_path):
    host_class("bamba").config_class(**VARIANTS["bamba"]).save_pretrained(tmp_path)
    assert "Infinity" in json.dumps(json.loads((tmp_path / "config.json").read_text())["time_step_limit"])
    assert time_step_limit(CONFIG_MAPPING["bamba"].from_pretrained(tmp_path)) == (0.0, math.inf)
