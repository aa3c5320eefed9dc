"""What trains in each mode, at which rate, with which decay; and the schedule."""

import itertools

import pytest
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.recipes.training.optim import (
    decays,
    describe_selection,
    is_new,
    lr_factor,
    make_optimizer,
    parameter_groups,
    select_parameters,
    set_lr,
)
from palimpsa_surgery.recipes.training.recipe import load_recipe
from tiny import make_model


def trained(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("full", lambda name: True),
        ("new", lambda name: ".metaplasticity." in name),
        ("new+swapped", lambda name: ".layers.1." in name),
    ],
)
def test_a_mode_trains_exactly_its_parameters(mode, expected, model):
    select_parameters(model, mode, [1])
    assert trained(model) == {name for name, _ in model.named_parameters() if expected(name)}


def test_layer_numbers_are_not_prefixes():
    model = make_model(layers=[1], num_hidden_layers=11)
    select_parameters(model, "new+swapped", [1])
    assert not any(".layers.10." in name for name in trained(model))


def test_the_prior_stays_when_told_so(model):
    select_parameters(model, "full", [1], train_prior=False)
    assert not any("log_prior" in name for name in trained(model))


@pytest.mark.parametrize("mode", ["new", "new+swapped", "lora"])
def test_a_model_without_swapped_layers_is_refused(mode):
    with pytest.raises(UsageError, match=f"mode: {mode.replace('+', '.')} trains the swapped layers.*convert it first"):
        select_parameters(make_model(layers=[]), mode, [])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("backbone.layers.1.mixer.in_proj.weight", True),
        ("backbone.layers.1.mixer.in_proj.bias", False),
        ("backbone.layers.1.mixer.out_proj.weight", True),
        ("backbone.layers.1.mixer.metaplasticity.beta_down.weight", True),
        ("backbone.layers.1.mixer.metaplasticity.beta_up.weight", True),
        ("base_model.model.backbone.layers.1.mixer.in_proj.lora_A.default.weight", True),
        ("backbone.layers.1.mixer.q_proj.weight", True),
        ("backbone.layers.1.mixer.bs_proj.weight", True),
        ("backbone.layers.1.mixer.dt_proj.weight", True),
        ("backbone.layers.1.mixer.q_conv1d.weight", False),
        ("backbone.layers.1.mixer.o_norm.weight", False),
        ("backbone.layers.1.mixer.A_log", False),
        ("backbone.layers.1.mixer.D", False),
        ("backbone.layers.1.mixer.dt_bias", False),
        ("backbone.layers.1.mixer.metaplasticity.beta_scale", False),
        ("backbone.layers.1.mixer.metaplasticity.log_prior", False),
        ("backbone.layers.1.mixer.conv1d.weight", False),
        ("backbone.layers.1.mixer.norm.weight", False),
        ("backbone.layers.1.norm.weight", False),
        ("backbone.norm_f.weight", False),
        ("backbone.embeddings.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_only_projections_decay(name, expected):
    assert decays(name) is expected


def test_groups_hold_every_trained_parameter_once_with_its_rate(model):
    recipe = load_recipe({"steps": 1, "lr": 1e-4, "lr_new": 1e-2, "weight_decay": 0.3})
    groups = parameter_groups(model, recipe)
    names = [name for group in groups for name in group["names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    for group in groups:
        for name in group["names"]:
            assert group["lr"] == (1e-2 if is_new(name) else 1e-4)
            assert group["weight_decay"] == (0.3 if decays(name) else 0.0)


def test_nothing_to_train_is_refused(model):
    model.requires_grad_(False)
    with pytest.raises(UsageError, match="leaves nothing to train"):
        parameter_groups(model, load_recipe({"steps": 1}))


def test_the_selection_counts_every_parameter(model):
    select_parameters(model, "new", [1])
    selection = describe_selection(model, load_recipe({"steps": 1, "mode": "new"}))
    assert selection.trained + selection.frozen == sum(p.numel() for p in model.parameters())
    assert set(selection.groups) == {"new", "new, no decay"}


def test_cosine_warms_up_falls_and_ends_at_its_floor():
    recipe = load_recipe({"steps": 11, "warmup": 2, "min_lr_ratio": 0.1})
    factors = [lr_factor(step, recipe) for step in range(11)]
    assert factors[:3] == [0.5, 1.0, 1.0]
    assert all(a > b for a, b in itertools.pairwise(factors[2:]))
    assert factors[6] == pytest.approx(0.55, abs=1e-9)
    assert factors[-1] == pytest.approx(0.1)


def test_constant_stays():
    recipe = load_recipe({"steps": 5, "warmup": 0, "schedule": "constant"})
    assert [lr_factor(step, recipe) for step in range(5)] == [1.0] * 5


def test_the_schedule_scales_every_group(model):
    recipe = load_recipe({"steps": 10, "warmup": 4, "lr": 1e-3, "lr_new": 1e-2})
    optimizer = make_optimizer(model, recipe)
    rates = set_lr(optimizer, 1, recipe)
    assert rates["source"] == pytest.approx(5e-4)
    assert rates["new"] == pytest.approx(5e-3)
    assert {group["name"]: group["lr"] for group in optimizer.param_groups} == rates
