"""Outputs kept between the two runs of gradient checkpointing."""

import pytest
import torch
from palimpsa_surgery.kernels.common.kept import KeptOutputs, kept
from torch.utils.checkpoint import checkpoint


class Square(torch.autograd.Function):
    """Counts how often it is computed; like a scan, its backward needs its input only."""

    runs = 0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return kept(lambda: Square._run(x))

    @staticmethod
    def _run(x):
        Square.runs += 1
        return x * x, None

    @staticmethod
    def backward(ctx, d, _):
        return 2 * ctx.saved_tensors[0] * d


@pytest.fixture(autouse=True)
def count():
    Square.runs = 0


def piece(x, store=None):
    if store is None:
        return Square.apply(Square.apply(x)[0])[0].exp()
    with store.use():
        return piece(x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_piece_that_runs_again_computes_nothing_again(reentrant):
    x = torch.linspace(0.1, 1, 7, requires_grad=True)
    (expected,) = torch.autograd.grad(piece(x).sum(), x)
    assert Square.runs == 2
    # Two pieces under way at once, each with what is its own.
    y = sum(checkpoint(piece, x * c, KeptOutputs(), use_reentrant=reentrant).sum() / c for c in (1.0, 1.0))
    y.backward()
    assert Square.runs == 6
    torch.testing.assert_close(x.grad, 2 * expected)


def test_without_a_place_to_keep_it_all_runs():
    x = torch.ones(3, requires_grad=True)
    checkpoint(piece, x, use_reentrant=False).sum().backward()
    assert Square.runs == 4


def test_what_was_written_over_is_computed_again():
    store, x = KeptOutputs(), torch.full((3,), 2.0)
    with store.use():
        Square.apply(x)[0].zero_()
    with store.use():
        assert torch.equal(Square.apply(x)[0], x * x)
    assert Square.runs == 2


def test_nothing_is_kept_once_the_graph_is_gone():
    import gc
    import weakref

    x = torch.ones(3, requires_grad=True)
    store = KeptOutputs()
    gone = weakref.ref(store)
    y = checkpoint(piece, x, store, use_reentrant=False).sum()
    del store
    gc.disable()
    try:
        y.backward()
        del y
        assert gone() is None, "a cycle keeps it"
    finally:
        gc.enable()
