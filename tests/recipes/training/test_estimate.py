"""Estimates count what is really there, and move in the right direction."""

import pytest
from palimpsa_surgery.recipes.training.estimate import estimate, estimate_rows
from palimpsa_surgery.recipes.training.modes import prepare_mode
from palimpsa_surgery.recipes.training.recipe import load_recipe
from palimpsa_surgery.surgery.checkpoint.checkpoint import open_checkpoint
from palimpsa_surgery.surgery.checkpoint.loading import load_model
from tiny import make_model, save_folder


def recipe_of(**changes):
    return load_recipe({"steps": 4, "batch_size": 2, "data": {"seq_len": 32}, "lora": {"rank": 3}, **changes})


@pytest.mark.parametrize("mode", ["full", "new", "new+swapped", "lora"])
def test_parameters_are_those_that_train(mode, model_folder):
    if mode == "lora":
        pytest.importorskip("peft")
    checkpoint, recipe = open_checkpoint(model_folder), recipe_of(mode=mode)
    expected = estimate(checkpoint, recipe)
    model = prepare_mode(load_model(checkpoint), checkpoint, recipe)
    assert expected.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    source = sum(p.numel() for p in load_model(checkpoint).parameters())
    if mode == "lora":
        assert expected.frozen == source - sum(p.numel() for n, p in model.named_parameters() if "modules_to_save" in n)
    else:
        assert expected.trained + expected.frozen == source


def test_a_source_is_estimated_as_it_will_be(model_folder, tmp_path):
    source = open_checkpoint(save_folder(make_model(layers=[]), tmp_path / "source"))
    assert estimate(source, recipe_of(), layers=[1]) == estimate(open_checkpoint(model_folder), recipe_of())


def test_work_follows_the_recipe(model_folder):
    checkpoint = open_checkpoint(model_folder)
    plain = estimate(checkpoint, recipe_of())
    assert plain.tokens == 4 * 2 * 32
    assert plain.flops == 6 * plain.trained * plain.tokens
    assert plain.seconds(1e9) == pytest.approx(plain.flops / 1e9)
    assert estimate(checkpoint, recipe_of(gradient_checkpointing=True)).flops == pytest.approx(plain.flops * 8 / 6)
    stages = {"seq_len": 32, "curriculum": [{"until": 0.5, "seq_len": 16}]}
    assert estimate(checkpoint, recipe_of(data=stages)).tokens == 2 * 2 * 16 + 2 * 2 * 32


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"mode": "new"}, {"mode": "full"}),
        ({"mode": "qlora", "precision": "bf16"}, {"mode": "lora", "precision": "bf16"}),
        ({"gradient_checkpointing": True, "data": {"seq_len": 4096}}, {"data": {"seq_len": 4096}}),
        ({"micro_batch_size": 1}, {"micro_batch_size": 2}),
    ],
)
def test_memory_moves_in_the_right_direction(less, more, model_folder):
    checkpoint = open_checkpoint(model_folder)
    assert estimate(checkpoint, recipe_of(**less)).bytes < estimate(checkpoint, recipe_of(**more)).bytes


def test_the_table_has_a_row_for_each_usual_mode(model_folder):
    rows = estimate_rows(open_checkpoint(model_folder), [0, 1])
    assert [row[0] for row in rows] == ["full", "new+swapped", "lora"]
    assert all("B" in row[2] for row in rows)
