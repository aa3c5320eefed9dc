import pytest
import torch
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.mixers.states import LayerStates, take_cache
from transformers import DynamicCache


@pytest.mark.parametrize("name", ["cache", "cache_params", "past_key_values"])
def test_the_cache_goes_by_any_name(name, lively_model, ids, rel):
    model = lively_model()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for piece in ids.split([20, 17], dim=1):
            output = model(piece, **{name: cache})
        expected = model(ids).logits[:, 20:]
    assert output.cache is cache
    assert rel(output.logits, expected) < 1e-5


def test_take_cache_empties_the_arguments():
    cache = object()
    arguments = {"cache": None, "past_key_values": cache, "cache_params": cache, "other": 1}
    assert take_cache(arguments) is cache
    assert arguments == {"other": 1}
    assert take_cache({}) is None


def test_two_caches_are_refused():
    with pytest.raises(UsageError, match="two different caches were given"):
        take_cache({"cache": object(), "past_key_values": object()})


def test_a_cache_built_without_the_config_is_refused(lively_model, ids):
    with pytest.raises(UsageError, match=r"holds no recurrent state for layer 0; build it with DynamicCache\(config"):
        lively_model()(ids, cache=DynamicCache())


def test_states_are_read_and_replaced(tiny_config):
    states = LayerStates(DynamicCache(config=tiny_config()), 1)
    assert not states.filled
    conv, recurrent = torch.randn(2, 5, 3), torch.randn(2, 6, 8, 10, requires_grad=True)
    states.store(conv, recurrent)
    assert states.filled
    states.store(conv + 1, recurrent + 1)
    assert torch.equal(states.conv, conv + 1)
    assert torch.equal(states.recurrent, recurrent.detach() + 1)
    assert not states.recurrent.requires_grad


@pytest.mark.parametrize("use_cache", [None, True, False])
@pytest.mark.parametrize("training", [True, False])
def test_when_a_cache_comes_back(lively_model, ids, use_cache, training):
    model = lively_model().train(training)
    output = model(ids, use_cache=use_cache)
    wanted = use_cache if use_cache is not None else not training
    assert (output.cache is not None) is wanted


def test_a_tuple_carries_the_cache_too(lively_model, ids):
    model = lively_model()
    logits, cache = model(ids, return_dict=False)
    assert torch.equal(logits, model(ids).logits)
    assert isinstance(cache, DynamicCache)
    (alone,) = model(ids, return_dict=False, use_cache=False)
    assert torch.equal(alone, logits)
