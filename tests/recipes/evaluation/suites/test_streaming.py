"""Pieces through the cache give what one pass gives, whatever their lengths, and never hold more than a piece."""

import pytest
import torch
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.recipes.evaluation.suites.streaming import piece_bounds, stream_logits, stream_losses
from tiny import make_model

LENGTH = 71


@pytest.fixture(scope="module")
def model():
    return make_model(vocab_size=64).double().eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(64, (2, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("chunk", [1, 7, 16, 35, 69, 70, 71, 500])
def test_losses_in_pieces_equal_one_pass(model, ids, logits, chunk):
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none")
    torch.testing.assert_close(stream_losses(model, ids, chunk), expected.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk", [9, 35, 70, 500])
@pytest.mark.parametrize("positions", [[70], [0, 8, 9, 35, 70], [3]])
def test_logits_in_pieces_equal_one_pass(model, ids, logits, chunk, positions):
    found = stream_logits(model, ids, positions, chunk)
    torch.testing.assert_close(found, logits[:, positions].float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("run", [stream_losses, lambda model, ids, chunk: stream_logits(model, ids, [70], chunk)])
def test_no_layer_ever_sees_more_than_a_piece(model, ids, run):
    seen = []
    handle = model.backbone.layers[1].register_forward_hook(lambda _, inputs, out: seen.append(inputs[0].shape[1]))
    try:
        run(model, ids, 16)
    finally:
        handle.remove()
    assert max(seen) == 16
    assert sum(seen) in (LENGTH - 1, LENGTH)


def test_pieces_end_at_every_cut():
    assert piece_bounds(10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert piece_bounds(10, 4, cuts=[3, 8, 10, 99]) == [(0, 3), (3, 4), (4, 8), (8, 10)]
    assert piece_bounds(3, 8) == [(0, 3)]


def test_a_piece_holds_a_token():
    with pytest.raises(UsageError, match="chunk is 0"):
        piece_bounds(10, 0)
