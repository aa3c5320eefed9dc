"""`generate` of Palimpsa-D models: greedy with padding, beams, pieces of a prompt, a cache that goes on."""

import inspect

import pytest
import torch
from transformers import DynamicCache, GenerationMixin

CACHE = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "cache_params"
)
GREEDY = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None}


def padded(ids):
    batch = torch.zeros(2, 11, dtype=torch.long)
    batch[0, 8:], batch[1] = ids[0, :3], ids[1, :11]
    return batch, (batch != 0).long()


def by_hand(model, row, steps):
    """Token after token by whole forward passes without a cache."""
    for _ in range(steps):
        row = torch.cat([row, model(row[None], use_cache=False).logits[0, -1].argmax()[None]])
    return row


@torch.no_grad()
def test_a_padded_batch_equals_its_rows_alone(lively_d, ids):
    model, (batch, mask) = lively_d(), padded(ids)
    tokens = model.generate(batch, attention_mask=mask, **GREEDY)
    for i, row in enumerate((ids[0, :3], ids[1, :11])):
        expected = by_hand(model, row, 8)
        assert torch.equal(tokens[i, 11 - len(row) :], expected)
        assert torch.equal(model.generate(row[None], **GREEDY)[0], expected)


@torch.no_grad()
def test_beams_with_a_cache_equal_beams_without(lively_d, ids):
    model, (batch, mask) = lively_d(), padded(ids)
    options = {**GREEDY, "num_beams": 4, "num_return_sequences": 3, "attention_mask": mask}
    assert torch.equal(
        model.generate(batch, use_cache=True, **options), model.generate(batch, use_cache=False, **options)
    )


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 4, 11])
def test_a_prompt_in_pieces(lively_d, ids, size):
    model = lively_d()
    want = model.generate(ids[:1, :11], **GREEDY)
    assert torch.equal(model.generate(ids[:1, :11], prefill_chunk_size=size, **GREEDY), want)


@torch.no_grad()
def test_a_given_cache_goes_on(lively_d, ids):
    model = lively_d()
    want, cache = model.generate(ids[:1, :11], **GREEDY), DynamicCache(config=model.config)
    model(ids[:1, :7], cache=cache)
    assert torch.equal(model.generate(ids[:1, :11], **{CACHE: cache}, **GREEDY), want)
