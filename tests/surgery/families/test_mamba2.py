"""What a family says of its models is what the model class has."""

import inspect

import pytest
import torch
from palimpsa_surgery.base.errors import CheckpointError
from palimpsa_surgery.mixers.geometry import GateSpec
from palimpsa_surgery.modeling import PalimpsaMamba2Config
from palimpsa_surgery.surgery.families.mamba2 import MAMBA2, Mamba2Config
from palimpsa_surgery.surgery.families.registry import mixers


@pytest.mark.parametrize("swapped", [(), (0, 2)])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("bias", "conv_bias"), [(False, True), (True, False)])
def test_the_expected_tensors_are_those_of_the_model(swapped, tied, bias, conv_bias):
    keys = {
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
    config = MAMBA2.config("config.json", keys)
    with torch.device("meta"):
        model = MAMBA2.model_class()(MAMBA2.model_config(config))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        del shapes["lm_head.weight"]
    assert MAMBA2.shapes(config) == shapes
    for layer, site in MAMBA2.sites(config).items():
        assert set(site.shapes()) == {name for name in shapes if name.startswith(site.tensor(""))}
        assert mixers(model)[layer] is model.get_submodule(site.module)
        assert model.get_submodule(site.norm).weight.shape == (24,)
        assert site.gate == (config.gate if layer in swapped else None)


def test_what_surgery_adds_is_off_by_default_as_in_the_class():
    ours, theirs = Mamba2Config().arguments(), PalimpsaMamba2Config()
    assert {key: getattr(theirs, key) for key in ours} == {**ours, "time_step_limit": list(ours["time_step_limit"])}
    assert set(ours) <= set(inspect.signature(PalimpsaMamba2Config).parameters)


def test_a_config_comes_back_from_the_class(tmp_path):
    keys = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "palimpsa_layers": [2, 0], "beta_groups": 2}
    config = MAMBA2.config("config.json", keys)
    assert config.palimpsa_layers == (0, 2)
    assert config.gate == GateSpec(2, 2, "abs", True)
    assert MAMBA2.sites(MAMBA2.model_config(config)) == MAMBA2.sites(config)
    again = MAMBA2.config("config.json", {key: getattr(MAMBA2.model_config(config), key) for key in config.arguments()})
    assert again.gate == config.gate


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"beta_groups": 7}, "^c.json:beta_groups: 7 does not divide head_dim 64; .*restore the config"),
        ({"beta_rank": 1000}, "^c.json:beta_rank: 1000 is more than hidden_size 768"),
    ],
)
def test_a_gate_that_does_not_fit_names_the_file_and_the_key(keys, message):
    with pytest.raises(CheckpointError, match=message):
        MAMBA2.config("c.json", keys)
