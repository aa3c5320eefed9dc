"""Hybrids in pieces: attention counts positions on, and the loss has each host's factor of the logits."""

import numpy as np
import pytest
import torch
from palimpsa_surgery.base.text import embedded_checkpoint_path
from palimpsa_surgery.mixers.importance import record_importance
from palimpsa_surgery.modeling.hybrids.configuration_palimpsa_hybrid import known_hosts
from palimpsa_surgery.recipes.evaluation.suites import importance, loss
from palimpsa_surgery.recipes.evaluation.suites.streaming import stream_logits, stream_losses
from palimpsa_surgery.recipes.evaluation.suites.suite import EvalOptions, EvalText, Subject
from palimpsa_surgery.surgery.checkpoint.tokenizer import load_tokenizer
from tiny_hybrids import SWAPPED, make_hybrid, token_ids

FP32 = 1e-5  # relative L2


@pytest.fixture(scope="module", params=known_hosts())
def model(request):
    return make_hybrid(request.param)


@pytest.fixture(scope="module")
def logits(model):
    with torch.no_grad():
        return model(token_ids()).logits


@pytest.mark.parametrize("chunk", [1, 8, 32])
def test_losses_in_pieces_are_those_of_one_pass(model, logits, chunk):
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].mT, token_ids()[:, 1:], reduction="none")
    found = stream_losses(model, token_ids(), chunk)
    assert (found - expected).norm() < FP32 * expected.norm()


@pytest.mark.parametrize("chunk", [5, 32])
def test_logits_in_pieces_are_those_of_one_pass(model, logits, chunk):
    positions = [0, 6, 7, 20]
    found = stream_logits(model, token_ids(), positions, chunk)
    assert (found - logits[:, positions]).norm() < FP32 * logits[:, positions].norm()


LENGTHS = (8, 21)


@pytest.fixture(scope="module")
def evaluated():
    tokenizer = load_tokenizer(embedded_checkpoint_path())
    return EvalText(None, tokenizer, longest=21, tokens=60, seed=0, vocab_size=4096)


@pytest.fixture(scope="module", params=known_hosts())
def subject(request):
    return Subject(make_hybrid(request.param, vocab_size=4096), request.param)


@pytest.mark.parametrize("chunk", [32, 7])
def test_importance_is_read_from_the_cache_as_the_mixers_leave_it(subject, evaluated, chunk):
    """Of a delta rule it is one number for each key of a head, in a column of the state."""
    options = EvalOptions(lengths=LENGTHS, trials=2, chunk=chunk)
    found = {m.key: m for m in importance.run(subject, evaluated, options).measurements}
    for number, sequence in enumerate(evaluated.sequences(21)[:2]):
        for length in LENGTHS:
            with torch.no_grad(), record_importance(subject.model) as recorder:
                subject.model(input_ids=torch.from_numpy(sequence[None, :length]), use_cache=False)
            layers = recorder.layers()
            assert list(layers) == SWAPPED[subject.name]
            for layer, expected in layers.items():
                wanted = {"metaplasticity ratio": expected.ratio, "mean importance": expected.mean}
                wanted["head spread"] = expected.head_spread
                for name, figure in wanted.items():
                    measured = found[(name, ("layer", layer), ("length", length))]
                    assert measured.samples[number, 0] == pytest.approx(figure, rel=1e-4)
    heads = [m for m in found.values() if m.name == importance.HEAD_RATIO]
    assert len(heads) == sum(len(layer.head_ratio) for layer in layers.values())
    assert max(m.samples[:, 0].max() for m in heads) > 1.01


def test_perplexity_is_the_exponential_of_the_mean_loss_in_tokens(subject, evaluated):
    """As many tokens as the model might have chosen from at random to lose as much."""
    measured = loss.run(subject, evaluated, EvalOptions(lengths=LENGTHS)).measurements
    nats, perplexity = (next(m for m in measured if m.name == name) for name in ("loss", "perplexity"))
    assert (nats.unit, perplexity.unit, perplexity.exponential) == ("nats", "tokens", True)
    with torch.no_grad():
        ids = torch.from_numpy(np.stack(evaluated.sequences(LENGTHS[0])))
        expected = subject.model(input_ids=ids, labels=ids).loss
    for one in (nats, perplexity):
        assert one.samples[:, 0].sum() / one.samples[:, 1].sum() == pytest.approx(expected.item(), rel=1e-5)
