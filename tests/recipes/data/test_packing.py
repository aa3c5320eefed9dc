"""The endless stream: every position known, nothing lost, nothing twice, documents apart."""

import numpy as np
import pytest
from palimpsa_surgery.base.errors import DataError
from palimpsa_surgery.recipes.data.documents import TokenStore
from palimpsa_surgery.recipes.data.packing import (
    IGNORED,
    TokenStream,
    as_sequence,
    batches,
    collate,
    shared_documents,
    split_documents,
)


def store(*lengths: int, trained=None) -> TokenStore:
    """Documents of these lengths; token values count up over all of them."""
    total = sum(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return TokenStore(np.arange(total, dtype=np.uint16), offsets, trained, "key")


@pytest.mark.parametrize("length", [1, 3, 7, 20])
def test_sequences_tile_the_text_without_loss_or_overlap(length):
    stream = TokenStream(store(5, 1, 9, 3), reset=False)
    read = np.concatenate([stream.sequence(at, length).input_ids for at in range(0, 18 * length, length)])
    assert (read == np.tile(np.arange(18), length)).all()


@pytest.mark.parametrize("seed", [0, 1])
def test_every_epoch_holds_every_token_once_in_another_order(seed):
    stream = TokenStream(store(5, 1, 9, 3), seed=seed)
    epochs = [stream.sequence(epoch * 18, 18).input_ids for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(18))
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_any_position_reads_the_same_from_a_fresh_stream():
    first = TokenStream(store(5, 1, 9, 3), seed=3)
    there = [first.sequence(at, 6).input_ids.tolist() for at in range(0, 90, 6)]
    for index in (14, 2, 9):
        assert TokenStream(store(5, 1, 9, 3), seed=3).sequence(index * 6, 6).input_ids.tolist() == there[index]


def test_documents_are_numbered_and_never_predicted_across_their_border():
    sequence = TokenStream(store(3, 2, 4)).sequence(1, 7)
    assert sequence.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert sequence.segments.tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert sequence.targets.tolist() == [2, IGNORED, 4, IGNORED, 6, 7, 8]


def test_a_stream_without_resets_predicts_across_borders():
    sequence = TokenStream(store(3, 2, 4), reset=False).sequence(1, 7)
    assert sequence.segments is None
    assert sequence.targets.tolist() == [2, 3, 4, 5, 6, 7, 8]


def test_one_document_needs_no_segments():
    assert TokenStream(store(9)).sequence(2, 4).segments is None


def test_only_trained_tokens_are_targets():
    mask = np.array([0, 0, 1, 1, 0, 1], np.uint8)
    sequence = TokenStream(store(6, trained=mask)).sequence(0, 5)
    assert sequence.targets.tolist() == [IGNORED, 2, 3, IGNORED, 5]


def test_validation_sequences_do_not_repeat_text():
    sequences = TokenStream(store(5, 6)).sequences(10, 4)
    assert [w.input_ids.tolist() for w in sequences] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert TokenStream(store(3)).sequences(10, 4)[0].input_ids.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("count", "starts"), [(1, [0]), (2, [0, 8]), (3, [0, 4, 8]), (4, [0, 4, 8, 12]), (9, [0, 4, 8, 12])]
)
def test_validation_sequences_come_from_all_over_the_text(count, starts):
    sequences = TokenStream(store(7, 10)).sequences(count, 4)
    assert [int(w.input_ids[0]) for w in sequences] == starts


def test_too_little_text_is_refused():
    with pytest.raises(DataError, match="holds 1 token, too few"):
        TokenStream(store(1))


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.9])
def test_the_split_shares_no_document(fraction):
    kept, out = split_documents(store(*[2] * 10), fraction)
    assert sorted([*kept, *out]) == list(range(10))
    assert len(out) >= 1
    assert len(kept) >= 1


def test_a_single_document_cannot_be_split():
    with pytest.raises(DataError, match=r"single document.*data\.val"):
        split_documents(store(9), 0.1)
    assert len(split_documents(store(9), 0)[1]) == 0


def test_plain_ids_become_a_sequence():
    sequence = as_sequence([4, 5, 6])
    assert (sequence.input_ids.tolist(), sequence.targets.tolist()) == ([4, 5], [5, 6])
    with pytest.raises(DataError, match="nothing to predict"):
        as_sequence([4])


def test_collating_mixes_sequences_with_and_without_borders():
    stream = TokenStream(store(4, 6, 8))
    batch = collate([stream.sequence(0, 6), stream.sequence(10, 6)])
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 0, 1, 1], [0] * 6]
    assert "seq_idx" not in collate([stream.sequence(10, 6)])


def test_batches_hold_sequences_of_one_length():
    sequences = [as_sequence(range(n)) for n in (5, 5, 5, 3, 5)]
    assert [[len(w.input_ids) for w in run] for run in batches(sequences, 2)] == [[4, 4], [4], [2], [4]]


def with_contents(*contents: str) -> TokenStore:
    tokens = np.frombuffer("".join(contents).encode(), np.uint8).astype(np.uint16)
    return TokenStore(tokens, np.cumsum([0, *map(len, contents)]), None, "key")


@pytest.mark.parametrize("fraction", [0.02, 0.25, 0.5, 0.9])
def test_copies_of_a_document_are_on_one_side(fraction):
    contents = [*"aabbbccccdefgh" * 2, *"ijklmnop"]
    kept, out = split_documents(with_contents(*contents), fraction)
    sides = [{contents[i] for i in side} for side in (kept, out)]
    assert not sides[0] & sides[1]
    assert sorted([*kept, *out]) == list(range(len(contents)))
    assert 1 <= len(out) <= max(2, fraction * len(contents) + 1)


def test_copies_of_one_document_cannot_be_split():
    with pytest.raises(DataError, match="3 copies of one document and cannot be split"):
        split_documents(with_contents("ab", "ab", "ab"), 0.5)


def test_documents_that_two_texts_share_are_counted():
    assert shared_documents(with_contents("ab", "c"), with_contents("c", "ab", "ab", "x")) == 3
