"""The CPU backend: time loops compiled by numba, on as many threads as torch uses; `scan.py` has shapes and meaning.

A head's channels need nothing from each other, so a thread walks one channel (or those that share a beta) through a
chunk of tokens, a vector of keys at a time: states stay in registers, and what is read stays in the core's cache.
Backward derives a chunk's states again from the one kept at its start. The gradient of a log decay is what the token's
two gradients carry over the state before it, so nothing cancels, and without a state it is exactly zero.

Work is cut into the same pieces whatever the number of threads, and each piece writes where no other does: the same
inputs give the same bits.
"""

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..common.precision import compute_dtype
from ..common.torch_blocks import needs_backward, row_lengths
from . import numba_kernels
from .torch_chunk import step
from .types import ScanInputs, ScanOutput, ScanState

__all__ = ["scan", "step"]

DEFAULT_CHUNK = 256
# Shares of a group's channels: each has a dq and dk of its own, and so many threads can work on one sequence.
_SLICES = 16
# Element-steps (a key of a channel for one token) below which other threads start too late to help.
_WORTH_THREADS = 1 << 18


def scan(x: ScanInputs) -> ScanOutput:
    """`scan.metaplastic_scan` on a CPU."""
    output, var, M, J = _Scan.apply(*x.differentiable, _Layout.of(x), x.variance)
    return ScanOutput(output, ScanState(M, J), var)


