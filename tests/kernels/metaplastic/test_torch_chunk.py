"""What is the torch form's own: how it walks tiles, and how large its temporaries grow."""

import pytest
import torch
from palimpsa_surgery.kernels.metaplastic import torch_chunk
from palimpsa_surgery.kernels.metaplastic.scan import metaplastic_scan
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@pytest.mark.parametrize("tile", [1, 300, 2000])
def test_tiles_change_nothing(problem, relative, results, monkeypatch, tile):
    """Lanes walked one by one, in small groups across rows of different lengths, or all at once."""
    lengths = [40, 3, 17, 90]
    p = problem(150, rows=4, H=3, G=1, P=4, g=4, N=3)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    want = results(p, "reference", cu_seqlens=cu)
    monkeypatch.setattr(torch_chunk, "_TILE_ELEMENTS", tile)
    got = results(p, "torch", cu_seqlens=cu, chunk_size=16)
    assert max(relative(got[name], want[name]) for name in want) < 1e-12


class LargestTensor(TorchDispatchMode):
    """Records the elements of the largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return out


@pytest.mark.parametrize("g", [1, 32])
def test_no_temporary_grows_with_the_sequence_times_the_state(g):
    """Forward and backward: the largest tensor is one block's importance, however long the sequence."""

    def largest(T, train=True, chunk_size=64):
        r = torch.Generator().manual_seed(0)
        q, k = (torch.randn(1, T, 1, 64, generator=r) for _ in "qk")
        v, beta = torch.randn(1, T, 1, 32, generator=r), torch.rand(1, T, 1, g, generator=r)
        x = [t.requires_grad_() for t in (q, k, v, beta, -torch.rand(1, T, 1, generator=r), torch.ones(1))]
        with LargestTensor() as seen, torch.set_grad_enabled(train):
            output = metaplastic_scan(*x, backend="torch", chunk_size=chunk_size).output
            if train:
                output.sum().backward()
        return seen.largest

    assert largest(512) == max(largest(128), 512 * 64)
    assert largest(512) <= 32 * 16 * 64
    if g == 32:
        assert largest(512, chunk_size=16) == 31 * 32 * 64  # the states at 31 borders
        assert largest(512, train=False, chunk_size=16) == 32 * 16 * 64  # which only a backward pass needs


@pytest.mark.gpu
@pytest.mark.parametrize("g", [1, 8])
def test_the_same_on_a_gpu(problem, cast, relative, results, g):
    p = problem(130, B=2, g=g)
    want = results(p, "reference")
    gpu = cast(p, torch.float32)
    for name, x in vars(gpu).items():
        setattr(gpu, name, x.cuda())
    got = {name: x.cpu() for name, x in results(gpu, "torch").items()}
    for name, value in want.items():
        assert relative(got[name], value) < (1e-3 if name.startswith("d ") else 1e-4), name
