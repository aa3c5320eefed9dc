"""Hybrids against their hosts, and against themselves in pieces: prefill, padding, decoding, beams, static caches."""

import inspect

import pytest
import torch
import transformers
from packaging.version import Version
from palimpsa_surgery.mixers.metaplasticity import metaplasticity_off
from palimpsa_surgery.mixers.states import CACHE_NAMES
from palimpsa_surgery.modeling.hybrids.modeling_palimpsa_hybrid import model_class
from tiny_hybrids import make_hybrid, token_ids
from transformers import DynamicCache

FP32 = 1e-5  # relative L2; the hosts' own scan and ours add in another order
STEPS = 6

MASK = torch.ones(3, 21, dtype=torch.long)
MASK[1, :6], MASK[2, :15] = 0, 0
PADDED = token_ids() * MASK


def distance(one, two):
    return ((one - two).norm() / two.norm()).item()


@torch.no_grad()
def greedy(model, ids, mask, **options):
    """Logits [B, STEPS, V] of decoding token by token, and the tokens."""
    options |= {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "eos_token_id": None}
    out = model.generate(ids, attention_mask=mask, max_new_tokens=STEPS, **options)
    return torch.stack(out.logits, 1), out.sequences


def decodes(variant):
    """transformers 5.17 breaks in Falcon-H1 with a gated norm when it decodes more than one row."""
    return not variant.startswith("falcon_h1/") or Version(transformers.__version__) >= Version("5.18")


@torch.no_grad()
def test_without_importance_the_logits_are_the_hosts(variant, host, hybrid):
    with metaplasticity_off(hybrid(variant)) as model:
        assert distance(model(token_ids()).logits, host(variant)(token_ids()).logits) < FP32


@torch.no_grad()
def test_importance_changes_the_logits(variant, host, hybrid):
    assert distance(hybrid(variant)(token_ids()).logits, host(variant)(token_ids()).logits) > 0.01


@torch.no_grad()
def test_padding_on_the_left_is_as_in_the_host(variant, host, hybrid):
    real = MASK.bool()
    with metaplasticity_off(hybrid(variant)) as model:
        logits = model(PADDED, attention_mask=MASK).logits
    assert distance(logits[real], host(variant)(PADDED, attention_mask=MASK).logits[real]) < FP32


@torch.no_grad()
def test_a_padded_row_is_the_row_alone(variant, hybrid):
    model = hybrid(variant)
    logits = model(PADDED, attention_mask=MASK).logits
    for row, (ids, mask) in enumerate(zip(PADDED, MASK.bool(), strict=True)):
        assert distance(logits[row, mask], model(ids[mask][None]).logits[0]) < FP32


@pytest.mark.parametrize("layers", [[0, 2], [0], []])
def test_pads_do_not_reach_a_token_through_the_bias_of_the_projection(layers):
    """In the host they do: what its convolution sees of a pad is the bias."""
    model = make_hybrid("bamba", layers=layers, mamba_proj_bias=True)
    with torch.no_grad():
        logits = model(PADDED[2:], attention_mask=MASK[2:]).logits[0, 15:]
        assert distance(logits, model(PADDED[2:, 15:]).logits[0]) < FP32


def test_decoding_token_by_token_is_as_in_the_host(variant, host, hybrid):
    if not decodes(variant):
        pytest.skip("the host breaks in this release")
    with metaplasticity_off(hybrid(variant)) as model:
        logits, tokens = greedy(model, PADDED, MASK)
    expected, same = greedy(host(variant), PADDED, MASK)
    assert torch.equal(tokens, same)
    assert distance(logits, expected) < FP32


def test_decoding_token_by_token_is_one_pass(variant, hybrid):
    if not decodes(variant):
        pytest.skip("the host breaks in this release")
    model = hybrid(variant)
    logits, tokens = greedy(model, PADDED, MASK)
    mask = torch.cat([MASK, MASK.new_ones(3, STEPS)], 1)
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask).logits[:, MASK.shape[1] - 1 : -1]
    assert distance(logits, whole) < FP32


@torch.no_grad()
@pytest.mark.parametrize("positions", [True, False], ids=["positions given", "positions not given"])
def test_pieces_through_a_cache_are_one_pass(kind, positions, hybrid):
    """Bamba's own class counts from 0 in every piece where no positions are given."""
    model, cache, logits, at = hybrid(kind), DynamicCache(config=hybrid(kind).config), [], 0
    name = next(name for name in CACHE_NAMES if name in inspect.signature(model.forward).parameters)
    for piece in token_ids().split([9, 1, 4, 1, 6], 1):
        given = {"position_ids": torch.arange(at, at + piece.shape[1])[None]} if positions else {}
        logits.append(model(piece, use_cache=True, **given, **{name: cache}).logits)
        at += piece.shape[1]
    assert distance(torch.cat(logits, 1), model(token_ids()).logits) < FP32


