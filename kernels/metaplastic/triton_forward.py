"""The forward pass in plain Triton: a time loop in fp32 over each block, from the state at the block's start."""

import triton
import triton.language as tl

from ..common.triton_blocks import Blocks
from ..common.triton_launch import power_of_two


@triton.jit
def forward_kernel(
    q, k, v, beta, log_decay, prior, M0, J0,  # inputs, and the states at block starts
    out, variance, final_M, final_J,  # written
    only, table, documents,  # blocks
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
    HAS_START: tl.constexpr, VARIANCE: tl.constexpr, HAS_ONLY: tl.constexpr, STORE_FINAL: tl.constexpr,
):  # fmt: skip
    NVB: tl.constexpr = (P + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % NVB
    row = pid // NVB
    block = row // H
    i_h = row % H
    i_g = i_h // (H // G)
    count = tl.load(table + block * 3 + 1)
    if count == 0:
        return  # an empty block: nothing is at its place in the states
    on = tl.arange(0, BN)
    ov = i_v * BV + tl.arange(0, BV)
    mn = on < N
    mv = ov < P
    inside = mv[:, None] & mn[None, :]
    tile = ov[:, None] * N + on[None, :]
    at = row.to(tl.int64) * (N * P)
    M = tl.zeros([BV, BN], tl.float32)
    J = tl.zeros([BV, BN], tl.float32)
    if HAS_START:
        M = tl.load(M0 + at + tile, mask=inside, other=0.0).to(tl.float32)
        J = tl.load(J0 + at + tile, mask=inside, other=0.0).to(tl.float32)
    ip = tl.load(prior + i_h).to(tl.float32)
    start = tl.load(table + block * 3).to(tl.int64)
    if HAS_ONLY:
        count = tl.where(tl.load(only + row) > 0, count, 0)
    for t in range(count):
        token = start + t
        pk = (token * G + i_g) * N + on
        px = (token * H + i_h) * P + ov
        kk = tl.load(k + pk, mask=mn, other=0.0).to(tl.float32)
        qq = tl.load(q + pk, mask=mn, other=0.0).to(tl.float32)
        vv = tl.load(v + px, mask=mv, other=0.0).to(tl.float32)
        bb = tl.load(beta + px, mask=mv, other=0.0).to(tl.float32)
        a = tl.exp(tl.load(log_decay + token * H + i_h).to(tl.float32))
        M = a * M + vv[:, None] * kk[None, :]
        J = a * J + bb[:, None] * (kk * kk)[None, :]
        R = qq[None, :] / (J + ip)
        tl.store(out + px, tl.sum(M * R, 1).to(out.dtype.element_ty), mask=mv)
        if VARIANCE:
            tl.store(variance + px, tl.sum(R * qq[None, :], 1), mask=mv)
    if STORE_FINAL:
        document = tl.load(table + block * 3 + 2)
        if block == tl.load(documents + document + 1) - 1:
            at = (document * H + i_h).to(tl.int64) * (N * P)
            tl.store(final_M + at + tile, M, mask=inside)
            tl.store(final_J + at + tile, J, mask=inside)


def forward(q, k, v, beta, log_decay, prior, starts, blocks: Blocks, out, variance, final, only=None) -> None:
    """Outputs of every token and each document's final states.

    Args:
        q: [tokens, G, N]; k likewise.
        v: [tokens, H, P]; beta likewise.
        log_decay: [tokens, H].
        prior: [H].
        starts: (M, J) [>= blocks.count, H, P, N], the states at block starts; None for zeros.
        blocks: the layout of the tokens.
        out: [tokens, H, P], written.
        variance: [tokens, H, P] fp32, written, or None.
        final: (M, J) [rows, H, P, N] fp32, written except for empty documents, or None.
        only: [blocks.count, H] int32, zero where a block of a head is to be left out, or None.
    """
    G, N = k.shape[1:]
    H, P = v.shape[1:]
    BN = power_of_two(N)
    BV = min(power_of_two(P, 4), max(4, 2048 // BN))
    forward_kernel[(blocks.count * H * triton.cdiv(P, BV),)](
        q, k, v, beta, log_decay, prior, *(starts or (None, None)),
        out, variance, *(final or (None, None)), only, blocks.table, blocks.documents,
        H, G, N, P, BN, BV, starts is not None, variance is not None, only is not None, final is not None,
        num_warps=4 if BN * BV >= 2048 else 1,
    )  # fmt: skip
