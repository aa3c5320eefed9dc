"""Hybrids in pieces: attention counts positions on, and the loss has each host's factor of the logits."""

import pytest
import torch
from palimpsa_surgery.modeling.hybrids.configuration_palimpsa_hybrid import known_hosts
from palimpsa_surgery.recipes.evaluation.suites.streaming import stream_logits, stream_losses
from tiny_hybrids import make_hybrid, token_ids

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
