import json
import math

import pytest
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.modeling import PalimpsaMamba2Config
from transformers import AutoConfig, DynamicCache


def test_defaults_are_a_plain_mamba2_and_need_no_argument():
    config = PalimpsaMamba2Config()
    assert config.palimpsa_layers == []
    assert config.num_heads * config.head_dim == config.expand * config.hidden_size
    assert config.beta_rank == config.hidden_size // 16
    assert config.beta_groups == config.head_dim


def test_layers_are_sorted(tiny_config):
    assert tiny_config(palimpsa_layers=[2, 0]).palimpsa_layers == [0, 2]


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"palimpsa_layers": [3]}, "names layer 3; this model has layers 0 to 2"),
        ({"palimpsa_layers": [-1]}, "names layer -1"),
        ({"palimpsa_layers": [1, 1]}, "names a layer twice"),
        ({"num_heads": 5, "n_groups": 1}, r"5 \* 8 = 40 but expand \* hidden_size is 2 \* 24 = 48"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"beta_groups": 5}, "config: beta_groups: 5 does not divide head_dim 8"),
        ({"beta_scale_form": "exp"}, "beta_scale_form: 'exp' is none of"),
    ],
)
def test_refusals_name_the_key(tiny_config, over, message):
    with pytest.raises(UsageError, match=message):
        tiny_config(**over)


def test_json_is_strict_and_comes_back_the_same(tiny_config, tmp_path):
    config = tiny_config(train_prior=False, beta_scale_form="softplus", beta_groups=2)
    config.save_pretrained(tmp_path)
    written = json.loads(
        (tmp_path / "config.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )
    for key in ("model_type", "palimpsa_layers", "beta_rank", "beta_groups", "beta_scale_form", "train_prior"):
        assert key in written
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is PalimpsaMamba2Config
    assert {**again.to_dict(), "_name_or_path": ""} == config.to_dict()
    assert again.time_step_limit == [0.0, math.inf]
    assert again.mixer_geometry() == config.mixer_geometry()


@pytest.mark.parametrize(
    ("given", "kept"),
    [(None, [0.0, math.inf]), ([0.0, None], [0.0, math.inf]), ((0.001, 0.1), [0.001, 0.1])],
)
def test_time_step_limit(tiny_config, given, kept):
    assert tiny_config(time_step_limit=given).time_step_limit == kept


def test_a_cache_can_be_built_from_it(tiny_config):
    cache = DynamicCache(config=tiny_config())
    assert len(cache) == 3
    assert all(cache.is_linear)
