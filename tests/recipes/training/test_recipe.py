"""Recipes: what is refused, what is suggested, what an override changes."""

import pytest
import yaml
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.recipes.training.recipe import (
    Recipe,
    dump_recipe,
    find_recipe,
    load_recipe,
    shipped_recipes,
    without_effect,
)


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_shipped_recipes_are_valid_and_open_with_their_launch_line(name):
    recipe = load_recipe(name)
    assert recipe.total_steps() > 0
    text = find_recipe(name).read_text()
    comments = text[: text.index("schema_version")]
    assert f"--recipe {name}" in comments
    assert "Memory" in comments
    assert "minute" in comments or "hour" in comments


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_shipped_recipes_say_what_each_switch_does(name):
    lines = find_recipe(name).read_text().splitlines()
    for line in lines[lines.index("schema_version: 1") + 1 :]:
        if ":" in line and not line.rstrip().endswith(":") and not line.startswith("description"):
            assert "#" in line, f"{name}: {line}"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 1, "learning_rat": 1}, "learning_rat: there is no such key"),
        ({"steps": 1, "lr_neu": 1}, "did you mean lr_new"),
        ({"steps": 1, "data": {"seq_length": 8}}, "data.seq_length: there is no such key; did you mean seq_len"),
        ({"steps": 1, "lora": {"rnk": 8}}, "lora.rnk: there is no such key; did you mean rank"),
        ({"steps": 1, "precision": "fp16"}, "fp16 overflows .* take bf16"),
        ({"steps": 1, "mode": "some"}, "mode: is 'some', expected 'full'"),
        ({}, "exactly one of `steps` and `tokens`"),
        ({"steps": 1, "tokens": 10}, "exactly one of `steps` and `tokens`"),
        ({"steps": 1, "batch_size": 6, "micro_batch_size": 4}, r"batch_size \(6\) must be a multiple"),
        ({"steps": 1, "warmup": 1.5}, "fraction of the steps below 1"),
        ({"steps": 1, "betas": [0.9, 1.0]}, r"betas: both numbers must lie in \[0, 1\)"),
        ({"steps": 1, "lr": float("nan")}, "lr: is nan, expected"),
        ({"steps": 1, "data": {"curriculum": [{"until": 0.5, "seq_len": 8}, {"until": 0.5, "seq_len": 9}]}}, "until"),
        ({"steps": 1, "schema_version": 9}, "newer than the 1"),
    ],
)
def test_each_fault_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(values)


def test_all_faults_are_reported_at_once(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("schema_version: 1\nsteps: -1\nlrr: 1\ndata: {packing: loose}\n")
    with pytest.raises(UsageError) as caught:
        load_recipe(file, ["nonsense", "clip=-1"])
    for part in (
        "mine.yaml:steps",
        "mine.yaml:lrr",
        "mine.yaml:data.packing",
        "'nonsense': expected key=value",
        "clip",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("lr=1e-4", {"lr": 1e-4}),
        ("precision=no", {"precision": "no"}),
        ("clip=null", {"clip": None}),
        ("tokens=1e6", {"tokens": 1_000_000, "steps": None}),
        ("steps=7", {"steps": 7}),
        ("lora.targets=[in_proj]", {"lora.targets": ["in_proj"]}),
        ("data.train=[a.txt, b.txt]", {"data.train": ["a.txt", "b.txt"]}),
        ("data.seq_len=64", {"data.seq_len": 64}),
    ],
)
def test_overrides_change_one_key(override, expected):
    recipe = load_recipe({"steps": 3}, [override])
    for key, value in expected.items():
        found = recipe
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_no_generator_takes_is_refused_before_the_run(seed):
    with pytest.raises(UsageError, match="seed"):
        load_recipe({"steps": 3}, [f"seed={seed}"])
    assert load_recipe({"steps": 3}, [f"seed={2**32 - 1}"]).seed == 2**32 - 1


def test_overrides_do_not_change_the_mapping_they_were_given():
    values = {"steps": 3, "data": {"seq_len": 8}}
    load_recipe(values, ["data.seq_len=16"])
    assert values == {"steps": 3, "data": {"seq_len": 8}}


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean tiny_cpu"):
        load_recipe("tiny_cpuu")


def test_a_recipe_survives_writing_and_reading():
    recipe = load_recipe({"steps": 3, "data": {"train": "x.txt", "curriculum": [{"until": 0.5, "seq_len": 8}]}})
    assert Recipe.model_validate(yaml.safe_load(dump_recipe(recipe))) == recipe


def test_the_curriculum_sets_the_length_and_the_number_of_steps():
    stages = [{"until": 0.25, "seq_len": 8}, {"until": 0.5, "seq_len": 16}]
    recipe = load_recipe({"steps": 8, "data": {"seq_len": 32, "curriculum": stages}})
    assert [recipe.data.seq_len_at(step, 8) for step in range(8)] == [8, 8, 16, 16, 32, 32, 32, 32]
    by_tokens = load_recipe({"tokens": 8 * 22 * 4, "batch_size": 4, "data": {"seq_len": 32, "curriculum": stages}})
    assert by_tokens.total_steps() == 8


@pytest.mark.parametrize(("warmup", "steps"), [(0, 0), (5, 5), (0.1, 10), (20, 20), (1, 1), (1.0, 1), (2.0, 2)])
def test_warmup_counts_steps_or_a_fraction(warmup, steps):
    assert load_recipe({"steps": 100, "warmup": warmup}).warmup_steps() == steps


@pytest.mark.parametrize("value", ["2024-99-99", "1" * 5000, "[" * 100_000, "{"])
def test_a_value_that_yaml_cannot_read_is_an_override_to_quote(value):
    with pytest.raises(UsageError, match=r"override .*: the value .* is not YAML; quote it"):
        load_recipe("tiny_cpu", [f"description={value}"])


@pytest.mark.parametrize(
    ("values", "overrides", "swapped", "unused"),
    [
        ({"lora": {"rank": 4}}, [], True, ["lora.rank (mode is full)"]),
        ({}, ["lora.rank=16"], True, ["lora.rank (mode is full)"]),
        ({"mode": "lora", "lora": {"rank": 4}}, ["lora.alpha=8"], True, []),
        ({"lora": {"rank": 16}}, ["mode=new", "lr=1e-4"], True, ["lr (mode is new, which trains by lr_new)"]),
        ({}, ["lr_new=1e-4"], False, ["lr_new (no layer is swapped)"]),
        ({"schedule": "constant"}, ["min_lr_ratio=0.5"], True, ["min_lr_ratio (schedule is constant)"]),
        ({}, ["keep=3"], True, ["keep (save_every is 0)"]),
        ({"save_every": 1}, ["keep=3", "lr=1e-4", "lr_new=1e-4"], True, []),
        ({}, ["data.val=x.txt", "data.val_fraction=0.1"], True, ["data.val_fraction (data.val is given)"]),
        ({}, ["data.val_fraction=0", "eval_every=2"], True, ["eval_every (no text is held out)"]),
    ],
)
def test_what_is_asked_for_and_has_no_effect_is_named(values, overrides, swapped, unused):
    recipe = load_recipe({"steps": 3, **values}, overrides)
    assert without_effect(recipe, overrides, swapped=swapped) == unused
