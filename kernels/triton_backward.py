# ruff: noqa: E501, E741  (kernel signatures are long; I is the importance)
"""The backward pass in plain Triton, by matrix products over short blocks; `docs/kernels.md` has the derivation.

Three steps for a slab of heads: the states at block starts again, the part inside each block (all elementwise work), the
part that crosses block ends. No decay is divided by, so decays may underflow.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_blocks import make_blocks
from .triton_states import block_states, dot_types, load_log_decay, power_of_two, reverse_states

SLAB_BYTES = 1 << 30


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
            "=&r,=&r,=r,f,f,f,f,r", [I, M, q.to(tl.bfloat16)], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        r = 1.0 / I
        Rf = r * q
        Ff = r * M
        R = Rf.to(DOT)
        F = Ff.to(DOT)
        E = (-Rf * Ff).to(DOT)
    return R, F, E


@triton.jit
def inside_kernel(
    q, k, v, beta, do, log_decay, prior, M0, J0, dM, dJ, dq, dk, dv, db, s_out, table, head0, heads, n_tokens,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
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
    os = tl.arange(0, S)
    on = i_k * BK + tl.arange(0, BK)
    om = tl.arange(0, BM)
    ob = tl.arange(0, BV)
    mn = on < N
    ip = tl.load(prior + i_h).to(tl.float32)
    m = os < tl.load(table + block * 3 + 1)
    t = tl.load(table + block * 3).to(tl.int64) + os
    g = tl.cumsum(load_log_decay(log_decay + t * H + i_h, m), 0)
    # The upper triangle would overflow: it is cut before the exponential.
    L = tl.exp(tl.where(os[:, None] >= os[None, :], g[:, None] - g[None, :], float("-inf")))
    gt = tl.exp(g)
    pk = (t[:, None] * G + i_g) * N + on[None, :]
    mk = m[:, None] & mn[None, :]
    kf = tl.load(k + pk, mask=mk, other=0.0).to(tl.float32)
    qf = tl.load(q + pk, mask=mk, other=0.0).to(tl.float32)
    kk = kf.to(DOT)
    k2 = (kf * kf).to(DOT)
    kT = tl.trans(kk)
    k2T = tl.trans(k2)
    at = row.to(tl.int64) * (N * P)
    dqT = tl.zeros([BK, S], tl.float32)
    dkT = tl.zeros([BK, S], tl.float32)
    dk2T = tl.zeros([BK, S], tl.float32)
    s_sum = tl.zeros([BV, S], tl.float32)
    ones = tl.full([BK, 16], 1.0, DOT)
    part = i_k.to(tl.int64) * n_tokens * heads
    for ig in range((P + BM - 1) // BM):
        dgT = tl.zeros([BK, BM], tl.float32)
        deT = tl.zeros([BK, BM], tl.float32)
        for iv in range(BM // BV):
            ov = ig * BM + iv * BV + ob
            mv = (ov < P)[:, None] & m[None, :]
            px = (t[None, :] * H + i_h) * P + ov[:, None]
            bb = tl.load(beta + px, mask=mv, other=0.0).to(tl.float32)
            vv = tl.load(v + px, mask=mv, other=0.0).to(tl.float32)
            dd = tl.load(do + px, mask=mv, other=0.0).to(tl.float32)
            ps = at + ov[:, None] * N + on[None, :]
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
            po = part * P + ((t[None, :] * heads) + i_l) * P + ov[:, None]
            tl.store(dv + po, tl.sum(X * Ld, 1), mask=mv)
            tl.store(db + po, tl.sum(Y * Ld, 1), mask=mv)
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
        pg = at + (ig * BM + om)[None, :] * N + on[:, None]
        mg = (ig * BM + om < P)[None, :] & mn[:, None]
        tl.store(dM + pg, dgT.to(dM.dtype.element_ty), mask=mg)
        tl.store(dJ + pg, deT.to(dJ.dtype.element_ty), mask=mg)
    tl.store(s_out + part + t * heads + i_l, tl.sum(s_sum, 0) * 0.0625, mask=m)
    ph = (t[None, :] * heads + i_l) * N + on[:, None]
    mh = m[None, :] & mn[:, None]
    tl.store(dq + ph, dqT.to(dq.dtype.element_ty), mask=mh)
    tl.store(dk + ph, (dkT + 2.0 * tl.trans(kf) * dk2T).to(dk.dtype.element_ty), mask=mh)


@triton.jit
def crossing_kernel(
    k, v, beta, log_decay, prior, M0, J0, dM, dJ, dk, dv_part, db_part, s_part, dv, db, dla, s_out, table, documents, head0, heads, n_tokens, n_blocks,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
    PARTS: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    # What reaches a block's tokens through the states at its end, and everything that needs the whole of dv and dbeta.
    pid = tl.program_id(0)
    block = pid // heads
    i_l = pid % heads
    i_h = head0 + i_l
    i_g = i_h // (H // G)
    os = tl.arange(0, S)
    on = tl.arange(0, BN)
    mn = on < N
    m = os < tl.load(table + block * 3 + 1)
    t = tl.load(table + block * 3).to(tl.int64) + os
    document = tl.load(table + block * 3 + 2)
    g = tl.cumsum(load_log_decay(log_decay + t * H + i_h, m), 0)
    g_end = tl.sum(tl.where(os == S - 1, g, 0.0), 0)
    w = tl.exp(g_end - g)
    kf = tl.load(k + (t[:, None] * G + i_g) * N + on[None, :], mask=m[:, None] & mn[None, :], other=0.0).to(tl.float32)
    kk = kf.to(DOT)
    k2 = (kf * kf).to(DOT)
    at = pid.to(tl.int64) * (N * P)
    # The state at this block's end: the next block's start, or the document's final state behind the blocks.
    after = tl.where(block + 1 == tl.load(documents + document + 1), n_blocks + document, block + 1)
    end = (after.to(tl.int64) * heads + i_l) * (N * P)
    dkb = tl.zeros([S, BN], tl.float32)
    dk2 = tl.zeros([S, BN], tl.float32)
    dg = tl.zeros([S], tl.float32)
    carried = 0.0
    for iv in range((P + BV - 1) // BV):
        ov = iv * BV + tl.arange(0, BV)
        ms = (ov < P)[:, None] & mn[None, :]
        tile = ov[:, None] * N + on[None, :]
        dMe = tl.load(dM + at + tile, mask=ms, other=0.0).to(tl.float32)
        dJe = tl.load(dJ + at + tile, mask=ms, other=0.0).to(tl.float32)
        Me = tl.load(M0 + end + tile, mask=ms, other=0.0).to(tl.float32)
        Je = tl.load(J0 + end + tile, mask=ms, other=0.0).to(tl.float32)
        carried += tl.sum(tl.sum(dMe * Me + dJe * Je, 1), 0)
        mv = m[:, None] & (ov < P)[None, :]
        px = (t[:, None] * H + i_h) * P + ov[None, :]
        vv = tl.load(v + px, mask=mv, other=0.0).to(tl.float32)
        bb = tl.load(beta + px, mask=mv, other=0.0).to(tl.float32)
        dMh = dMe.to(DOT)
        dJh = dJe.to(DOT)
        dv1 = w[:, None] * tl.dot(kk, tl.trans(dMh), input_precision=PREC)
        db1 = w[:, None] * tl.dot(k2, tl.trans(dJh), input_precision=PREC)
        po = (t[:, None] * heads + i_l) * P + ov[None, :]
        for part in tl.static_range(PARTS):
            dv1 += tl.load(dv_part + part * n_tokens * heads * P + po, mask=mv, other=0.0)
            db1 += tl.load(db_part + part * n_tokens * heads * P + po, mask=mv, other=0.0)
        tl.store(dv + px, dv1.to(dv.dtype.element_ty), mask=mv)
        tl.store(db + px, db1.to(db.dtype.element_ty), mask=mv)
        dg -= tl.sum(vv * dv1 + bb * db1, 1)
        dkb = tl.dot((vv * w[:, None]).to(DOT), dMh, dkb, input_precision=PREC)
        dk2 = tl.dot((bb * w[:, None]).to(DOT), dJh, dk2, input_precision=PREC)
    ph = (t[:, None] * heads + i_l) * N + on[None, :]
    mk = m[:, None] & mn[None, :]
    dkb += 2.0 * kf * dk2 + tl.load(dk + ph, mask=mk, other=0.0).to(tl.float32)
    tl.store(dk + ph, dkb.to(dk.dtype.element_ty), mask=mk)
    s = tl.zeros([S], tl.float32)
    for part in tl.static_range(PARTS):
        s += tl.load(s_part + part * n_tokens * heads + t * heads + i_l, mask=m, other=0.0)
    tl.store(s_out + t * H + i_h, s, mask=m)
    dg += tl.load(prior + i_h).to(tl.float32) * s
    dg = tl.where(m, dg, 0.0)
    # The sum restarts here, or the rounding of all later tokens would pile up.
    total = tl.sum(dg, 0)
    tl.store(dla + t * H + i_h, carried + total - tl.cumsum(dg, 0) + dg, mask=m)


def slab_heads(heads: int, groups: int, bytes_a_head: int) -> list[tuple[int, int]]:
    """(first, count) of the slabs of heads that fit `SLAB_BYTES`; no slab holds parts of two groups."""
    per_group = heads // groups
    most = max(1, SLAB_BYTES // max(1, bytes_a_head))
    if most >= per_group:
        step = (most // per_group) * per_group
        return [(h, min(step, heads - h)) for h in range(0, heads, step)]
    return [(g * per_group + h, min(most, per_group - h)) for g in range(groups) for h in range(0, per_group, most)]


def backward(
    q, k, v, beta, log_decay, prior, initial, do, last, *, batch, length, cu_seqlens=None, asm=False, block=None
) -> tuple[Tensor, ...]:
    """Gradients of all inputs and of the initial states.

    Args:
        q: [tokens, G, N]; k likewise.
        v: [tokens, H, P]; beta and do likewise.
        log_decay: [tokens, H].
        prior: [H].
        initial: (M, J) [rows, H, P, N] fp32, or None.
        last: (dM, dJ) of the final states [rows, H, P, N] fp32, or None.
        batch: sequences of `length` tokens; packed documents when `cu_seqlens` is given.
        asm: use the inline assembly of NVIDIA GPUs (bf16 only).
        block: tokens of a block.

    Returns:
        dq, dk, dv, dbeta, dlog_decay in fp32 or the inputs' dtype, dprior fp32, dM and dJ of the initial states (or None).
    """
    n_tokens, G, N = k.shape
    H, P = v.shape[1:]
    dot, precision = dot_types(k, v)
    half = dot == tl.bfloat16
    S = block or (32 if half else 16)
    BV = 2 if half else 1
    BK = min(64 if half else 32, power_of_two(N))
    blocks = make_blocks(batch, length, S, k.device, cu_seqlens)
    store = torch.bfloat16 if half else torch.float32
    parts = triton.cdiv(N, BK)
    state_bytes = (4 * blocks.count + 2 * blocks.rows) * P * N * store.itemsize
    slabs = slab_heads(H, G, state_bytes + n_tokens * (2 * N * store.itemsize + 8 * P * parts))
    new = lambda *shape, dtype=torch.float32: torch.empty(*shape, dtype=dtype, device=k.device)  # noqa: E731
    dq, dk = (torch.zeros(n_tokens, G, N, dtype=torch.float32, device=k.device) for _ in range(2))
    dv, db = new(n_tokens, H, P, dtype=v.dtype), new(n_tokens, H, P, dtype=beta.dtype)
    dla, s = new(n_tokens, H), new(n_tokens, H)
    first = None if initial is None else tuple(torch.empty_like(x) for x in initial)
    for head0, heads in slabs:
        states = tuple(new(blocks.count + blocks.rows, heads, P, N, dtype=store) for _ in range(2))
        block_states(k, v, beta, log_decay, blocks, initial, states, head0=head0, heads=heads)
        dM, dJ = (new(blocks.count, heads, P, N, dtype=store) for _ in range(2))
        dq_h, dk_h = (new(n_tokens, heads, N, dtype=store) for _ in range(2))
        dv_h, db_h = (new(parts, n_tokens, heads, P) for _ in range(2))
        s_h = new(parts, n_tokens, heads)
        inside_kernel[(blocks.count * heads * parts,)](
            q, k, v, beta, do, log_decay, prior, *states, dM, dJ, dq_h, dk_h, dv_h, db_h, s_h, blocks.table, head0, heads, n_tokens,
            H, G, N, P, S, BV, BK, asm and half, dot, precision, num_warps=4, num_stages=1,
        )  # fmt: skip
        reverse_states(log_decay, dM, dJ, last, first, blocks, P * N, head0, heads)
        crossing_kernel[(blocks.count * heads,)](
            k, v, beta, log_decay, prior, *states, dM, dJ, dk_h, dv_h, db_h, s_h, dv, db, dla, s, blocks.table, blocks.documents,
            head0, heads, n_tokens, blocks.count, H, G, N, P, S, power_of_two(N), min(32 if half else 16, power_of_two(P)), parts, dot, precision,
            num_warps=4,
        )  # fmt: skip
        add_heads(dq, dq_h, head0, H // G)
        add_heads(dk, dk_h, head0, H // G)
    return dq, dk, dv, db, dla, -s.sum(0), *(first or (None, None))


def add_heads(total: Tensor, part: Tensor, head0: int, per_group: int) -> None:
    """Add [tokens, heads, N] of the heads from `head0` on to their groups in `total` [tokens, G, N]."""
    heads = part.shape[1]
    group = head0 // per_group
    if heads <= per_group:
        total[:, group] += part.sum(1, dtype=torch.float32)
    else:
        shaped = part.view(part.shape[0], heads // per_group, per_group, part.shape[2])
        total[:, group : group + heads // per_group] += shaped.sum(2, dtype=torch.float32)
