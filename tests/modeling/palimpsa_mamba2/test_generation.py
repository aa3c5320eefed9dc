"""`generate` with the native cache: greedy, sampling, beams, batches with left padding, chunked prefill."""

import inspect

import pytest
import torch
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.mixers.states import tokens_read
from tiny import HYBRID
from transformers import DynamicCache, GenerationMixin, StaticCache

CACHE = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "cache_params"
)
# `generate` of 5.17 makes a cache of its own beside one that is given as past_key_values, which the model refuses.
GIVEN = [CACHE, "past_key_values"] if CACHE == "cache" else [CACHE]
GREEDY = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None}


SHAPES = {"g": {}, "g2": {"n_groups": 1, "beta_groups": 2}, "plain": {"palimpsa_layers": []}, "hybrid": HYBRID}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def model(request, lively_model):
    return lively_model(**request.param)


def greedy_by_hand(model, row, steps):
    """Token after token by whole forward passes without a cache."""
    for _ in range(steps):
        logits = model(row[None], use_cache=False).logits[0, -1]
        row = torch.cat([row, logits.argmax()[None]])
    return row


@torch.no_grad()
def test_greedy_batch_of_lengths_3_and_11_equals_one_by_one(model, ids):
    rows = [ids[0, :3], ids[1, :11]]
    batch = torch.zeros(2, 11, dtype=torch.long)
    batch[0, 8:], batch[1] = rows[0], rows[1]
    mask = (batch != 0).long()
    tokens = model.generate(batch, attention_mask=mask, **GREEDY)
    for i, row in enumerate(rows):
        expected = greedy_by_hand(model, row, 8)
        assert torch.equal(tokens[i, 11 - len(row) :], expected)
        assert torch.equal(model.generate(row[None], **GREEDY)[0], expected)


@torch.no_grad()
def test_beams_with_a_cache_equal_beams_without(model, ids):
    # Beams swap places on the way, so a state that is not reordered changes the tokens.
    batch = torch.zeros(2, 11, dtype=torch.long)
    batch[0, 8:], batch[1] = ids[0, :3], ids[1, :11]
    options = {**GREEDY, "num_beams": 4, "num_return_sequences": 3, "attention_mask": (batch != 0).long()}
    assert torch.equal(
        model.generate(batch, use_cache=True, **options), model.generate(batch, use_cache=False, **options)
    )


def test_reordering_a_cache_moves_every_state(model, ids, rel):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :9], cache=cache)
        cache.reorder_cache(torch.tensor([1, 1]))
        logits = model(ids[1:, 9:10].expand(2, -1), cache=cache).logits
        expected = model(ids[1:, :10]).logits[0, -1]
    assert rel(logits[0, 0], expected) < 1e-5
    assert rel(logits[1, 0], expected) < 1e-5


def test_cache_holds_one_recurrent_tensor_a_layer(lively_model, ids):
    model = lively_model(beta_groups=2)
    cache = DynamicCache(config=model.config)
    model(ids, cache=cache)
    assert [tuple(layer.recurrent_states[0].shape) for layer in cache.layers] == [
        (2, 6, 8 + 2, 10),
        (2, 6, 8, 10),
        (2, 6, 8 + 2, 10),
    ]
    assert {layer.recurrent_states[0].dtype for layer in cache.layers} == {torch.float32}
    assert {tuple(layer.conv_states[0].shape) for layer in cache.layers} == {(2, 48 + 2 * 20, 3)}


def test_importance_starts_at_the_prior_in_a_fresh_cache(lively_model, ids, rel):
    model = lively_model()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        expected = model(ids, cache=cache).logits
        cache.reset()
        assert cache.layers[0].recurrent_states[0].abs().max() == 0
        assert rel(model(ids, cache=cache).logits, expected) < 1e-6


@torch.no_grad()
def test_sampling_is_the_same_with_and_without_a_cache(model, ids):
    options = {"do_sample": True, "top_k": 5, "max_new_tokens": 8, "eos_token_id": None}
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        drawn.append(model.generate(ids[:, :6], use_cache=use_cache, **options))
    assert torch.equal(*drawn)


@torch.no_grad()
def test_states_are_fp32_in_a_bf16_model(lively_model, ids):
    model = lively_model().to(torch.bfloat16)
    cache = DynamicCache(config=model.config)
    model(ids, cache=cache)
    model(ids[:, :1], cache=cache)
    assert {layer.recurrent_states[0].dtype for layer in cache.layers} == {torch.float32}
    assert model.generate(ids[:, :5], **GREEDY).shape == (2, 13)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 3, 4, 64])
def test_chunked_prefill_of_a_left_padded_batch(model, ids, chunk):
    batch = torch.zeros(2, 11, dtype=torch.long)
    batch[0, 8:], batch[1] = ids[0, :3], ids[1, :11]
    options = {**GREEDY, "attention_mask": (batch != 0).long()}
    expected = model.generate(batch, **options)
    assert torch.equal(model.generate(batch, prefill_chunk_size=chunk, **options), expected)
    del options["attention_mask"]
    expected = model.generate(ids[:, :11], **options)
    assert torch.equal(model.generate(ids[:, :11], prefill_chunk_size=chunk, **options), expected)


