"""plan.yaml and the option --layers: every mistake of a hand that edits is named."""

from types import SimpleNamespace

import pytest
import yaml
from palimpsa_surgery.base.errors import SchemaError, UsageError
from palimpsa_surgery.surgery.families.mamba2 import MAMBA2
from palimpsa_surgery.surgery.measure.profile import LayerProfile, Profile
from palimpsa_surgery.surgery.planning.plan import (
    DEFAULT_STRENGTH,
    Plan,
    make_plan,
    parse_layers,
    read_plan,
    write_plan,
)

FINGERPRINT = "ab" * 32


def checkpoint(fingerprint=FINGERPRINT, **keys):
    """As much of a checkpoint as a plan asks for."""
    config = MAMBA2.config("", {"num_hidden_layers": 6, "hidden_size": 64, "num_heads": 1, "head_dim": 8, **keys})
    return SimpleNamespace(
        source_id="tiny",
        family=MAMBA2,
        fingerprint=fingerprint,
        matches=fingerprint.__eq__,
        config=config,
        sites=MAMBA2.sites(config),
        num_layers=config.num_hidden_layers,
        palimpsa_layers=config.palimpsa_layers,
    )


def profile(windows=(5, 9, 3, 7, 1, 2), swapped=(), fingerprint=FINGERPRINT):
    layers = [
        LayerProfile(layer=i, swapped=i in swapped, rate=1 / w, window=w, head_rate=[1 / w], head_window=[w])
        for i, w in enumerate(windows)
    ]
    return Profile(method="measured", source="tiny", fingerprint=fingerprint, tokens=9, seq_len=9, layers=layers)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8", 8), ("1", 1), ("8,", (8,)), ("0,", (0,)), ("4,8,11", (4, 8, 11)), (" 11 , 4 ", (11, 4))],
)
def test_layers_are_a_count_or_a_list(text, expected):
    assert parse_layers(text) == expected


@pytest.mark.parametrize("text", ["", ",", "4,,8", "a", "-1", "4,-1", "1.5", "4;8", "٣", "²"])
def test_what_is_no_count_and_no_list_is_refused(text):
    with pytest.raises(UsageError, match="expected a count such as 8, or a list such as 4,8,11"):
        parse_layers(text)


def test_zero_and_duplicates_are_refused():
    with pytest.raises(UsageError, match=r"--layers 0: the count must be at least 1 \(layer 0 alone is written 0,\)"):
        parse_layers("0")
    with pytest.raises(UsageError, match="layer 8 is listed twice"):
        parse_layers("8,4,8")


def test_a_count_takes_the_weakest_forgetting_layers_and_says_why():
    plan = make_plan(checkpoint(), profile(), layers=3)
    assert plan.layers == (0, 1, 3)
    assert plan.rule == "window"
    assert plan.reasons[1] == "window 9 tokens, 1 of 6 by window"
    assert (plan.init, plan.strength, plan.beta_rank, plan.beta_groups) == ("identity", None, 4, 8)
    assert plan.beta_scale_form == "abs"


def test_a_list_needs_no_profile():
    plan = make_plan(checkpoint(), layers=(4, 2))
    assert (plan.rule, plan.layers) == ("explicit", (2, 4))
    assert plan.reasons == {2: "asked for", 4: "asked for"}
    assert make_plan(checkpoint(), profile(), layers=(4,)).reasons == {4: "asked for, window 1 tokens"}


def test_a_count_without_a_profile_is_refused():
    with pytest.raises(UsageError, match="a count needs a profile"):
        make_plan(checkpoint(), layers=3)


