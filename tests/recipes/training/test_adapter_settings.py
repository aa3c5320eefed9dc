"""PEFT's settings: what is known to be plain LoRA passes, anything else is refused by its name."""

import sys

import pytest
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.recipes.training.adapter_settings import lora_settings

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["in_proj"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "the adapter is IA3;"),
        ({"use_dora": True}, "LORA with use_dora;"),
        ({"lora_bias": True}, "LORA with lora_bias;"),
        ({"bias": "all"}, "LORA with bias;"),
        ({"rank_pattern": {"in_proj": 8}}, "LORA with rank_pattern;"),
        ({"ensure_weight_tying": True}, "LORA with ensure_weight_tying;"),
        ({"megatron_config": {"tp": 2}}, "LORA with megatron_config;"),
        (
            {"of_a_later_peft": "curved", "use_dora": True},
            "LORA with of_a_later_peft, use_dora; only plain LORA can be",
        ),
        ({"r": None}, "adapter_config.json:r: is None, expected a whole number above 0"),
        ({"r": 0}, "adapter_config.json:r: is 0, expected a whole number above 0"),
        ({"r": 2.5}, "adapter_config.json:r: is 2.5, expected a whole number above 0"),
        ({"lora_alpha": "x"}, "adapter_config.json:lora_alpha: is 'x', expected a number above 0"),
        ({"target_modules": None}, "adapter_config.json:target_modules: names no module, expected those with adapters"),
        ({"target_modules": [3]}, r"adapter_config.json:target_modules: is \[3\], expected a list of names"),
        ({"target_modules": "(in_proj"}, "adapter_config.json:target_modules: .* is no regular expression"),
        ({"modules_to_save": {"a": 1}}, "adapter_config.json:modules_to_save: is .*, expected a list of names"),
        ({"layers_to_transform": "1"}, "adapter_config.json:layers_to_transform: is '1', expected numbers of layers"),
    ],
)
def test_other_adapters_and_settings_that_are_none_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        lora_settings({**PLAIN, **changes})


@pytest.mark.parametrize(("rslora", "scale"), [(False, 2), (True, 4)])
def test_the_scale(rslora, scale):
    assert lora_settings({**PLAIN, "use_rslora": rslora}).scale == scale


@pytest.mark.parametrize("installed", [True, False])
def test_what_peft_writes_by_default_is_plain(installed, monkeypatch):
    config = {**pytest.importorskip("peft").LoraConfig().to_dict(), **PLAIN}
    if not installed:
        monkeypatch.setitem(sys.modules, "peft", None)
    assert lora_settings(config) == lora_settings(PLAIN)


def test_a_default_of_a_newer_peft_is_plain(monkeypatch):
    config = pytest.importorskip("peft").LoraConfig
    monkeypatch.setattr(config, "to_dict", lambda self: {"group_size": 16})
    assert lora_settings({**PLAIN, "group_size": 16}) == lora_settings(PLAIN)
    with pytest.raises(UsageError, match="LORA with group_size;"):
        lora_settings({**PLAIN, "group_size": 32})
