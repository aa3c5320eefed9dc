import pickle

import torch
from palimpsa_surgery.modeling.palimpsa_mamba2.outputs import (
    CACHE_FIELD,
    PalimpsaMamba2CausalLMOutput,
    PalimpsaMamba2Output,
)


def test_the_cache_has_one_name_in_every_release():
    cache = object()
    for kind in (PalimpsaMamba2Output, PalimpsaMamba2CausalLMOutput):
        output = kind(**{CACHE_FIELD: cache})
        assert output.cache is cache
        assert output[CACHE_FIELD] is cache
        assert kind().cache is None


def test_what_is_none_is_left_out_of_the_tuple():
    logits = torch.ones(1)
    assert PalimpsaMamba2CausalLMOutput(logits=logits).to_tuple() == (logits,)
    assert list(PalimpsaMamba2CausalLMOutput(loss=logits, logits=logits)) == ["loss", "logits"]


def test_outputs_travel_between_processes():
    output = pickle.loads(pickle.dumps(PalimpsaMamba2CausalLMOutput(logits=torch.arange(3))))
    assert torch.equal(output.logits, torch.arange(3))