@torch.no_grad()
@pytest.mark.parametrize("headless", [True, False])
def test_positions_follow_on_a_cache_however_the_text_is_given(headless, hybrid):
    model = hybrid("bamba")
    if headless:
        model, whole = model_class("bamba", headless=True)(model.config).eval(), model.base_model
        model.load_state_dict(whole.state_dict())
    first, second = token_ids().split([15, 6], 1)
    name = next(name for name in CACHE_NAMES if name in inspect.signature(model.forward).parameters)
    found = []
    for arguments, options in (
        ((second,), {}),
        ((second, None, None), {}),
        ((), {"inputs_embeds": model.get_input_embeddings()(second)}),
    ):
        cache = DynamicCache(config=model.config)
        model(first, use_cache=True, **{name: cache})
        found.append(model(*arguments, use_cache=True, **options, **{name: cache})[0])
    expected = model(token_ids())[0][:, 15:]
    assert max(distance(one, expected) for one in found) < FP32


def test_beams_are_those_of_the_host(kind, host, hybrid):
    options = {"attention_mask": MASK, "num_beams": 3, "max_new_tokens": STEPS, "eos_token_id": None}
    with metaplasticity_off(hybrid(kind)) as model:
        beams = model.generate(PADDED, **options)
    assert torch.equal(beams, host(kind).generate(PADDED, **options))


def test_beams_reorder_the_importance(kind, hybrid):
    """Each beam's score is that of its own text in one pass."""
    model, ids = hybrid(kind), token_ids()[:1, :8]
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": STEPS, "eos_token_id": None}
    out = model.generate(ids, return_dict_in_generate=True, output_scores=True, **options)
    with torch.no_grad():
        logits = model(out.sequences).logits[:, 7:-1].log_softmax(-1)
    scores = logits.gather(2, out.sequences[:, 8:, None]).sum((1, 2)) / STEPS
    torch.testing.assert_close(scores, out.sequences_scores, rtol=1e-4, atol=1e-4)


def test_a_static_cache_gives_the_same_tokens(kind, hybrid):
    tokens = [greedy(hybrid(kind), token_ids(), None, **more)[1] for more in ({}, {"cache_implementation": "static"})]
    assert torch.equal(*tokens)


@torch.no_grad()
@pytest.mark.parametrize("layers", [[0, 2], [2], []])
def test_documents_packed_in_a_row_are_the_documents_alone(layers):
    """Of a host without attention; its own mixers need CUDA packages for this."""
    model = make_hybrid("nemotron_h", layers=layers, layers_block_type=["mamba", "mlp", "mamba"])
    ids = token_ids()[:1, :20]
    documents = torch.tensor([[0] * 7 + [1] * 9 + [2] * 4])
    apart = torch.cat([model(piece, use_cache=False).logits for piece in ids.split([7, 9, 4], 1)], 1)
    assert distance(model(ids, seq_idx=documents, use_cache=False).logits, apart) < FP32
    starts = torch.tensor([0, 7, 16, 20], dtype=torch.int32)
    assert distance(model(ids, cu_seq_lens_q=starts, use_cache=False).logits, apart) < FP32


@pytest.mark.parametrize("layers", [[0, 2], []])
def test_packed_documents_and_a_cache_are_refused(layers):
    model = make_hybrid("nemotron_h", layers=layers, layers_block_type=["mamba", "attention", "mamba"])
    with pytest.raises(ValueError, match="packed documents were given together with a cache"):
        model(token_ids()[:1, :4], seq_idx=torch.tensor([[0, 0, 1, 1]]), use_cache=True)


@torch.no_grad()
@pytest.mark.parametrize("variant", ["granitemoehybrid/experts", "qwen3_next"])
def test_the_balance_of_experts_works_and_fails_where_it_does_in_the_host(variant, host, hybrid):
    """With a cache and a mask the loss of the host takes the mask of the whole text for one of the new piece."""
    mask, first = torch.ones_like(MASK), token_ids()[:, :20]
    for model in (host(variant), hybrid(variant)):
        options = {"attention_mask": mask, "output_router_logits": True}
        balance = model(token_ids(), use_cache=False, **options).aux_loss
        if not torch.is_tensor(balance):
            pytest.skip("the host has no such loss in this release")
        assert torch.isfinite(balance)
        name = next(name for name in CACHE_NAMES if name in inspect.signature(model.forward).parameters)
        cache = DynamicCache(config=model.config)
        model(first, use_cache=True, **{name: cache})
        with pytest.raises(RuntimeError, match="must match the size of tensor"):
            model(token_ids()[:, 20:], use_cache=True, **options, **{name: cache})