@dataclass(frozen=True)
class _Layout:
    """How one call is cut up; `rows` is the table that the kernels read, `kept` the number of states they keep."""

    sizes: numba_kernels.Sizes
    rows: np.ndarray
    kept: int
    dtype: torch.dtype
    state_size: int

    @classmethod
    def of(cls, x: ScanInputs) -> "_Layout":
        dtype, chunk = compute_dtype(x.q, x.k, x.v, x.beta), x.chunk_size or DEFAULT_CHUNK
        width = numba_kernels.VECTOR_BYTES // dtype.itemsize
        groups, size = x.k.shape[2:]
        heads, channels = x.v.shape[2:]
        per_group, g = heads // groups, x.beta.shape[3]
        # One head alone is cut too, for the sake of threads.
        tiles = next(n for n in range(1, g + 1) if g % n == 0 and (n == g or n * per_group >= _SLICES // 2))
        length = np.array(row_lengths(*x.v.shape[:2], x.cu_seqlens))
        stop = length.cumsum()
        kept = np.maximum((length - 1) // chunk, 0)
        sizes = numba_kernels.Sizes(
            T=int(length.sum()),
            G=groups,
            H=heads,
            P=channels,
            g=g,
            N=-(-size // width) * width,
            tiles=tiles,
            slices=min(per_group * tiles, _SLICES),
            chunk=min(chunk, int(length.max())),
        )
        rows = np.stack([stop - length, stop, kept.cumsum() - kept], 1)
        return cls(sizes, rows, int(kept.sum()) if needs_backward(*x.differentiable) else 0, dtype, size)

    def run(self, kernel, *arrays) -> None:
        """All pieces of work, each thread some that follow each other."""
        z = self.sizes
        pieces = len(self.rows) * z.G * z.slices
        threads = min(torch.get_num_threads(), pieces) if z.T * z.H * z.P * z.N >= _WORTH_THREADS else 1
        if threads == 1:
            kernel(z, self.rows, 0, pieces, *arrays)
            return
        # A few shares a thread, alike in tokens: who is done early takes another.
        cost = (self.rows[:, 1] - self.rows[:, 0]).repeat(z.G * z.slices).cumsum()
        wanted = np.linspace(0, cost[-1], min(4 * threads, pieces) + 1)[1:]
        bounds = np.unique([0, *np.searchsorted(cost, wanted - 0.5) + 1, pieces])
        list(_pool(os.getpid(), threads).map(lambda a, b: kernel(z, self.rows, a, b, *arrays), bounds[:-1], bounds[1:]))

    def inputs(self, q, k, v, beta, log_decay, prior, M, J, M_kept, J_kept) -> numba_kernels.Inputs:
        """As the kernels take them; states are given in their form."""
        decay = self.tokens(log_decay).exp()
        tensors = (self.keys(q), self.keys(k), self.tokens(v), self.tokens(beta), decay, self.tokens(prior))
        return numba_kernels.Inputs(*(_flat(x) for x in (*tensors, M, J, M_kept, J_kept)))

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype)

    def tokens(self, x: Tensor) -> Tensor:
        """In the kernels' dtype, contiguous."""
        return x.detach().to(self.dtype).contiguous()

    def keys(self, x: Tensor) -> Tensor:
        """[B, T, G, N] -> [G, N / W, B T, W] with zeros behind the last key."""
        z = self.sizes
        x = self._padded(x.detach().flatten(0, 1).to(self.dtype))
        return x.view(z.T, z.G, -1, self._width()).permute(1, 2, 0, 3).contiguous()

    def from_keys(self, slices: Tensor, like: Tensor) -> Tensor:
        """[slices, G, N / W, B T, W] -> the sum over slices [B, T, G, N], like `like`."""
        summed = slices.sum(0).permute(2, 0, 1, 3).reshape(self.sizes.T, self.sizes.G, -1)
        return summed[..., : self.state_size].reshape(like.shape).to(like.dtype)

    def state(self, x: Tensor | None, *shape: int) -> Tensor:
        """A fresh copy [rows, *shape, N] of a state, zeros for None."""
        z = self.sizes
        if x is None:
            return torch.zeros(len(self.rows), *shape, z.N, dtype=self.dtype)
        return self._padded(x.detach().to(self.dtype)).clone(memory_format=torch.contiguous_format)

    def from_state(self, x: Tensor) -> Tensor:
        return x[..., : self.state_size].contiguous()

    def _padded(self, x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, self.sizes.N - self.state_size))

    def _width(self) -> int:
        return numba_kernels.VECTOR_BYTES // self.dtype.itemsize


@functools.lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads of this process: those of a parent do not live on in a forked child."""
    return ThreadPoolExecutor(threads, thread_name_prefix="metaplastic-scan")


def _flat(x: Tensor) -> np.ndarray:
    return x.numpy().reshape(-1)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, beta, log_decay, prior, M0, J0, layout: _Layout, variance: bool):
        ctx.set_materialize_grads(False)
        ctx.layout, z = layout, layout.sizes
        M, J = layout.state(M0, z.H, z.P), layout.state(J0, z.H, z.g)
        M_kept, J_kept = layout.empty(layout.kept, z.H, z.P, z.N), layout.empty(layout.kept, z.H, z.g, z.N)
        out, var = layout.empty(*v.shape), layout.empty(*beta.shape) if variance else None
        inputs = layout.inputs(q, k, v, beta, log_decay, prior, M, J, M_kept, J_kept)
        layout.run(numba_kernels.forward, inputs, _flat(out), _flat(layout.empty(0) if var is None else var))
        ctx.save_for_backward(q, k, v, beta, log_decay, prior, M0, J0, M_kept, J_kept)
        return out.to(v.dtype), var, layout.from_state(M), layout.from_state(J)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_output, d_var, dM, dJ):
        q, k, v, beta, log_decay, prior, M0, J0, M_kept, J_kept = ctx.saved_tensors
        layout, z = ctx.layout, ctx.layout.sizes
        dM, dJ = layout.state(dM, z.H, z.P), layout.state(dJ, z.H, z.g)
        key_vectors = (z.slices, z.G, z.N // layout._width(), z.T, layout._width())
        dq, dk = (torch.zeros(key_vectors, dtype=layout.dtype) for _ in "qk")
        dv, d_beta = layout.empty(*v.shape), layout.empty(*beta.shape)
        d_decay = layout.empty(*log_decay.shape, z.tiles)
        d_prior = torch.empty(len(layout.rows), z.H, z.tiles, dtype=torch.float64)
        M, J = layout.state(M0, z.H, z.P), layout.state(J0, z.H, z.g)
        d_out = torch.zeros(v.shape, dtype=layout.dtype) if d_output is None else layout.tokens(d_output)
        d_var = layout.empty(0) if d_var is None else layout.tokens(d_var)
        written = (d_out, d_var, dM, dJ, dq, dk, dv, d_beta, d_decay, d_prior)
        inputs = layout.inputs(q, k, v, beta, log_decay, prior, M, J, M_kept, J_kept)
        layout.run(numba_kernels.backward, inputs, numba_kernels.Gradients(*(_flat(x) for x in written)))
        initial = [None if x is None else layout.from_state(d).to(x.dtype) for x, d in ((M0, dM), (J0, dJ))]
        return (
            layout.from_keys(dq, q),
            layout.from_keys(dk, k),
            dv.to(v.dtype),
            d_beta.to(beta.dtype),
            d_decay.sum(3).to(log_decay.dtype),
            d_prior.sum((0, 2)).to(prior.dtype),
            *initial,
            None,
            None,
        )
