import pytest
import torch
from palimpsa_surgery.modeling import PalimpsaMamba2ForCausalLM


@pytest.fixture
def model(tiny_config):
    torch.manual_seed(0)
    config = tiny_config(num_heads=384, head_dim=1, expand=16, beta_groups=1, hidden_size=24, beta_rank=16)
    return PalimpsaMamba2ForCausalLM(config)


def test_rates_and_steps_start_in_their_ranges(model):
    mixer = model.backbone.layers[1].mixer
    assert 1.0 <= mixer.decay_rate().min() < 2.0
    assert 15.0 < mixer.decay_rate().max() <= 16.0
    step = mixer.step_size(torch.zeros(384))
    assert 0.001 <= step.min() < 0.0015
    assert 0.07 < step.max() <= 0.1 + 1e-6
    assert torch.equal(mixer.D, torch.ones(384))


def test_new_parameters_have_the_start_of_the_paper(model):
    gate = model.backbone.layers[0].mixer.metaplasticity
    assert 0.1 <= gate.beta_scale.min() < 0.15
    assert 0.95 < gate.beta_scale.max() <= 1.0
    assert gate.beta_up.weight.abs().max() <= 16**-0.5
    assert gate.beta_up.weight.abs().max() > 0.24
    assert 0.015 < gate.beta_down.weight.std() < 0.025
    assert torch.equal(gate.prior(), torch.ones(384))


def test_the_same_seed_gives_the_same_model(tiny_config):
    def build():
        torch.manual_seed(7)
        return PalimpsaMamba2ForCausalLM(tiny_config())

    a, b = build().state_dict(), build().state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_filled_parameters_are_left_alone_when_a_neighbor_is_missing(lively_model):
    """transformers initializes a module as soon as one of its parameters was not in the checkpoint."""
    model = lively_model()
    mixer = model.backbone.layers[0].mixer
    before = {name: p.detach().clone() for name, p in mixer.named_parameters()}
    for name, parameter in mixer.named_parameters():
        parameter._is_hf_initialized = name != "D"
    model._init_weights(mixer)
    model._init_weights(mixer.metaplasticity)
    for name, parameter in mixer.named_parameters():
        assert torch.equal(parameter, before[name]) is (name != "D"), name
