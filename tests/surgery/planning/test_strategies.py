"""Rules that choose layers: order, ties, swapped layers, counts."""

import pytest
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.surgery.measure.profile import LayerProfile, Profile
from palimpsa_surgery.surgery.planning.strategies import RULES, choose_layers

WINDOWS = [5.0, 50.0, 20.0, 50.0, 1.5]
RATES = [0.3, 0.5, 0.1, 0.01, 0.3]


def profile(windows=WINDOWS, rates=RATES, swapped=()):
    layers = [
        LayerProfile(layer=i, swapped=i in swapped, rate=rate, window=window, head_rate=[rate], head_window=[window])
        for i, (window, rate) in enumerate(zip(windows, rates, strict=True))
    ]
    return Profile(method="measured", source="tiny", fingerprint="00", tokens=9, seq_len=9, layers=layers)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("window", (1, 3, 2, 0)),
        ("rate", (3, 2, 0, 4)),
        ("strongest", (4, 0, 2, 1)),
        ("all", (0, 1, 2, 3, 4)),
    ],
)
def test_rules_rank_by_their_figure_and_break_ties_by_index(rule, expected):
    choice = choose_layers(profile(), 4, rule)
    assert choice.layers == expected
    assert choice.rule == rule
    assert set(choice.reasons) == set(expected)


def test_equal_figures_everywhere_give_the_first_layers():
    same = profile([3.0] * 5, [0.2] * 5)
    for rule in ("window", "rate", "strongest"):
        assert choose_layers(same, 3, rule).layers == (0, 1, 2)


def test_random_depends_on_the_seed_alone():
    first = choose_layers(profile(), 3, "random", seed=5)
    assert choose_layers(profile(), 3, "random", seed=5) == first
    assert choose_layers(profile(list(reversed(WINDOWS))), 3, "random", seed=5).layers == first.layers
    assert len({choose_layers(profile(), 3, "random", seed=seed).layers for seed in range(20)}) > 5


@pytest.mark.parametrize("rule", sorted(RULES))
def test_swapped_layers_are_never_chosen(rule):
    choice = choose_layers(profile(swapped=(1, 4)), 3, rule, seed=1)
    assert sorted(choice.layers) == [0, 2, 3]


@pytest.mark.parametrize(
    ("count", "swapped", "message"),
    [
        (6, (), r"--layers 6: the model has 5 layers to choose from$"),
        (0, (), r"--layers 0: the model has 5 layers"),
        (4, (0, 1), r"--layers 4: the model has 3 layers to choose from \(2 of 5 are swapped already\)"),
    ],
)
def test_a_count_that_the_model_cannot_give_is_refused(count, swapped, message):
    with pytest.raises(UsageError, match=message):
        choose_layers(profile(swapped=swapped), count)


def test_all_without_a_layer_left_is_refused():
    with pytest.raises(UsageError, match="0 layers to choose from"):
        choose_layers(profile(swapped=range(5)), 1, "all")


def test_an_unknown_rule_lists_the_rules():
    with pytest.raises(UsageError, match="--rule windows: there is no such rule; did you mean window"):
        choose_layers(profile(), 1, "windows")


def test_reasons_name_figure_and_rank():
    reasons = choose_layers(profile(), 3, "window").reasons
    assert reasons[1] == "window 50 tokens, 1 of 5 by window"
    assert reasons[2] == "window 20 tokens, 3 of 5 by window"
    assert choose_layers(profile(), 1, "rate").reasons == {3: "rate 0.01 nats per token, 1 of 5 by rate"}
