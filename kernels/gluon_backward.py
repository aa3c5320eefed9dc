# ruff: noqa: E501  (kernel signatures are long; I is the importance)
"""The part of the backward pass inside blocks, fast, for NVIDIA GPUs: a time loop in fp32 that walks backwards.

A block is cut into segments over which the log decays sum to at most a few nats and importance grows by at most as much over
the prior. Forwards once, keeping both states at every segment's end; then backwards, where a state is undone token by token,
M_{t-1} = M_t - v_t k_t in the segment's scale. Undoing amplifies rounding by no more than the segment's decay and growth, and
what a steep decay has erased starts a new segment, so nothing is ever divided by a decay that may underflow. Sums over
channels and keys are finished through shared memory, two tokens a time.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_forward import reciprocal
from .triton_backward import Inside
from .triton_states import load_log_decay

BLOCK = 64
# Nats a segment: undoing a state multiplies the rounding of fp32 by at most exp of this, by decay and by growth.
MAX_NATS = {torch.bfloat16: 11.0, torch.float16: 9.0}
SLOTS = 16  # segment ends kept in scratch memory; what lies behind them is derived again from the last one kept
PROGRAMS = 2  # programs a multiprocessor holds


@triton.jit
def growth_kernel(k, beta, growth, H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    # growth[t]: the most that token t adds to the importance of any synapse of a head.
    NHB: tl.constexpr = (H + BH - 1) // BH
    pid = tl.program_id(0)
    token = (pid // NHB).to(tl.int64)
    h = (pid % NHB) * BH + tl.arange(0, BH)
    m = (h < H)[:, None]
    on = tl.arange(0, BN)
    op = tl.arange(0, BP)
    row = (token * G + h // (H // G)) * N
    kk = tl.load(k + row[:, None] + on[None, :], mask=m & (on < N)[None, :], other=0.0).to(tl.float32)
    bb = tl.load(beta + (token * H + h)[:, None] * P + op[None, :], mask=m & (op < P)[None, :], other=0.0)
    tl.store(growth + token * H + h, tl.max(kk * kk, 1) * tl.max(bb.to(tl.float32), 1), mask=h < H)


@triton.jit
def segments_kernel(
    log_decay, growth, prior, within, entry, cuts, table,
    H: tl.constexpr, C: tl.constexpr, LIMIT: tl.constexpr, GROWTH: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    # within[t]: the log decays from the segment's first token (left out) to t. entry[s]: the decay into segment s.
    # cuts: the number of segments, their first tokens, the block's token count.
    # added: at most so much importance, in the segment's scale, is undone down to its first token, where the prior may be all.
    NHB: tl.constexpr = (H + BH - 1) // BH
    pid = tl.program_id(0)
    block = pid // NHB
    h = (pid % NHB) * BH + tl.arange(0, BH)
    m = h < H
    start = tl.load(table + block * 3).to(tl.int64)
    count = tl.load(table + block * 3 + 1)
    base = (block.to(tl.int64) * H + h) * (C + 2)
    most = tl.load(prior + h, mask=m, other=1.0).to(tl.float32) * GROWTH
    total = tl.zeros([BH], tl.float32)
    added = tl.zeros([BH], tl.float32)
    n = tl.zeros([BH], tl.int32)
    for t in range(count):
        p = log_decay + (start + t) * H + h
        x = load_log_decay(p, m)
        new = tl.load(growth + (start + t) * H + h, mask=m, other=0.0)
        # Looking one token ahead keeps lengths even (tokens are walked in pairs) unless one token forces a cut.
        pair = m & (t + 1 < count) & (t % 2 == 0)
        ahead = load_log_decay(p + H, pair)
        new_ahead = tl.load(growth + (start + t + 1) * H + h, mask=pair, other=0.0)
        here = added + new * tl.exp(tl.minimum(-total - x, 80.0))
        there = here + new_ahead * tl.exp(tl.minimum(-total - x - ahead, 80.0))
        cut = (total + x < -LIMIT) | (t == 0) | (here > most)
        cut |= (t % 2 == 0) & ((total + x + ahead < -LIMIT) | (there > most))
        tl.store(entry + base + n, tl.exp(total + x), mask=m & cut)
        tl.store(cuts + base + 1 + n, n * 0 + t, mask=m & cut)
        # A segment's first token is never undone: what it adds is part of the state that its segment begins with.
        total = tl.where(cut, 0.0, total + x)
        added = tl.where(cut, 0.0, here)
        n += cut.to(tl.int32)
        tl.store(within + (start + t) * H + h, total, mask=m)
    tl.store(cuts + base + 1 + n, n * 0 + count, mask=m)
    tl.store(cuts + base, n, mask=m)


@gluon.jit
def advance(first, last, M, J, k_row, v_row, b_row, lay: gl.constexpr, C: gl.constexpr):
    """Both scaled states over tokens first .. last of a segment; operands are loaded a token ahead."""
    k1 = k_row.index(first).load(gl.SliceLayout(0, lay))
    v1 = v_row.index(first).load(gl.SliceLayout(1, lay))
    b1 = b_row.index(first).load(gl.SliceLayout(1, lay))
    for t in range(first + 1, last + 1):
        after = gl.minimum(t, C - 1)
        k_next = k_row.index(after).load(gl.SliceLayout(0, lay))
        v_next = v_row.index(after).load(gl.SliceLayout(1, lay))
        b_next = b_row.index(after).load(gl.SliceLayout(1, lay))
        M = M + v1[:, None] * k1[None, :]
        J = J + b1[:, None] * (k1 * k1)[None, :]
        k1 = k_next
        v1 = v_next
        b1 = b_next
    return M, J


@gluon.jit
def token(k1, q1, v1, b1, d1, i1, M, J, dM, dJ, s_q, s_k, s_v, s_b, lay: gl.constexpr, by_warp: gl.constexpr,
          N: gl.constexpr, PV: gl.constexpr, PK: gl.constexpr, LV: gl.constexpr, LK: gl.constexpr, NW: gl.constexpr):  # fmt: skip
    """One token backwards; each thread's sums go to shared memory, the sum for s is returned a warp."""
    BP: gl.constexpr = PV * LV
    KP: gl.constexpr = LK * NW
    part: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, PV, PK], [LV, 1, LK], [1, 1, NW], [2, 1, 0]))
    k2 = k1 * k1
    r = reciprocal(J + i1[:, None])
    F = M * r
    R = q1[None, :] * r
    X = d1[:, None] * R
    dM = dM + X
    XF = X * F
    dJ = dJ - XF
    s_q.store(gl.convert_layout(gl.sum(gl.reshape(d1[:, None] * F, [LV, PV, N]), 1), part))
    dk1 = gl.convert_layout(gl.sum(gl.reshape(dM * v1[:, None], [LV, PV, N]), 1), part)
    dk2 = gl.convert_layout(gl.sum(gl.reshape(dJ * b1[:, None], [LV, PV, N]), 1), part)
    s_k.store(dk1 + dk2 * gl.convert_layout(k1 + k1, gl.SliceLayout(0, part))[None, :])
    s_v.store(gl.sum(gl.reshape(dM * k1[None, :], [BP, KP, PK]), 2))
    s_b.store(gl.sum(gl.reshape(dJ * k2[None, :], [BP, KP, PK]), 2))
    mine = gl.reshape(gl.permute(gl.reshape(XF, [LV, PV, NW, LK, PK]), (0, 2, 3, 1, 4)), [LV, NW, LK, PV * PK])
    s = gl.convert_layout(gl.sum(gl.sum(gl.sum(mine, 3), 2), 0), by_warp)
    M = M - v1[:, None] * k1[None, :]
    J = J - b1[:, None] * k2[None, :]
    return M, J, dM, dJ, s


