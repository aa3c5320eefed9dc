"""How tokens are cut into blocks for the kernels."""

import pytest
import torch

pytest.importorskip("triton")
from palimpsa_surgery.kernels.common.triton_blocks import make_blocks

CPU = torch.device("cpu")


def test_a_batch_is_cut_row_by_row():
    blocks = make_blocks(2, 5, 2, CPU)
    assert blocks.table.tolist() == [[0, 2, 0], [2, 2, 0], [4, 1, 0], [5, 2, 1], [7, 2, 1], [9, 1, 1]]
    assert blocks.documents.tolist() == [0, 3, 6]
    assert (blocks.count, blocks.rows, blocks.size) == (6, 2, 2)


@pytest.mark.parametrize("bounds", [[0, 5, 5, 9], [0, 9], [0, 0, 1, 2, 9, 9], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_packed_documents_cover_every_token_once(bounds, size):
    blocks = make_blocks(1, 9, size, CPU, torch.tensor(bounds, dtype=torch.int32))
    seen = []
    for row, (first, last) in enumerate(
        zip(blocks.documents[:-1].tolist(), blocks.documents[1:].tolist(), strict=True)
    ):
        for start, count, document in blocks.table[first:last].tolist():
            assert document == row
            assert 0 < count <= size
            seen += range(start, start + count)
    assert seen == list(range(9))
    unused = blocks.table[int(blocks.documents[-1]) :]
    assert (unused[:, 1] == 0).all()
    assert (blocks.table[:, 2] < blocks.rows).all()
