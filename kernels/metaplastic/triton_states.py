"""The two states at block boundaries: forwards by matrix products, and their gradients backwards.

Both states are linear recurrences with one scalar decay per head, so over a block with cumulative log decay g
    M_end = exp(g_end) M_start + sum_s exp(g_end - g_s) v_s (x) k_s          (J with beta and k^2)
and no decay is ever divided by.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.triton_blocks import Blocks
from ..common.triton_launch import power_of_two


@triton.jit
def load_log_decay(p, m):
    """Log decays as fp32, 0 where masked. exp(-104) is 0 in fp32: going lower only costs digits in cumulative sums."""
    return tl.maximum(tl.load(p, mask=m, other=0.0).to(tl.float32), -104.0)


@triton.jit
def block_states_kernel(
    k, v, beta, log_decay, initial_M, initial_J,  # inputs
    M_out, J_out,  # written
    table, documents, head0, heads, n_blocks,  # blocks, and heads of this launch
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, EVERY: tl.constexpr,
    HAS_INITIAL: tl.constexpr, WITH_J: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    # A program carries a tile of both states over a document, BT tokens per step; blocks are EVERY steps.
    NKB: tl.constexpr = (N + BK - 1) // BK
    NVB: tl.constexpr = (P + BV - 1) // BV
    pid = tl.program_id(0)
    i_k = pid % NKB
    i_v = (pid // NKB) % NVB
    row = pid // (NKB * NVB)
    i_d = row // heads
    i_l = row % heads
    i_h = head0 + i_l
    i_g = i_h // (H // G)
    ok = i_k * BK + tl.arange(0, BK)
    ov = i_v * BV + tl.arange(0, BV)
    ot = tl.arange(0, BT)
    mk = (ok < N)[None, :]
    mv = (ov < P)[None, :]
    inside = (ov < P)[:, None] & mk
    tile = ov[:, None] * N + ok[None, :]
    M = tl.zeros([BV, BK], tl.float32)
    J = tl.zeros([BV, BK], tl.float32)
    if HAS_INITIAL:
        state = (i_d * H + i_h).to(tl.int64) * (N * P)
        M = tl.load((initial_M + state) + tile, mask=inside, other=0.0)
        if WITH_J:
            J = tl.load((initial_J + state) + tile, mask=inside, other=0.0)
    first = tl.load(documents + i_d)
    last = tl.load(documents + i_d + 1)
    filled = last > first
    start = tl.load(table + first * 3, mask=filled, other=0).to(tl.int64)
    end = tl.load(table + (last - 1) * 3, mask=filled, other=0) + tl.load(
        table + (last - 1) * 3 + 1, mask=filled, other=0
    )
    length = tl.where(filled, end - start, 0).to(tl.int32)
    # Pointers move by whole steps (64 bits), what is added to them stays small (32 bits).
    pk = k + (start * G + i_g) * N
    o_k = ot[:, None] * (G * N) + ok[None, :]
    ox = ot[:, None] * (H * P) + ov[None, :]
    pv = v + (start * H + i_h) * P
    pb = pv
    if WITH_J:
        pb = beta + (start * H + i_h) * P
    pa = log_decay + start * H + i_h
    m = ot < length
    kk = tl.load(pk + o_k, mask=m[:, None] & mk, other=0.0)
    vv = tl.load(pv + ox, mask=m[:, None] & mv, other=0.0)
    bb = tl.load(pb + ox, mask=m[:, None] & mv, other=0.0)
    la = load_log_decay(pa + ot * H, m)
    for i in range((length + BT - 1) // BT):
        if i % EVERY == 0:
            at = ((first + i // EVERY).to(tl.int64) * heads + i_l) * (N * P)
            tl.store((M_out + at) + tile, M.to(M_out.dtype.element_ty), mask=inside)
            if WITH_J:
                tl.store((J_out + at) + tile, J.to(J_out.dtype.element_ty), mask=inside)
        # The next step's operands are on their way while this one's are used.
        pk += BT * G * N
        pv += BT * H * P
        pb += BT * H * P
        pa += BT * H
        m = (i + 1) * BT + ot < length
        k_next = tl.load(pk + o_k, mask=m[:, None] & mk, other=0.0)
        v_next = tl.load(pv + ox, mask=m[:, None] & mv, other=0.0)
        b_next = tl.load(pb + ox, mask=m[:, None] & mv, other=0.0)
        la_next = load_log_decay(pa + ot * H, m)
        g = tl.cumsum(la, 0)
        g_end = tl.sum(la, 0)
        w = tl.exp(g_end - g)[:, None]
        A = tl.exp(g_end)
        kf = kk.to(tl.float32)
        M = tl.dot(tl.trans((vv.to(tl.float32) * w).to(DOT)), kf.to(DOT), A * M, input_precision=PREC)
        if WITH_J:
            J = tl.dot(tl.trans((bb.to(tl.float32) * w).to(DOT)), (kf * kf).to(DOT), A * J, input_precision=PREC)
        kk = k_next
        vv = v_next
        bb = b_next
        la = la_next
    # The slots behind the last block of all, one per document, hold the final states.
    at = ((n_blocks + i_d).to(tl.int64) * heads + i_l) * (N * P)
    tl.store((M_out + at) + tile, M.to(M_out.dtype.element_ty), mask=inside)
    if WITH_J:
        tl.store((J_out + at) + tile, J.to(J_out.dtype.element_ty), mask=inside)


@triton.jit
def block_decays_kernel(log_decay, out, table, H: tl.constexpr, BH: tl.constexpr):
    # out[block, head] = exp of the block's summed log decays.
    NHB: tl.constexpr = (H + BH - 1) // BH
    pid = tl.program_id(0)
    block = pid // NHB
    h = (pid % NHB) * BH + tl.arange(0, BH)
    start = tl.load(table + block * 3).to(tl.int64)
    count = tl.load(table + block * 3 + 1)
    total = tl.zeros([BH], tl.float32)
    for t in range(count):
        total += load_log_decay(log_decay + (start + t) * H + h, h < H)
    tl.store(out + block.to(tl.int64) * H + h, tl.exp(total), mask=h < H)


@triton.jit
def reverse_states_kernel(
    decay, dM, dJ,  # of blocks; the last two in place
    last_dM, last_dJ, first_dM, first_dJ,  # of final states, read, and of initial ones, written
    documents, head0, heads,
    H: tl.constexpr, PN: tl.constexpr, BLOCK: tl.constexpr,
    HAS_LAST: tl.constexpr, STORE_FIRST: tl.constexpr, WITH_J: tl.constexpr,
):  # fmt: skip
    # dM[block] comes in as the block's own contribution and leaves as the gradient of the state at the block's END.
    pid = tl.program_id(0)
    NB: tl.constexpr = (PN + BLOCK - 1) // BLOCK
    at = (pid % NB) * BLOCK + tl.arange(0, BLOCK)
    m = at < PN
    row = pid // NB
    i_d = row // heads
    i_l = row % heads
    i_h = head0 + i_l
    state_row = (i_d * H + i_h).to(tl.int64) * PN
    carry_M = tl.zeros([BLOCK], tl.float32)
    carry_J = tl.zeros([BLOCK], tl.float32)
    if HAS_LAST:
        carry_M = tl.load(last_dM + state_row + at, mask=m, other=0.0)
        if WITH_J:
            carry_J = tl.load(last_dJ + state_row + at, mask=m, other=0.0)
    first = tl.load(documents + i_d)
    last = tl.load(documents + i_d + 1)
    # What one step needs is loaded a step ahead.
    p = ((last - 1).to(tl.int64) * heads + i_l) * PN + at
    any_block = m & (last > first)
    own_M = tl.load(dM + p, mask=any_block, other=0.0).to(tl.float32)
    own_J = tl.load(dJ + p, mask=any_block, other=0.0).to(tl.float32) if WITH_J else own_M
    A = tl.load(decay + (last - 1) * H + i_h, mask=last > first, other=0.0)
    for j in range(last - first):
        block = last - 1 - j
        more = m & (block > first)
        before = p - heads * PN
        next_M = tl.load(dM + before, mask=more, other=0.0).to(tl.float32)
        next_J = tl.load(dJ + before, mask=more, other=0.0).to(tl.float32) if WITH_J else next_M
        next_A = tl.load(decay + (block - 1) * H + i_h, mask=block > first, other=0.0)
        tl.store(dM + p, carry_M.to(dM.dtype.element_ty), mask=m)
        carry_M = A * carry_M + own_M
        if WITH_J:
            tl.store(dJ + p, carry_J.to(dJ.dtype.element_ty), mask=m)
            carry_J = A * carry_J + own_J
        own_M = next_M
        own_J = next_J
        A = next_A
        p = before
    if STORE_FIRST:
        tl.store(first_dM + state_row + at, carry_M, mask=m)
        if WITH_J:
            tl.store(first_dJ + state_row + at, carry_J, mask=m)


def dot_types(*tensors: Tensor):
    """How matrix products take their operands: (Triton dtype, precision of fp32 operands).

    bf16 inputs use bf16; fp16 ones go through tf32, which has their digits and a range that k^2 cannot leave; fp32
    ones are exact.
    """
    if all(x.dtype == torch.bfloat16 for x in tensors):
        return tl.bfloat16, "ieee"
    if any(x.dtype in (torch.bfloat16, torch.float16) for x in tensors):
        return tl.float32, "tf32"
    return tl.float32, "ieee"


def block_states(k, v, beta, log_decay, blocks: Blocks, initial, out, *, head0=0, heads=None, token_tile=64) -> None:
    """Write the states at every block's start into `out`, and behind them each document's final states.

    Args:
        k: [tokens, G, N].
        v: [tokens, H, P]; beta likewise, or None to leave J out.
        log_decay: [tokens, H].
        blocks: the layout of the tokens.
        initial: (M, J) [rows, H, P, N] fp32, or None.
        out: (M, J) [blocks.count + rows, heads, P, N] of any floating dtype.
        head0: the first head; `heads` are done (all by default).
        token_tile: tokens of one matrix product.
    """
    G, N = k.shape[1:]
    H, P = v.shape[1:]
    heads = H if heads is None else heads
    dot, precision = dot_types(k, v)
    BK, BV = min(64, power_of_two(N)), min(64, power_of_two(P))
    BT = min(token_tile, blocks.size)
    if dot == tl.float32:
        BK, BV, BT = min(32, BK), min(32, BV), min(32, BT)
    block_states_kernel[(blocks.rows * heads * triton.cdiv(N, BK) * triton.cdiv(P, BV),)](
        k, v, beta, log_decay, *(initial or (None, None)), *out,
        blocks.table, blocks.documents, head0, heads, blocks.count,
        H, G, N, P, BK, BV, BT, blocks.size // BT,
        initial is not None, beta is not None, dot, precision, num_warps=4,
    )  # fmt: skip


def reverse_states(log_decay, dM, dJ, last, first, blocks: Blocks, PN: int, head0: int, heads: int) -> None:
    """Turn each block's own state gradient into the gradient at its end, in place; see `reverse_states_kernel`.

    `last` is (dM, dJ) of the final states or None, `first` where those of the initial states go or None.
    """
    H = log_decay.shape[1]
    decay = torch.empty(blocks.count, H, dtype=torch.float32, device=log_decay.device)
    BH = min(32, power_of_two(H, 1))
    block_decays_kernel[(blocks.count * triton.cdiv(H, BH),)](log_decay, decay, blocks.table, H, BH, num_warps=1)
    BLOCK = min(512, power_of_two(PN))
    reverse_states_kernel[(blocks.rows * heads * triton.cdiv(PN, BLOCK),)](
        decay, dM, dJ, *(last or (None, None)), *(first or (None, None)), blocks.documents, head0, heads,
        H, PN, BLOCK, last is not None, first is not None, dJ is not None, num_warps=2,
    )  # fmt: skip
