import pytest
import torch
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.mixers.layout import reorder, sequence_layout


def test_a_plain_batch_has_none():
    assert sequence_layout((2, 5)) is None
    assert sequence_layout((2, 5), attention_mask=torch.ones(2, 5)) is None
    assert sequence_layout((2, 5), attention_mask=torch.ones(2, 9)) is None
    assert sequence_layout((2, 5), position_ids=torch.arange(5)[None]) is None
    assert sequence_layout((1, 1), position_ids=torch.tensor([[7]])) is None


def test_real_tokens_come_first_in_their_order():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 0, 0]])
    layout = sequence_layout((2, 5), attention_mask=mask)
    tokens = torch.tensor([[0, 0, 3, 4, 5], [6, 0, 7, 0, 0]])
    first = reorder(tokens, layout.order)
    assert first.tolist() == [[3, 4, 5, 0, 0], [6, 7, 0, 0, 0]]
    assert torch.equal(reorder(first, layout.inverse), tokens)
    assert layout.lengths.tolist() == [3, 2]
    assert not layout.packed


def test_the_last_columns_of_a_longer_mask_belong_to_this_piece():
    mask = torch.tensor([[0, 0, 1, 0, 1]])
    assert sequence_layout((1, 2), attention_mask=mask).mask.tolist() == [[False, True]]
    assert sequence_layout((1, 1), attention_mask=mask) is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
def test_masks_of_any_type(dtype):
    mask = torch.tensor([[0, 1, 1]]).to(dtype)
    assert sequence_layout((1, 3), attention_mask=mask).mask.tolist() == [[False, True, True]]


def test_documents_from_positions_numbers_and_bounds():
    positions = torch.tensor([[0, 1, 0, 0, 1, 2]])
    expected = [0, 2, 3, 6]
    for told in (
        {"position_ids": positions},
        {"seq_idx": torch.tensor([[4, 4, 1, 9, 9, 9]])},
        {"cu_seqlens": torch.tensor(expected)},
    ):
        layout = sequence_layout((1, 6), **told)
        assert layout.packed
        assert layout.mask is None
        assert layout.cu_seqlens.tolist() == expected
        assert layout.cu_seqlens.dtype == torch.int32


def test_rows_of_a_packed_batch_are_documents_of_their_own():
    layout = sequence_layout((2, 3), seq_idx=torch.tensor([[0, 0, 1], [1, 1, 1]]))
    assert layout.cu_seqlens.tolist() == [0, 2, 3, 6]


def test_positions_of_a_padded_batch_are_not_documents():
    # `generate` numbers left-padded rows like this.
    mask, positions = torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 0, 0, 1]])
    assert not sequence_layout((1, 4), attention_mask=mask, position_ids=positions).packed


def test_pads_of_a_packed_row_go_to_the_end_of_their_document():
    layout = sequence_layout(
        (1, 6), seq_idx=torch.tensor([[0, 0, 0, 1, 1, 1]]), attention_mask=torch.tensor([[0, 1, 1, 1, 0, 1]])
    )
    assert layout.order.tolist() == [[1, 2, 0, 3, 5, 4]]


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"attention_mask": torch.ones(2, 3)}, r"attention_mask has shape \[2, 3\]; expected \[2, 5\] or more"),
        ({"attention_mask": torch.ones(1, 5)}, "attention_mask has shape"),
        ({"attention_mask": torch.ones(2, 1, 5, 5)}, "attention_mask has shape"),
        ({"seq_idx": torch.zeros(2, 4)}, r"seq_idx has shape \[2, 4\]"),
        ({"cu_seqlens": torch.tensor([0, 10])}, "cu_seqlens in a batch of 2 rows"),
    ],
)
def test_refusals(told, message):
    with pytest.raises(UsageError, match=message):
        sequence_layout((2, 5), **told)