@gluon.jit
def finish(e, s_q, s_k, s_v, s_b, over_v: gl.constexpr, over_k: gl.constexpr):
    """dq, dk of a token over keys, dv, dbeta over channels, from what the threads left in shared memory."""
    dq = gl.sum(s_q.load(over_v), 0)
    dk = gl.sum(s_k.load(over_v), 0)
    dv = gl.sum(s_v.load(over_k), 1) * e
    db = gl.sum(s_b.load(over_k), 1) * e
    return dq, dk, dv, db


@gluon.jit(do_not_specialize=["n_tokens"])
def inside_loop_kernel(
    q, k, v, beta, do, within, entry, cuts, prior, M0, J0, dM_out, dJ_out, dq, dk, dv, db, s_out, table, scratch, total, head0, heads, n_tokens,
    H: gl.constexpr, G: gl.constexpr, N: gl.constexpr, P: gl.constexpr, C: gl.constexpr, NW: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    # A thread owns 4 channels and 8 keys, a program 32 channels and all keys.
    PV: gl.constexpr = 4
    PK: gl.constexpr = 8
    LV: gl.constexpr = 8
    LK: gl.constexpr = 4
    BP: gl.constexpr = PV * LV
    NVB: gl.constexpr = P // BP
    KP: gl.constexpr = LK * NW
    RT: gl.constexpr = NW * 32 // BP  # threads that share a channel in the sums over keys
    lay: gl.constexpr = gl.BlockedLayout([PV, PK], [LV, LK], [1, NW], [1, 0])
    by_channel: gl.constexpr = gl.SliceLayout(1, lay)
    by_key: gl.constexpr = gl.SliceLayout(0, lay)
    load_k: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [NW, 1], [1, 0])
    load_v: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [NW, 1], [1, 0])
    over_v: gl.constexpr = gl.BlockedLayout([LV, 1], [1, 32], [1, NW], [1, 0])
    over_k: gl.constexpr = gl.BlockedLayout([1, KP // RT], [32 // RT, RT], [NW, 1], [0, 1])
    by_warp: gl.constexpr = gl.SliceLayout(
        0, gl.SliceLayout(2, gl.BlockedLayout([1, 1, 1], [1, 1, 32], [1, NW, 1], [2, 1, 0]))
    )
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # Swizzles that keep 16-byte stores of the sums free of bank conflicts.
    sums_v: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    sums_k: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [0, 1])
    k_sm = gl.allocate_shared_memory(gl.float32, [C, N], plain)
    q_sm = gl.allocate_shared_memory(q.dtype.element_ty, [C, N], plain)
    v_sm = gl.allocate_shared_memory(gl.float32, [C, BP], plain)
    b_sm = gl.allocate_shared_memory(gl.float32, [C, BP], plain)
    d_sm = gl.allocate_shared_memory(gl.float32, [C, BP], plain)
    e_sm = gl.allocate_shared_memory(gl.float32, [C, 1], plain)
    a_q = gl.allocate_shared_memory(gl.float32, [LV, N], sums_v)
    a_k = gl.allocate_shared_memory(gl.float32, [LV, N], sums_v)
    a_v = gl.allocate_shared_memory(gl.float32, [BP, KP], sums_k)
    a_b = gl.allocate_shared_memory(gl.float32, [BP, KP], sums_k)
    c_q = gl.allocate_shared_memory(gl.float32, [LV, N], sums_v)
    c_k = gl.allocate_shared_memory(gl.float32, [LV, N], sums_v)
    c_v = gl.allocate_shared_memory(gl.float32, [BP, KP], sums_k)
    c_b = gl.allocate_shared_memory(gl.float32, [BP, KP], sums_k)
    k_row = k_sm._reinterpret(gl.float32, [C, N], rows)
    q_row = q_sm._reinterpret(q.dtype.element_ty, [C, N], rows)
    v_row = v_sm._reinterpret(gl.float32, [C, BP], rows)
    b_row = b_sm._reinterpret(gl.float32, [C, BP], rows)
    d_row = d_sm._reinterpret(gl.float32, [C, BP], rows)
    e_row = e_sm._reinterpret(gl.float32, [C, 1], rows)
    kt = gl.arange(0, C, layout=gl.SliceLayout(1, load_k))
    kn = gl.arange(0, N, layout=gl.SliceLayout(0, load_k))
    vt = gl.arange(0, C, layout=gl.SliceLayout(1, load_v))
    vn = gl.arange(0, BP, layout=gl.SliceLayout(0, load_v))
    ov = gl.arange(0, BP, layout=by_channel)
    on = gl.arange(0, N, layout=by_key)
    cn = gl.arange(0, N, layout=gl.SliceLayout(0, over_v))
    cv = gl.arange(0, BP, layout=gl.SliceLayout(1, over_k))
    cw = gl.arange(0, NW, layout=by_warp)
    tile = ov[:, None] * N + on[None, :]
    kept = scratch + gl.program_id(0).to(gl.int64) * (2 * SLOTS * BP * N)
    step_k = heads * (NVB * N)
    step_v = heads * P
    for work in range(gl.program_id(0), total, gl.num_programs(0)):
        i_v = work % NVB
        row = work // NVB
        block = row // heads
        i_l = row % heads
        i_h = head0 + i_l
        i_g = i_h // (H // G)
        start = gl.load(table + block * 3).to(gl.int64)
        count = gl.load(table + block * 3 + 1)
        ip = gl.load(prior + i_h).to(gl.float32)
        at = row.to(gl.int64) * (N * P) + i_v * (BP * N)
        M = gl.load((M0 + at) + tile).to(gl.float32)
        J = gl.load((J0 + at) + tile).to(gl.float32)
        ok = kt[:, None] * (G * N) + kn[None, :]
        ox = vt[:, None] * (H * P) + vn[None, :]
        head = (start * H + i_h) * P + i_v * BP
        mk = (kt < count)[:, None]
        mv = vt < count
        gl.thread_barrier()
        k_sm.store(gl.load((k + (start * G + i_g) * N) + ok, mask=mk, other=0.0).to(gl.float32))
        q_sm.store(gl.load((q + (start * G + i_g) * N) + ok, mask=mk, other=0.0))
        e = gl.exp(-gl.load((within + start * H + i_h) + vt * H, mask=mv, other=0.0))
        v_sm.store(gl.load((v + head) + ox, mask=mv[:, None], other=0.0).to(gl.float32) * e[:, None])
        b_sm.store(gl.load((beta + head) + ox, mask=mv[:, None], other=0.0).to(gl.float32) * e[:, None])
        d_sm.store(gl.load((do + head) + ox, mask=mv[:, None], other=0.0).to(gl.float32))
        e_sm.store(e[:, None])
        gl.thread_barrier()
        dM = gl.zeros([BP, N], gl.float32, lay)
        dJ = gl.zeros([BP, N], gl.float32, lay)
        cut = cuts + (block.to(gl.int64) * H + i_h) * (C + 2) + 1
        into = entry + (block.to(gl.int64) * H + i_h) * (C + 2)
        n = gl.load(cut - 1)
        pq = (dq + ((start * heads + i_l) * NVB + i_v) * N) + cn
        pk = (dk + ((start * heads + i_l) * NVB + i_v) * N) + cn
        pv = (dv + (start * heads + i_l) * P + i_v * BP) + cv
        pb = (db + (start * heads + i_l) * P + i_v * BP) + cv
        ps = s_out + ((i_v * NW + cw) * n_tokens.to(gl.int64) + start) * heads + i_l
        for i in range(gl.minimum(n, SLOTS)):
            decay = gl.load(into + i)
            M, J = advance(gl.load(cut + i), gl.load(cut + i + 1), M * decay, J * decay, k_row, v_row, b_row, lay, C)
            # The last segment's end is used at once, from registers.
            keep = on < gl.where(i + 1 < n, N, 0)
            gl.store((kept + i * (2 * BP * N)) + tile, M, mask=keep[None, :])
            gl.store((kept + i * (2 * BP * N) + BP * N) + tile, J, mask=keep[None, :])
        for i in range(n):
            j = n - 1 - i
            t0 = gl.load(cut + j)
            t1 = gl.load(cut + j + 1)
            have = gl.minimum(j, SLOTS - 1)
            fetch = on < gl.where((i > 0) | (j >= SLOTS), N, 0)
            M = gl.load((kept + have * (2 * BP * N)) + tile, mask=fetch[None, :], other=M)
            J = gl.load((kept + have * (2 * BP * N) + BP * N) + tile, mask=fetch[None, :], other=J)
            for f in range(have + 1, j + 1):
                decay = gl.load(into + f)
                M, J = advance(
                    gl.load(cut + f), gl.load(cut + f + 1), M * decay, J * decay, k_row, v_row, b_row, lay, C
                )
            k1 = k_row.index(t1 - 1).load(by_key)
            q1 = q_row.index(t1 - 1).load(by_key).to(gl.float32)
            v1 = v_row.index(t1 - 1).load(by_channel)
            b1 = b_row.index(t1 - 1).load(by_channel)
            d1 = d_row.index(t1 - 1).load(by_channel)
            e1 = e_row.index(t1 - 1).load(by_channel)
            for pair in range((t1 - t0 + 1) // 2):
                ta = t1 - 1 - 2 * pair
                two = ta > t0
                tb = gl.maximum(ta - 1, t0)
                M, J, dM, dJ, sa = token(k1, q1, v1, b1, d1, e1 * ip, M, J, dM, dJ, a_q, a_k, a_v, a_b, lay, by_warp, N, PV, PK, LV, LK, NW)  # fmt: skip
                k1 = k_row.index(tb).load(by_key)
                q1 = q_row.index(tb).load(by_key).to(gl.float32)
                v1 = gl.where(two, v_row.index(tb).load(by_channel), 0.0)
                b1 = gl.where(two, b_row.index(tb).load(by_channel), 0.0)
                d1 = gl.where(two, d_row.index(tb).load(by_channel), 0.0)
                # Where there is no second token the state is not one: any importance that divides will do.
                i1 = gl.where(two, e_row.index(tb).load(by_channel) * ip, 1e30)
                M, J, dM, dJ, sb = token(k1, q1, v1, b1, d1, i1, M, J, dM, dJ, c_q, c_k, c_v, c_b, lay, by_warp, N, PV, PK, LV, LK, NW)  # fmt: skip
                tn = gl.maximum(tb - 1, 0)
                k1 = k_row.index(tn).load(by_key)
                q1 = q_row.index(tn).load(by_key).to(gl.float32)
                v1 = v_row.index(tn).load(by_channel)
                b1 = b_row.index(tn).load(by_channel)
                d1 = d_row.index(tn).load(by_channel)
                e1 = e_row.index(tn).load(by_channel)
                ha = e_row.index(ta).load(gl.SliceLayout(1, over_k))
                hb = e_row.index(tb).load(gl.SliceLayout(1, over_k))
                ea = e_row.index(ta).load(by_warp)
                eb = e_row.index(tb).load(by_warp)
                gl.thread_barrier()
                aq, ak, av, ab = finish(ha, a_q, a_k, a_v, a_b, over_v, over_k)
                bq, bk, bv, bb = finish(hb, c_q, c_k, c_v, c_b, over_v, over_k)
                gl.store(pq + ta * step_k, aq.to(dq.dtype.element_ty))
                gl.store(pk + ta * step_k, ak.to(dk.dtype.element_ty))
                gl.store(pv + ta * step_v, av.to(dv.dtype.element_ty))
                gl.store(pb + ta * step_v, ab.to(db.dtype.element_ty))
                gl.store(ps + ta * heads, sa * ea)
                gl.store(pq + tb * step_k, bq.to(dq.dtype.element_ty), mask=cn < gl.where(two, N, 0))
                gl.store(pk + tb * step_k, bk.to(dk.dtype.element_ty), mask=cn < gl.where(two, N, 0))
                gl.store(pv + tb * step_v, bv.to(dv.dtype.element_ty), mask=cv < gl.where(two, BP, 0))
                gl.store(pb + tb * step_v, bb.to(db.dtype.element_ty), mask=cv < gl.where(two, BP, 0))
                gl.store(ps + tb * heads, sb * eb, mask=cw < gl.where(two, NW, 0))
                gl.thread_barrier()
            decay = gl.load(into + j)
            dM = dM * decay
            dJ = dJ * decay
        gl.store((dM_out + at) + tile, dM.to(dM_out.dtype.element_ty))
        gl.store((dJ_out + at) + tile, dJ.to(dJ_out.dtype.element_ty))


def fast_inside(k: Tensor, v: Tensor) -> Inside:
    """The time loop as the inside part of `triton_backward.backward`; k is [tokens, G, N], v [tokens, H, P]."""
    G, N = k.shape[1:]
    H, P = v.shape[1:]
    NW, channels = N // 32, 32
    nats = MAX_NATS[v.dtype]
    programs = PROGRAMS * torch.cuda.get_device_properties(v.device).multi_processor_count

    def launch(inputs, states, d_states, partial, blocks, head0, heads):
        q, k, v, beta, log_decay, prior, do = inputs
        within = torch.empty(log_decay.shape, dtype=torch.float32, device=k.device)
        entry = torch.empty(blocks.count, H, BLOCK + 2, dtype=torch.float32, device=k.device)
        cuts = torch.empty(blocks.count, H, BLOCK + 2, dtype=torch.int32, device=k.device)
        growth = torch.empty_like(within)
        BH = min(32, triton.next_power_of_2(H))
        few = min(8, BH)
        growth_kernel[(k.shape[0] * triton.cdiv(H, few),)](
            k, beta, growth, H, G, N, P, few, N, triton.next_power_of_2(P), num_warps=1
        )
        segments_kernel[(blocks.count * triton.cdiv(H, BH),)](
            log_decay, growth, prior, within, entry, cuts, blocks.table, H, BLOCK, nats, math.exp(nats), BH, num_warps=1
        )
        work = blocks.count * heads * (P // channels)
        grid = min(programs, work)
        scratch = torch.empty(grid, 2 * SLOTS * channels * N, dtype=torch.float32, device=k.device)
        inside_loop_kernel[(grid,)](
            q, k, v, beta, do, within, entry, cuts, prior, *states, *d_states, *partial, blocks.table, scratch, work, head0, heads,
            k.shape[0], H, G, N, P, BLOCK, NW, SLOTS, num_warps=NW,
        )  # fmt: skip

    store = torch.bfloat16 if v.dtype == k.dtype == torch.bfloat16 else torch.float32
    return Inside(BLOCK, store, 1, P // channels, P // channels * NW, launch)