@pytest.mark.parametrize(
    ("init", "form", "strength"), [("identity", "abs", None), ("paper", "softplus", None), ("calibrated", "abs", 0.1)]
)
def test_each_start_has_its_defaults(init, form, strength):
    plan = make_plan(checkpoint(), layers=(0,), init=init)
    assert (plan.beta_scale_form, plan.strength) == (form, strength)
    assert DEFAULT_STRENGTH == 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": (6,)}, "^--layers: layer 6: the model has 6 layers, 0 to 5$"),
        ({"layers": (1, 1)}, "^--layers: layer 1 is listed twice"),
        ({"layers": (-1,)}, "^--layers: is -1, expected greater than or equal to 0"),
        ({"init": "identty"}, "^--init: is 'identty', expected 'identity', 'calibrated' or 'paper'"),
        ({"init": "paper", "strength": 0.3}, "^--strength: belongs to init calibrated, not to paper; leave it out"),
        ({"strength": 0.3}, "^--strength: belongs to init calibrated, not to identity"),
        ({"init": "calibrated", "strength": -1.0}, "^--strength: is -1.0"),
        ({"init": "calibrated", "strength": float("nan")}, "^--strength: is nan"),
        ({"beta_scale_form": "softplus"}, "^plan:beta_scale_form: is softplus, but init identity needs abs"),
        ({"beta_scale_form": "relu"}, "^plan:beta_scale_form: is 'relu'"),
        ({"beta_rank": 0}, "^--beta-rank: is 0"),
        ({"beta_rank": 65}, "^--beta-rank: 65 is more than hidden_size 64; choose a smaller rank$"),
        ({"beta_groups": 0}, "^--beta-groups: is 0"),
        ({"beta_groups": 3}, "^--beta-groups: 3 does not divide head_dim 8; choose a divisor$"),
        ({"seed": -1}, "^--seed: is -1"),
        ({"seed": 2**63}, "^--seed: is 9223372036854775808"),
        ({"beta_rank": 0, "seed": -1}, "^--beta-rank: is 0, .*; --seed: is -1"),
    ],
)
def test_options_that_cannot_be_carried_out_are_refused_by_name(options, message):
    with pytest.raises(UsageError, match=message):
        make_plan(checkpoint(), **{"layers": (0,), **options})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": (6,)}, r"^mine\.yaml:layers: layer 6: the model has 6 layers, 0 to 5$"),
        ({"beta_groups": 3}, r"^mine\.yaml:beta_groups: 3 does not divide head_dim 8; choose a divisor$"),
        ({"beta_rank": 65}, r"^mine\.yaml:beta_rank: 65 is more than hidden_size 64; choose a smaller rank$"),
    ],
)
def test_sizes_in_a_file_that_do_not_fit_the_model_name_file_and_key(change, message):
    plan = make_plan(checkpoint(), layers=(0,)).model_copy(update=change)
    with pytest.raises(SchemaError, match=message):
        plan.check_source(checkpoint(), "mine.yaml")


def test_a_profile_of_another_checkpoint_is_refused():
    with pytest.raises(SchemaError, match="profile was measured on tiny"):
        make_plan(checkpoint(), profile(fingerprint="cd" * 32), layers=2)


CONVERTED = {
    "palimpsa_layers": [1, 3],
    "beta_rank": 2,
    "beta_groups": 4,
    "beta_scale_form": "abs",
    "train_prior": False,
}


def test_a_converted_source_lends_its_sizes_and_keeps_its_layers():
    plan = make_plan(checkpoint(**CONVERTED), profile(swapped=(1, 3)), layers=2)
    assert plan.layers == (0, 2)
    assert (plan.beta_rank, plan.beta_groups, plan.train_prior) == (2, 4, False)


def test_swapping_a_swapped_layer_says_so():
    with pytest.raises(UsageError, match=r"^--layers: layer 3: is Palimpsa-M already \(swapped: 1, 3\)"):
        make_plan(checkpoint(**CONVERTED), layers=(2, 3))


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [("beta_rank", 3, "--beta-rank"), ("beta_groups", 8, "--beta-groups"), ("train_prior", True, "plan:train_prior")],
)
def test_one_model_has_one_shape_of_gate(key, value, named):
    with pytest.raises(UsageError, match=f"^{named}: {value} differs from .*keep theirs"):
        make_plan(checkpoint(**CONVERTED), layers=(0,), **{key: value})
    plan = make_plan(checkpoint(**CONVERTED), layers=(0,)).model_copy(update={key: value})
    with pytest.raises(SchemaError, match=f"^plan.yaml:{key}: {value} differs from .*keep theirs"):
        plan.check_source(checkpoint(**CONVERTED))


