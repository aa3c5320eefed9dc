"""The arms of the experiment on language, and how much of one text stands in another."""

import numpy as np
import pytest
from language_arms import (
    CONTROL,
    EARLY,
    MAIN,
    PRESETS,
    SOURCE,
    VARIANTS,
    Arm,
    chosen_arms,
    find_preset,
    lr_new_of,
    sweep,
)
from language_overlap import overlap, run_hashes
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.recipes.training.recipe import MODES, load_recipe
from palimpsa_surgery.surgery.conversion.initialization import STARTS
from palimpsa_surgery.surgery.planning.strategies import RULES

BEST = {CONTROL: 1e-3, MAIN: 3e-4}


def test_a_preset_that_does_not_exist_names_those_that_do():
    assert find_preset("cpu") is PRESETS["cpu"]
    with pytest.raises(UsageError, match="--preset tpu: there is no such preset; choose one of gpu, cpu, gpu-short"):
        find_preset("tpu")


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_control_and_main_arm_try_the_same_learning_rates(preset):
    arms = sweep(preset)
    rates = {variant: [arm.lr for arm in arms if arm.variant == variant] for variant in (CONTROL, MAIN)}
    assert rates[CONTROL] == rates[MAIN] == list(preset.lrs)
    assert len(rates[MAIN]) >= 2
    assert {arm.seed for arm in arms} == {preset.seeds[0]}


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_every_variant_runs_once_and_the_pair_with_every_seed(preset):
    arms = sweep(preset) + chosen_arms(preset, BEST)
    at_best = [arm for arm in arms if arm.lr == BEST[CONTROL if arm.variant == CONTROL else MAIN]]
    pair = {(variant, seed) for variant in (CONTROL, MAIN) for seed in preset.seeds}
    assert {(arm.variant, arm.seed) for arm in chosen_arms(preset, BEST)} | {
        (variant, preset.seeds[0]) for variant in (CONTROL, MAIN)
    } == pair | {(variant, preset.seeds[0]) for variant in VARIANTS}
    assert len({arm.name for arm in arms}) == len(arms)
    assert len(at_best) >= len(VARIANTS)


def test_the_most_telling_arms_come_first():
    order = [(arm.variant, arm.seed) for arm in chosen_arms(PRESETS["cpu"], BEST)]
    early = [(variant, 0) for variant in EARLY]
    assert order[: 4 + len(early)] == [(CONTROL, 1), (MAIN, 1), *early, (CONTROL, 2), (MAIN, 2)]
    assert {"window-paper", "strongest"} < set(EARLY)


def test_what_is_new_has_a_learning_rate_where_something_is_new():
    preset = PRESETS["cpu"]
    rates = {variant: lr_new_of(preset, Arm(variant, 1e-4, 0)) for variant in (SOURCE, *VARIANTS)}
    assert rates[SOURCE] == rates[CONTROL] == 0.0
    assert rates[MAIN] == preset.lr_new
    assert rates["window-new-only-fast"] == pytest.approx(10 * preset.lr_new)


def test_variants_name_rules_and_starts_that_exist():
    assert {variant.rule for variant in VARIANTS.values()} - {None} <= set(RULES)
    assert {variant.mode for variant in VARIANTS.values()} <= set(MODES)
    assert {variant.init for variant in VARIANTS.values()} == set(STARTS)
    assert Arm("rate", 3e-4, 2).name == "rate-lr0.0003-s2"


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_presets_are_recipes_and_their_windows_fit_the_text_asked_for(preset):
    load_recipe(preset.recipe, [f"{key}={value}" for key, value in preset.changes.items()])
    assert preset.eval_tokens % preset.eval_length == 0
    assert preset.eval_length > preset.seq_len, "loss beyond the training length is part of the question"
    assert preset.batch_size % preset.micro_batch_size == 0


def test_steps_count_whole_batches_of_the_budget_or_of_the_text():
    assert PRESETS["cpu"].steps(0) == 65536 // 1024
    assert PRESETS["gpu"].steps(1_000_000) == 1_000_000 // 65536


def slow_overlap(train, held_out, length):
    runs = {tuple(train[i : i + length]) for i in range(len(train) - length + 1)}
    covered = np.zeros(len(held_out), bool)
    for i in range(len(held_out) - length + 1):
        if tuple(held_out[i : i + length]) in runs:
            covered[i : i + length] = True
    return covered.mean()


@pytest.mark.parametrize("length", [1, 3, 7])
def test_overlap_is_that_of_a_plain_search(length):
    generator = np.random.default_rng(length)
    train, held_out = generator.integers(0, 5, 200), generator.integers(0, 5, 101)
    held_out[40:60] = train[90:110]
    assert overlap(train, held_out, length) == pytest.approx(slow_overlap(train, held_out, length))


@pytest.mark.parametrize(("train", "expected"), [(np.arange(50), 1.0), (np.arange(50) + 100, 0.0)])
def test_overlap_of_a_copy_and_of_another_text(train, expected):
    assert overlap(train.astype(np.uint16), np.arange(50, dtype=np.uint16), 13) == expected


def test_runs_longer_than_the_text_have_no_hash():
    assert len(run_hashes(np.arange(4), 5)) == 0
    assert overlap(np.arange(9), np.arange(4), 5) == 0.0
    assert len(np.unique(run_hashes(np.arange(4), 2))) == 3
