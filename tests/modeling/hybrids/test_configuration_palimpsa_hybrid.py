import copy
import pickle

import pytest
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.mixers.geometry import GateSpec
from palimpsa_surgery.modeling.hybrids import configuration_palimpsa_hybrid as configuration
from palimpsa_surgery.modeling.hybrids import modeling_palimpsa_hybrid as modeling
from palimpsa_surgery.modeling.hybrids.configuration_palimpsa_hybrid import config_class, known_hosts
from palimpsa_surgery.modeling.hybrids.hosts import HOSTS
from palimpsa_surgery.modeling.hybrids.modeling_palimpsa_hybrid import host_class, model_class
from tiny_hybrids import DELTAS, SWAPPED, VARIANTS
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def make(kind, **changes):
    return config_class(kind)(**{**VARIANTS[kind], "palimpsa_layers": SWAPPED[kind], **changes})


def test_a_config_is_the_hosts_and_five_keys(kind):
    config, host = make(kind), CONFIG_MAPPING[kind](**VARIANTS[kind])
    assert isinstance(config, type(host))
    assert config.model_type == f"palimpsa_{kind}"
    new = {"palimpsa_layers", "beta_rank", "beta_groups", "beta_scale_form", "train_prior"}
    assert set(config.to_dict()) - set(host.to_dict()) == new
    assert config.layer_types == host.layer_types


def test_defaults_of_the_gate_follow_the_mixer(kind):
    groups = {"falcon_h1": 4, **dict.fromkeys(DELTAS, 1)}.get(kind, 8)
    assert make(kind).gate == GateSpec(rank=2, groups=groups, scale_form="abs", train_prior=True)


def test_a_config_reads_what_it_wrote(kind, tmp_path):
    groups = 1 if kind in DELTAS else 2
    config = make(kind, beta_rank=3, beta_groups=groups, beta_scale_form="softplus", train_prior=False)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is config_class(kind)
    assert again.to_diff_dict() == config.to_diff_dict()
    assert again.gate == GateSpec(3, groups, "softplus", False)


def test_classes_are_attributes_of_their_modules_and_can_be_pickled(kind):
    made, plain = config_class(kind), CONFIG_MAPPING[kind]
    assert getattr(configuration, f"Palimpsa{plain.__name__}") is made
    assert pickle.loads(pickle.dumps(make(kind))).to_dict() == copy.deepcopy(make(kind)).to_dict()
    for headless in (False, True):
        model = model_class(kind, headless=headless)
        assert getattr(modeling, f"Palimpsa{host_class(kind, headless=headless).__name__}") is model
        assert pickle.loads(pickle.dumps(model)) is model
        assert model.config_class is made


@pytest.mark.parametrize("module", [configuration, modeling])
def test_other_attributes_are_missing_as_usual(module):
    with pytest.raises(AttributeError, match="has no attribute 'PalimpsaNothing'"):
        _ = module.PalimpsaNothing


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"palimpsa_layers": [1]}, r"palimpsa_layers names 1; this model has mixers in the layers 0, 2$"),
        ({"palimpsa_layers": [-1, 7]}, "palimpsa_layers names -1, 7; this model has"),
        ({"palimpsa_layers": [0, 0]}, r"palimpsa_layers names a layer twice \(\[0, 0\]\); name each once"),
        ({"beta_rank": 0}, "beta_rank: 0 is less than 1"),
        ({"beta_rank": 33}, "beta_rank: 33 is more than hidden_size 32"),
        ({"beta_groups": 3}, "beta_groups: 3 does not divide head_dim 8"),
        ({"beta_scale_form": "square"}, "beta_scale_form: 'square' is none of abs, softplus"),
    ],
    ids=str,
)
def test_keys_that_the_mixers_cannot_have_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        make("bamba", **changes)


def test_what_the_host_refuses_stays_refused():
    with pytest.raises(Exception, match="mamba_n_heads must divide mamba_expand"):
        make("bamba", mamba_n_heads=7)


def test_layers_are_sorted():
    assert make("bamba", palimpsa_layers=[2, 0]).palimpsa_layers == [0, 2]


@pytest.mark.parametrize("host", ["llama", "jamba", "palimpsa_bamba"])
def test_a_model_that_is_no_host_is_refused(host):
    with pytest.raises(UsageError, match=f"'{host}': transformers .* expected one of bamba, "):
        config_class(host)


def test_a_release_without_a_host_has_the_others(monkeypatch):
    monkeypatch.setattr(configuration, "CONFIG_MAPPING", {h: CONFIG_MAPPING[h] for h in known_hosts() if h != "bamba"})
    assert known_hosts() == tuple(host for host in HOSTS if host != "bamba")
    with pytest.raises(UsageError, match=r"'bamba': transformers .* has no model of this type"):
        configuration.host_config_class("bamba")
    with pytest.raises(AttributeError):
        _ = configuration.PalimpsaBambaConfig
    assert configuration.PalimpsaZamba2Config is config_class("zamba2")