def test_a_written_plan_reads_back_the_same_and_explains_itself(tmp_path):
    plan = make_plan(checkpoint(), profile(), layers=3, init="calibrated", strength=0.25, seed=7)
    write_plan(plan, tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text()
    assert read_plan(tmp_path / "plan.yaml") == plan
    assert text.startswith("# Which layers of tiny are swapped")
    assert "layers: [0, 1, 3]" in text
    assert all(f"{key}" in text.split("schema_version")[0] for key in ("layers", "rule", "init", "strength", "seed"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": [1]}, r"plan\.yaml:layer: there is no such key; did you mean layers\?"),
        ({"beta_rnk": 4}, r"plan\.yaml:beta_rnk: .*did you mean beta_rank\?"),
        ({"layers": []}, r"plan\.yaml:layers: is \[\], expected at least 1 entry in it"),
        ({"layers": 3}, r"plan\.yaml:layers: is 3, expected a list"),
        ({"layers": [3, 3]}, r"plan\.yaml:layers: layer 3 is listed twice"),
        ({"layers": [-1]}, r"plan\.yaml:layers\.0: is -1"),
        ({"layers": ["a"]}, r"plan\.yaml:layers\.0: is 'a'"),
        ({"seed": True}, r"plan\.yaml:seed: is True, expected a valid integer"),
        ({"train_prior": 1}, r"plan\.yaml:train_prior: is 1, expected a valid boolean"),
        ({"beta_rank": "4"}, r"plan\.yaml:beta_rank: is '4', expected a valid integer"),
        ({"layers": [True]}, r"plan\.yaml:layers\.0: is True, expected a valid integer"),
        ({"init": "calibrated", "strength": True}, r"plan\.yaml:strength: is True, expected a valid number"),
        ({"rule": "windw"}, r"plan\.yaml:rule: no such rule 'windw'; choose one of window"),
        ({"init": "calibrated"}, r"plan\.yaml:strength: is missing; init calibrated needs it, for example 0\.1"),
        ({"beta_scale_form": "relu"}, r"plan\.yaml:beta_scale_form: is 'relu', expected 'abs' or 'softplus'"),
        ({"train_prior": 7}, r"plan\.yaml:train_prior: is 7"),
        ({"schema_version": 2}, "newer than the 1"),
        ({"source": None}, r"plan\.yaml:source: is None"),
    ],
)
def test_a_mistake_of_the_hand_is_named_with_file_and_key(tmp_path, change, message):
    path = tmp_path / "plan.yaml"
    write_plan(make_plan(checkpoint(), layers=(0, 1)), path)
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **change}))
    with pytest.raises(SchemaError, match=message):
        read_plan(path)


def test_layers_edited_by_hand_are_sorted_and_stale_reasons_go(tmp_path):
    path = tmp_path / "plan.yaml"
    write_plan(make_plan(checkpoint(), profile(), layers=2), path)
    path.write_text(path.read_text().replace("layers: [1, 3]", "layers: [5, 1]"))
    plan = read_plan(path)
    assert plan.layers == (1, 5)
    assert set(plan.reasons) == {1}
    write_plan(plan, path)
    assert read_plan(path) == plan


def test_a_plan_for_another_checkpoint_is_refused():
    plan = make_plan(checkpoint(), layers=(0,))
    with pytest.raises(SchemaError, match=r"plan\.yaml:fingerprint: the plan was made for tiny \(abab"):
        plan.check_source(checkpoint(fingerprint="cd" * 32))


def test_an_identity_plan_with_softplus_is_refused():
    with pytest.raises(ValueError, match="init identity needs abs"):
        Plan(source="s", fingerprint="f", layers=(0,), beta_rank=1, beta_groups=1, beta_scale_form="softplus")