@torch.no_grad()
def test_going_on_from_the_cache_of_an_earlier_call(model, ids):
    whole = model.generate(ids[:, :7], **{**GREEDY, "max_new_tokens": 9})
    first = model.generate(ids[:, :7], return_dict_in_generate=True, **{**GREEDY, "max_new_tokens": 4})
    cache = first["cache" if CACHE == "cache" else "past_key_values"]
    # The last token drawn has not been read yet. It may be the padding token, so the mask is said.
    new, mask = first.sequences[:, -1:], torch.ones_like(first.sequences)
    rest = model.generate(new, attention_mask=mask, **{CACHE: cache}, **{**GREEDY, "max_new_tokens": 5})
    assert torch.equal(torch.cat([first.sequences[:, :-1], rest], 1), whole)


@torch.no_grad()
def test_static_cache_gives_the_same_tokens(model, ids):
    expected = model.generate(ids[:, :5], **GREEDY)
    assert torch.equal(model.generate(ids[:, :5], cache_implementation="static", **GREEDY), expected)
    assert StaticCache(config=model.config, max_cache_len=64).layers[0].recurrent_states == {0: None}


@torch.no_grad()
def test_generating_from_embeddings(model, ids):
    tokens = model.generate(inputs_embeds=model.get_input_embeddings()(ids[:, :5]), **GREEDY)
    assert torch.equal(tokens, model.generate(ids[:, :5], **GREEDY)[:, 5:])


@torch.no_grad()
def test_prepared_inputs_carry_one_cache_and_no_mask_while_decoding(lively_model, ids):
    model = lively_model()
    cache = DynamicCache(config=model.config)
    mask = torch.ones_like(ids)
    first = model.prepare_inputs_for_generation(
        ids, **{CACHE: cache}, attention_mask=mask, use_cache=True, is_first_iteration=True
    )
    assert first["cache"] is cache
    assert torch.equal(first["attention_mask"], mask)
    later = model.prepare_inputs_for_generation(ids, 1, **{CACHE: cache}, attention_mask=mask, use_cache=True)
    assert later["input_ids"].shape == (2, 1)
    assert "attention_mask" not in later


def test_assisted_generation_is_refused(lively_model, ids):
    model = lively_model()
    with pytest.raises(ValueError, match="not supported with stateful models"):
        model.generate(ids[:1, :5], assistant_model=lively_model(seed=1), **GREEDY)


def padded(ids):
    """Rows of 3 and 11 tokens, and their mask."""
    batch = torch.zeros(2, 11, dtype=torch.long)
    batch[0, 8:], batch[1] = ids[0, :3], ids[1, :11]
    return batch, (batch != 0).long()


@torch.no_grad()
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("new_alone", [False, True])
@pytest.mark.parametrize("name", GIVEN)
def test_a_given_cache_reads_only_what_it_has_not_read(model, ids, name, new_alone, chunk):
    """As in a chat: the answer, then more text, then an answer to the whole."""
    batch, mask = padded(ids)
    first = model.generate(batch, attention_mask=mask, return_dict_in_generate=True, **GREEDY)
    cache = getattr(first, CACHE, None) or first.past_key_values
    whole = torch.cat([first.sequences, ids[:, 20:25]], 1)
    mask = torch.cat([mask, torch.ones(2, 13, dtype=torch.long)], 1)
    expected = model.generate(whole, attention_mask=mask, **GREEDY)[:, -8:]
    given = whole[:, 18:] if new_alone else whole  # the last token of an answer was never read
    found = model.generate(given, attention_mask=mask, **{name: cache}, prefill_chunk_size=chunk, **GREEDY)
    assert torch.equal(found[:, -8:], expected)


@torch.no_grad()
def test_a_text_that_does_not_begin_with_what_the_cache_has_read_is_refused(model, ids):
    cache = DynamicCache(config=model.config)
    model(ids[:, 1:9], cache=cache)
    with pytest.raises(
        UsageError, match=r"has read 8 tokens, and the 37 that are given do not begin with them; give the"
    ):
        model.generate(ids, **{GIVEN[0]: cache}, **GREEDY)
    cache.reset()
    assert torch.equal(model.generate(ids, **{GIVEN[0]: cache}, **GREEDY), model.generate(ids, **GREEDY))


@torch.no_grad()
def test_what_a_cache_has_read_as_embeddings_is_not_known_later_either(model, ids):
    cache = DynamicCache(config=model.config)
    model(inputs_embeds=model.get_input_embeddings()(ids[:, :9]), cache=cache)
    for piece in ids[:, 9:12].split(1, dim=1):
        model(piece, cache=cache)
    assert tokens_read(cache) == []
    expected = model.generate(ids[:, :25], **GREEDY)[:, -8:]
    found = model.generate(ids[:, 12:25], **{GIVEN[0]: cache}, **GREEDY)[:, -8:]  # all of it is new
    assert torch.equal(found, expected)


@torch.no_grad()
def test_decoding_notes_tokens_in_one_list(model, ids):
    cache = DynamicCache(config=model.config)
    model(ids[:, :9], cache=cache)
    read = tokens_read(cache)
    for piece in ids[:, 9:12].split(1, dim=1):
        model(piece, cache=cache)
        assert tokens_read(cache) is read
    assert torch.equal(torch.cat(read, 1), ids[:, :12])
