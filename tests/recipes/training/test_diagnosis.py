"""Where numbers stop being finite."""

import pytest
import torch
from palimpsa_surgery.recipes.training.diagnosis import bad_gradients, first_bad_module

IDS = torch.arange(8).view(1, 8)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("backbone.layers.1.mixer.in_proj.weight", "backbone.layers.1.mixer.in_proj"),
        ("backbone.layers.0.mixer.out_proj.weight", "backbone.layers.0.mixer.out_proj"),
        ("backbone.layers.1.mixer.metaplasticity.beta_up.weight", "backbone.layers.1.mixer.metaplasticity.beta_up"),
        ("backbone.norm_f.weight", "backbone.norm_f"),
    ],
)
def test_the_first_module_is_named_with_its_bad_parameter(name, module, model):
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] = float("nan")
    found = first_bad_module(model, lambda: model(input_ids=IDS))
    assert found.startswith(f"{module} (")
    assert "weight is not finite" in found


def test_a_rate_that_is_not_finite_names_its_mixer(model):
    with torch.no_grad():
        model.backbone.layers[0].mixer.A_log[0] = float("nan")
    found = first_bad_module(model, lambda: model(input_ids=IDS))
    assert found.startswith("backbone.layers.0.mixer")


def test_a_finite_pass_names_nothing_and_leaves_no_hooks(model):
    assert first_bad_module(model, lambda: model(input_ids=IDS)) is None
    assert not any(module._forward_hooks for module in model.modules())


def test_hooks_are_gone_after_an_error(model):
    with pytest.raises(RuntimeError, match="stop"):
        first_bad_module(model, lambda: (_ for _ in ()).throw(RuntimeError("stop")))
    assert not any(module._forward_hooks for module in model.modules())


def test_gradients_are_named_from_the_loss_backwards(model):
    model(input_ids=IDS).logits.sum().backward()
    assert bad_gradients(model) == []
    for name in ("backbone.layers.0.norm.weight", "backbone.layers.1.norm.weight"):
        model.get_parameter(name).grad.fill_(float("inf"))
    assert bad_gradients(model) == ["backbone.layers.1.norm.weight", "backbone.layers.0.norm.weight"]
