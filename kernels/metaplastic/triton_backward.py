# ruff: noqa: E741  (I is the importance)
"""The backward pass in plain Triton, by matrix products over short blocks; `docs/kernels.md` has the derivation.

Three steps for a slab of heads: the states at block starts again, the part inside each block (all elementwise work),
the part that crosses block ends. No decay is divided by, so decays may underflow.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.triton_blocks import clear_first_tokens, make_blocks
from ..common.triton_launch import power_of_two
from .triton_states import block_states, dot_types, load_log_decay, reverse_states

# Scratch memory of the backward pass: heads are done in slabs that fit it.
SLAB_BYTES = 7 << 29


@triton.jit
def _read_out(I, M, q, ASM: tl.constexpr, DOT: tl.constexpr):
    """R = q / I, F = M / I and -R F in the dtype of the matrix products."""
    if ASM:
        # One reciprocal serves two elements: 1/a = b/(ab). R F in packed bf16.
        R, F, E = tl.inline_asm_elementwise(
            """{.reg .f32 p,r,x,y,a,b; .reg .b32 h,n;
            mul.f32 p, $3, $4; rcp.approx.ftz.f32 r, p; mul.f32 x, r, $4; mul.f32 y, r, $3;
            mul.f32 a, x, $5; mul.f32 b, y, $6; cvt.rn.bf16x2.f32 $1, b, a; cvt.rn.bf16x2.f32 h, y, x;
            mul.rn.bf16x2 $0, h, $7; mul.rn.bf16x2 h, $0, $1; neg.bf16x2 $2, h;}""",
            "=&r,=&r,=r,f,f,f,f,r", [I, M, q.to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        r = 1.0 / I
        Rf = r * q
        Ff = r * M
        R = Rf.to(DOT)
        F = Ff.to(DOT)
        E = (-Rf * Ff).to(DOT)
    return R, F, E


@triton.jit(do_not_specialize=["n_tokens"])
def inside_kernel(
    q, k, v, beta, do, log_decay, prior, M0, J0,  # inputs, and the states at block starts
    dM, dJ,  # written: what the block adds to the gradients of those states
    dq, dk, dv, db, s_out,  # written: partial sums
    table, head0, heads, n_tokens,  # blocks, and heads of this launch
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    S: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
    ASM: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    NKB: tl.constexpr = (N + BK - 1) // BK
    BM: tl.constexpr = 16
    pid = tl.program_id(0)
    i_k = pid % NKB
    row = pid // NKB
    block = row // heads
    i_l = row % heads
    i_h = head0 + i_l
    i_g = i_h // (H // G)
    if tl.load(table + block * 3 + 1) == 0:
        return  # an empty block: nothing is at its place in the states
    os = tl.arange(0, S)
    on = i_k * BK + tl.arange(0, BK)
    om = tl.arange(0, BM)
    ob = tl.arange(0, BV)
    mn = on < N
    ip = tl.load(prior + i_h).to(tl.float32)
    m = os < tl.load(table + block * 3 + 1)
    # Pointers move to the block's first token (64 bits) once, what is added to them stays small (32 bits).
    start = tl.load(table + block * 3).to(tl.int64)
    log_decay += start * H + i_h
    at = row.to(tl.int64) * (N * P)
    part = i_k.to(tl.int64) * n_tokens * heads + start * heads + i_l
    head = (start * H + i_h) * P
    q += (start * G + i_g) * N
    k += (start * G + i_g) * N
    v += head
    beta += head
    do += head
    M0 += at
    J0 += at
    dM += at
    dJ += at
    dv += part * P
    db += part * P
    s_out += part
    dq += (start * heads + i_l) * N
    dk += (start * heads + i_l) * N
    g = tl.cumsum(load_log_decay(log_decay + os * H, m), 0)
    # The upper triangle would overflow: it is cut before the exponential.
    L = tl.exp(tl.where(os[:, None] >= os[None, :], g[:, None] - g[None, :], float("-inf")))
    gt = tl.exp(g)
    pk = os[:, None] * (G * N) + on[None, :]
    mk = m[:, None] & mn[None, :]
    kf = tl.load(k + pk, mask=mk, other=0.0).to(tl.float32)
    qf = tl.load(q + pk, mask=mk, other=0.0).to(tl.float32)
    kk = kf.to(DOT)
    k2 = (kf * kf).to(DOT)
    kT = tl.trans(kk)
    k2T = tl.trans(k2)
    dqT = tl.zeros([BK, S], tl.float32)
    dkT = tl.zeros([BK, S], tl.float32)
    dk2T = tl.zeros([BK, S], tl.float32)
    s_sum = tl.zeros([BV, S], tl.float32)
    ones = tl.full([BK, 16], 1.0, DOT)
    for ig in range((P + BM - 1) // BM):
        dgT = tl.zeros([BK, BM], tl.float32)
        deT = tl.zeros([BK, BM], tl.float32)
        for iv in range(BM // BV):
            ov = ig * BM + iv * BV + ob
            mv = (ov < P)[:, None] & m[None, :]
            px = os[None, :] * (H * P) + ov[:, None]
            bb = tl.load(beta + px, mask=mv, other=0.0).to(tl.float32)
            vv = tl.load(v + px, mask=mv, other=0.0).to(tl.float32)
            dd = tl.load(do + px, mask=mv, other=0.0).to(tl.float32)
            ps = ov[:, None] * N + on[None, :]
            ms = (ov < P)[:, None] & mn[None, :]
            Jb = tl.load(J0 + ps, mask=ms, other=0.0).to(tl.float32)
            Mb = tl.load(M0 + ps, mask=ms, other=0.0).to(tl.float32)
            AJ3 = L[None, :, :] * bb[:, None, :]
            AV3 = L[None, :, :] * vv[:, None, :]
            # Padded tokens keep an importance of at least the prior, so nothing is divided by zero.
            I0 = tl.reshape(gt[None, :, None] * Jb[:, None, :] + ip, [BV * S, BK])
            I = tl.dot(tl.reshape(AJ3.to(DOT), [BV * S, S]), k2, I0, input_precision=PREC)
            Mi = tl.reshape(gt[None, :, None] * Mb[:, None, :], [BV * S, BK])
            M = tl.dot(tl.reshape(AV3.to(DOT), [BV * S, S]), kk, Mi, input_precision=PREC)
            R3, F3, E3 = _read_out(
                tl.reshape(I, [BV, S, BK]),
                tl.reshape(M, [BV, S, BK]),
                tl.broadcast_to(qf[None, :, :], [BV, S, BK]),
                ASM,
                DOT,
            )
            R = tl.reshape(R3, [BV * S, BK])
            F = tl.reshape(F3, [BV * S, BK])
            E = tl.reshape(E3, [BV * S, BK])
            Ld = L[None, :, :] * dd[:, :, None]
            X = tl.reshape(tl.dot(R, kT, input_precision=PREC), [BV, S, S])
            Y = tl.reshape(tl.dot(E, k2T, input_precision=PREC), [BV, S, S])
            po = os[None, :] * (heads * P) + ov[:, None]
            tl.store(dv + po, tl.sum(X * Ld, 1).to(dv.dtype.element_ty), mask=mv)
            tl.store(db + po, tl.sum(Y * Ld, 1).to(db.dtype.element_ty), mask=mv)
            s_sum -= dd * tl.sum(tl.reshape(tl.dot(E, ones, input_precision=PREC), [BV, S, 16]), 2)
            A1 = tl.reshape((AV3 * dd[:, :, None]).to(DOT), [BV * S, S])
            A2 = tl.reshape((AJ3 * dd[:, :, None]).to(DOT), [BV * S, S])
            Dq = tl.reshape(tl.where(os[None, :, None] == os[None, None, :], dd[:, :, None], 0.0).to(DOT), [BV * S, S])
            W = tl.where((iv * BV + ob)[:, None, None] == om[None, None, :], (dd * gt[None, :])[:, :, None], 0.0)
            W = tl.reshape(W.to(DOT), [BV * S, BM])
            RT = tl.trans(R)
            ET = tl.trans(E)
            dkT = tl.dot(RT, A1, dkT, input_precision=PREC)
            dgT = tl.dot(RT, W, dgT, input_precision=PREC)
            dk2T = tl.dot(ET, A2, dk2T, input_precision=PREC)
            deT = tl.dot(ET, W, deT, input_precision=PREC)
            dqT = tl.dot(tl.trans(F), Dq, dqT, input_precision=PREC)
        pg = (ig * BM + om)[None, :] * N + on[:, None]
        mg = (ig * BM + om < P)[None, :] & mn[:, None]
        tl.store(dM + pg, dgT.to(dM.dtype.element_ty), mask=mg)
        tl.store(dJ + pg, deT.to(dJ.dtype.element_ty), mask=mg)
    tl.store(s_out + os * heads, tl.sum(s_sum, 0) * 0.0625, mask=m)
    ph = os[None, :] * (heads * N) + on[:, None]
    mh = m[None, :] & mn[:, None]
    tl.store(dq + ph, dqT.to(dq.dtype.element_ty), mask=mh)
    tl.store(dk + ph, (dkT + 2.0 * tl.trans(kf) * dk2T).to(dk.dtype.element_ty), mask=mh)


@triton.jit(do_not_specialize=["n_tokens"])
def crossing_kernel(
    k, v, beta, log_decay, prior, M0, J0,  # inputs, and the states at block starts
    dM, dJ,  # gradients of the states at block ends
    dk, dv_part, db_part, s_part,  # partial sums; dk is added to
    dv, db, dla, s_out,  # written
    table, documents, head0, heads, n_tokens, n_blocks,  # blocks, and heads of this launch
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    S: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
    DV_PARTS: tl.constexpr, DK_PARTS: tl.constexpr, S_PARTS: tl.constexpr,
    DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    # What reaches a block's tokens through the states at its end, and everything that needs the whole of dv and dbeta.
    pid = tl.program_id(0)
    block = pid // heads
    i_l = pid % heads
    i_h = head0 + i_l
    i_g = i_h // (H // G)
    if tl.load(table + block * 3 + 1) == 0:
        return  # an empty block: nothing is at its place in the states
    os = tl.arange(0, S)
    on = tl.arange(0, BN)
    mn = on < N
    m = os < tl.load(table + block * 3 + 1)
    start = tl.load(table + block * 3).to(tl.int64)
    document = tl.load(table + block * 3 + 2)
    # Pointers move to the block's first token (64 bits) once, what is added to them stays small (32 bits).
    log_decay += start * H + i_h
    k += (start * G + i_g) * N
    dk += (start * heads + i_l) * (DK_PARTS * N)
    head = (start * H + i_h) * P
    part0 = (start * heads + i_l) * P
    at = pid.to(tl.int64) * (N * P)
    g = tl.cumsum(load_log_decay(log_decay + os * H, m), 0)
    g_end = tl.sum(tl.where(os == S - 1, g, 0.0), 0)
    w = tl.exp(g_end - g)
    kf = tl.load(k + os[:, None] * (G * N) + on[None, :], mask=m[:, None] & mn[None, :], other=0.0).to(tl.float32)
    kk = kf.to(DOT)
    k2 = (kf * kf).to(DOT)
    # The state at this block's end: the next block's start, or the document's final state behind the blocks.
    after = tl.where(block + 1 == tl.load(documents + document + 1), n_blocks + document, block + 1)
    end = (after.to(tl.int64) * heads + i_l) * (N * P)
    dk1 = tl.zeros([S, BN], tl.float32)
    dg = tl.zeros([S], tl.float32)
    carried = 0.0
    for iv in range((P + BV - 1) // BV):
        ov = iv * BV + tl.arange(0, BV)
        ms = (ov < P)[:, None] & mn[None, :]
        tile = ov[:, None] * N + on[None, :]
        mv = m[:, None] & (ov < P)[None, :]
        px = os[:, None] * (H * P) + ov[None, :]
        po = os[:, None] * (heads * P) + ov[None, :]
        dJe = tl.load((dJ + at) + tile, mask=ms, other=0.0)
        Je = tl.load((J0 + end) + tile, mask=ms, other=0.0)
        carried += tl.sum(tl.sum(dJe.to(tl.float32) * Je.to(tl.float32), 1), 0)
        bb = tl.load((beta + head) + px, mask=mv, other=0.0).to(tl.float32)
        db1 = w[:, None] * tl.dot(k2, tl.trans(dJe.to(DOT)), input_precision=PREC)
        for part in tl.static_range(DV_PARTS):
            db1 += tl.load((db_part + part0 + part * n_tokens.to(tl.int64) * heads * P) + po, mask=mv, other=0.0).to(
                tl.float32
            )
        tl.store((db + head) + px, db1.to(db.dtype.element_ty), mask=mv)
        dg -= tl.sum(bb * db1, 1)
        dk2 = tl.dot((bb * w[:, None]).to(DOT), dJe.to(DOT), input_precision=PREC)
        dk1 += 2.0 * kf * dk2
        dMe = tl.load((dM + at) + tile, mask=ms, other=0.0)
        Me = tl.load((M0 + end) + tile, mask=ms, other=0.0)
        carried += tl.sum(tl.sum(dMe.to(tl.float32) * Me.to(tl.float32), 1), 0)
        vv = tl.load((v + head) + px, mask=mv, other=0.0).to(tl.float32)
        dv1 = w[:, None] * tl.dot(kk, tl.trans(dMe.to(DOT)), input_precision=PREC)
        for part in tl.static_range(DV_PARTS):
            dv1 += tl.load((dv_part + part0 + part * n_tokens.to(tl.int64) * heads * P) + po, mask=mv, other=0.0).to(
                tl.float32
            )
        tl.store((dv + head) + px, dv1.to(dv.dtype.element_ty), mask=mv)
        dg -= tl.sum(vv * dv1, 1)
        dk1 = tl.dot((vv * w[:, None]).to(DOT), dMe.to(DOT), dk1, input_precision=PREC)
    ph = os[:, None] * (heads * DK_PARTS * N) + on[None, :]
    mk = m[:, None] & mn[None, :]
    dk1 += tl.load(dk + ph, mask=mk, other=0.0).to(tl.float32)
    tl.store(dk + ph, dk1.to(dk.dtype.element_ty), mask=mk)
    s = tl.zeros([S], tl.float32)
    for part in tl.static_range(S_PARTS):
        s += tl.load(
            (s_part + start * heads + i_l + part * n_tokens.to(tl.int64) * heads) + os * heads, mask=m, other=0.0
        )
    tl.store((s_out + start * H + i_h) + os * H, s, mask=m)
    dg += tl.load(prior + i_h).to(tl.float32) * s
    dg = tl.where(m, dg, 0.0)
    # The sum restarts here, or the rounding of all later tokens would pile up.
    total = tl.sum(dg, 0)
    tl.store((dla + start * H + i_h) + os * H, carried + total - tl.cumsum(dg, 0) + dg, mask=m)


@triton.jit
def add_heads_kernel(
    part, total, group0, rows,
    G: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    # total[token, first group + i] += the sum of that group's `rows` partial gradients of the token.
    pid = tl.program_id(0)
    token = (pid // GROUPS).to(tl.int64)
    i = pid % GROUPS
    on = tl.arange(0, BN)
    orow = tl.arange(0, BR)
    acc = tl.zeros([BR, BN], tl.float32)
    base = part + (token * GROUPS + i) * rows * N
    for r in range(0, rows, BR):
        m = (r + orow < rows)[:, None] & (on < N)[None, :]
        acc += tl.load(base + (r + orow)[:, None] * N + on[None, :], mask=m, other=0.0).to(tl.float32)
    p = total + (token * G + group0 + i) * N + on
    tl.store(p, tl.load(p, mask=on < N, other=0.0) + tl.sum(acc, 0), mask=on < N)


def add_heads(total: Tensor, part: Tensor, head0: int, per_group: int) -> None:
    """Add [tokens, heads, parts, N] of the heads from `head0` on to their groups in `total` [tokens, G, N] fp32."""
    tokens, heads, parts, N = part.shape
    groups = max(1, heads // per_group)
    rows = heads * parts // groups
    BN = power_of_two(N)
    add_heads_kernel[(tokens * groups,)](
        part, total, head0 // per_group, rows, total.shape[1], N, BN, max(1, 2048 // BN), groups, num_warps=4
    )


def slab_heads(heads: int, groups: int, bytes_a_head: int) -> list[tuple[int, int]]:
    """(first, count) of slabs of heads that fit `SLAB_BYTES`, about equal; no slab holds parts of two groups."""
    per_group = heads // groups
    most = max(1, SLAB_BYTES // max(1, bytes_a_head))
    if most >= per_group:
        slabs = -(-groups // (most // per_group))
        step = -(-groups // slabs) * per_group
        return [(h, min(step, heads - h)) for h in range(0, heads, step)]
    step = -(-per_group // -(-per_group // most))
    return [(g * per_group + h, min(step, per_group - h)) for g in range(groups) for h in range(0, per_group, step)]


@dataclass(frozen=True)
class Inside:
    """The part of the backward pass inside blocks, and how it lays out what it leaves.

    Attributes:
        block: tokens of a block.
        store: dtype of block states, of their gradients, and of partial sums.
        dv_parts: partial sums of dv and dbeta ([dv_parts, tokens, heads, P]).
        dk_parts: partial sums of dq and dk per head ([tokens, heads, dk_parts, N]).
        s_parts: partial sums of s ([s_parts, tokens, heads] fp32).
        launch: called with (inputs, states, state gradients, (dq, dk, dv, db, s), blocks, first head, heads).
    """

    block: int
    store: torch.dtype
    dv_parts: int
    dk_parts: int
    s_parts: int
    launch: Callable


def plain_inside(k: Tensor, v: Tensor, asm: bool) -> Inside:
    """The plain-Triton kernel; `asm` allows the inline assembly of NVIDIA GPUs."""
    N = k.shape[2]
    dot, precision = dot_types(k, v)
    half = dot == tl.bfloat16
    BK = min(64 if half else 32, power_of_two(N))
    parts = triton.cdiv(N, BK)
    S = 32 if half else 16

    def launch(inputs, states, d_states, partial, blocks, head0, heads):
        q, k, v, beta, log_decay, prior, do = inputs
        inside_kernel[(blocks.count * heads * parts,)](
            q, k, v, beta, do, log_decay, prior, *states, *d_states, *partial,
            blocks.table, head0, heads, k.shape[0],
            v.shape[1], k.shape[1], N, v.shape[2], S, 2 if half else 1, BK,
            asm and half, dot, precision, num_warps=4, num_stages=1,
        )  # fmt: skip

    return Inside(S, torch.bfloat16 if half else torch.float32, parts, 1, parts, launch)


def backward(
    q, k, v, beta, log_decay, prior, initial, do, last, inside: Inside, *, batch, length, cu_seqlens=None
) -> tuple[Tensor, ...]:
    """Gradients of all inputs and of the initial states.

    Args:
        q: [tokens, G, N]; k likewise.
        v: [tokens, H, P]; beta and do likewise.
        log_decay: [tokens, H].
        prior: [H].
        initial: (M, J) [rows, H, P, N] fp32, or None.
        last: (dM, dJ) of the final states [rows, H, P, N] fp32, or None.
        inside: what works inside blocks.
        batch: sequences of `length` tokens; packed documents when `cu_seqlens` is given.

    Returns:
        dq, dk in fp32, dv, dbeta in the inputs' dtype, dlog_decay and dprior in fp32, dM and dJ of the initial states
        (or None).
    """
    n_tokens, G, N = k.shape
    H, P = v.shape[1:]
    dot, precision = dot_types(k, v)
    BV = min(64 if dot == tl.bfloat16 else 16, power_of_two(P))
    blocks = make_blocks(batch, length, inside.block, k.device, cu_seqlens)
    bytes_a_head = (4 * blocks.count + 2 * blocks.rows) * P * N * inside.store.itemsize
    bytes_a_head += n_tokens * (
        2 * N * inside.dk_parts * inside.store.itemsize + 8 * P * inside.dv_parts + 4 * inside.s_parts
    )
    new = lambda *shape, dtype=torch.float32: torch.empty(*shape, dtype=dtype, device=k.device)  # noqa: E731
    dq, dk = (torch.zeros(n_tokens, G, N, dtype=torch.float32, device=k.device) for _ in range(2))
    dv, db = new(n_tokens, H, P, dtype=v.dtype), new(n_tokens, H, P, dtype=beta.dtype)
    dla, s = new(n_tokens, H), new(n_tokens, H)
    first = None if initial is None else tuple(torch.empty_like(x) for x in initial)
    for head0, heads in slab_heads(H, G, bytes_a_head):
        states = tuple(new(blocks.count + blocks.rows, heads, P, N, dtype=inside.store) for _ in range(2))
        block_states(k, v, beta, log_decay, blocks, initial, states, head0=head0, heads=heads)
        d_states = tuple(new(blocks.count, heads, P, N, dtype=inside.store) for _ in range(2))
        dq_h, dk_h = (new(n_tokens, heads, inside.dk_parts, N, dtype=inside.store) for _ in range(2))
        dv_h, db_h = (new(inside.dv_parts, n_tokens, heads, P, dtype=inside.store) for _ in range(2))
        s_h = new(inside.s_parts, n_tokens, heads)
        partial = (dq_h, dk_h, dv_h, db_h, s_h)
        inside.launch((q, k, v, beta, log_decay, prior, do), states, d_states, partial, blocks, head0, heads)
        add_heads(dq, dq_h, head0, H // G)
        reverse_states(log_decay, *d_states, last, first, blocks, P * N, head0, heads)
        crossing_kernel[(blocks.count * heads,)](
            k, v, beta, log_decay, prior, *states, *d_states, dk_h, dv_h, db_h, s_h, dv, db, dla, s,
            blocks.table, blocks.documents, head0, heads, n_tokens, blocks.count,
            H, G, N, P, power_of_two(blocks.size), power_of_two(N), BV,
            inside.dv_parts, inside.dk_parts, inside.s_parts, dot, precision, num_warps=4,
        )  # fmt: skip
        add_heads(dk, dk_h, head0, H // G)
    if initial is None:
        clear_first_tokens(dla, batch, cu_seqlens)
    return dq, dk, dv, db, dla, -s.sum(0), *(first or (None, None))
