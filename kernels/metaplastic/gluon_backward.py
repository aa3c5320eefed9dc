# ruff: noqa: E501  (kernel signatures are long; I is the importance)
"""The part of the backward pass inside blocks, fast, for NVIDIA GPUs: a time loop in fp32 that walks backwards.

A block is cut into segments over which the log decays sum to at most a few nats and importance grows by at most as much over
the prior. Forwards once, keeping both states at every segment's end; then backwards, where a state is undone token by token,
M_{t-1} = M_t - v_t k_t in the segment's scale. Undoing amplifies rounding by no more than the segment's decay and growth, and
what a steep decay has erased starts a new segment, so nothing is ever divided by a decay that may underflow. Sums over
channels end on tensor cores, out of the registers they are in; sums over keys go through shared memory, two tokens a time.
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
def growth_kernel(
    k, beta, growth,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
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
    log_decay, growth, prior,
    within, entry, cuts,  # written
    table,  # blocks
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


def _contraction(rows: int, columns: int) -> tuple[str, str]:
    """PTX and constraints of `contract` for the rows (fastest) x columns of a thread: sums, then x, then w."""
    n = rows * columns
    body = ["{.reg .b32 a<4>, b<2>; .reg .f32 c<8>;"]
    for half in range(rows // 2):  # rows lane / 4 and 8 more of a 16 x 8 left operand
        c = [f"c{4 * half + j}" for j in range(4)]
        body += [f"mov.f32 {x}, 0f00000000;" for x in c]
        for column in range(0, columns, 2):  # its columns lane % 4 and 4 more
            first = 2 * half + rows * column
            body += [f"mov.b32 a{j}, ${n + first + at};" for j, at in enumerate((0, 1, rows, rows + 1))]
            body += [f"mov.b32 b{j}, ${2 * n + rows * (column + j)};" for j in range(2)]
            sums = "{" + ",".join(c) + "}"
            body += [f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {sums}, {{a0,a1,a2,a3}}, {{b0,b1}}, {sums};"]
    body += [f"mov.f32 ${r}, c{2 * (r % rows)};" for r in range(n)]
    return "\n".join([*body, "}"]), ",".join(["=f"] * n + ["f"] * 2 * n)


PTX_4_8, PTX_2_8, PTX_4_4 = (gl.constexpr(_contraction(*sizes)) for sizes in ((4, 8), (2, 8), (4, 4)))


@gluon.jit
def _first(a, b):
    return a


@gluon.jit
def contract(x, w, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Sums of x w over a thread's columns and over the lanes lane % 4, on tensor cores: x and w in tf32, sums in fp32.

    A thread's registers hold ROWS (fastest) x COLUMNS elements, and w does not depend on the row: x lies as the left operand
    of m16n8k8 products does, whose right operand is w eight times. The sum of a row is left in every column and lane.
    """
    asm: gl.constexpr = PTX_2_8 if ROWS == 2 else PTX_4_8 if COLUMNS == 8 else PTX_4_4
    return gl.inline_asm_elementwise(asm[0], asm[1], [x, w], dtype=gl.float32, is_pure=True, pack=ROWS * COLUMNS)


@gluon.jit
def over_channels(x, w):
    """Sums over a program's channels: [4, N], rows equal, one for each of four lanes."""
    return gl.reduce(gl.reshape(contract(x, w, 4, 8), [4, 8, x.shape[1]]), 1, _first)


def _lane_sums() -> tuple[str, str]:
    """PTX and constraints of `lane_sums`: the sums of a thread's 2 quantities (fastest) x 4 keys, these, where each goes."""
    body = ["{.reg .b32 a<4>, b<2>; .reg .f32 z; mov.f32 z, 0f00000000;"]
    for half in (0, 4):
        body += [f"mov.b32 a{j}, ${8 + half + at};" for j, at in enumerate((0, 2, 1, 3))]
        body += [f"mov.b32 b{j}, ${16 + j};" for j in range(2)]
        out = "{" + ",".join(f"${half + j}" for j in range(4)) + "}"
        body += [f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {out}, {{a0,a1,a2,a3}}, {{b0,b1}}, {{z,z,z,z}};"]
    return "\n".join([*body, "}"]), ",".join(["=&f"] * 8 + ["f"] * 16)


PTX_LANE_SUMS = gl.constexpr(_lane_sums())


@gluon.jit
def in_thread(x):
    """Sums over a thread's channels: [4, N], a row for each of four lanes."""
    return gl.sum(gl.reshape(x, [4, 8, x.shape[1]]), 1)


@gluon.jit
def lane_sums(x, y):
    """Sums over the lanes lane % 4 of x and of y [4, N], rows equal, in tf32: both in one product.

    Its left operand's columns are those of x, then those of y; its right operand sends x to even columns, y to odd ones,
    and of the columns of a result each lane holds an even one and the odd one after it.
    """
    z = gl.join(x, y)
    key = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, z.type.layout)))[None, :, None]
    which = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, z.type.layout)))[None, None, :]
    to = gl.where((key // 4 + which) % 2 == 0, 1.0, 0.0)
    asm: gl.constexpr = PTX_LANE_SUMS
    return gl.split(gl.inline_asm_elementwise(asm[0], asm[1], [z, to], dtype=gl.float32, is_pure=True, pack=8))


@gluon.jit
def over_keys(sums, over_k: gl.constexpr, PARTS: gl.constexpr):
    """Sums over keys of what `token` left: [2, 32, 4] of dv and dbeta, equal in the last dim, one for each of four lanes."""
    x = sums.load(over_k)
    y = contract(x, gl.full([1, 1, 1], 1.0, gl.float32, over_k), 64 // PARTS, PARTS // 4)
    y = gl.reshape(y, [2, x.shape[1], PARTS // 8, 4, 2])
    return gl.reduce(gl.reduce(y, 4, _first), 2, _first)


@gluon.jit
def store_sums(pv, pb, y, use):
    """dv and dbeta of a token (`over_keys`) to pv and pb where `use`."""
    which = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, y.type.layout)))[:, None, None]
    channel = gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, y.type.layout)))[None, :, None]
    lane = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, y.type.layout)))[None, None, :]
    to = which * 0 + channel + lane * 0
    mask = (lane < gl.where(use, 1, 0)) & (to >= 0)
    gl.store(pv + to, y.to(pv.dtype.element_ty), mask=mask & (which == 0))
    gl.store(pb + to, y.to(pb.dtype.element_ty), mask=mask & (which == 1))


@gluon.jit
def scalar(row, t):
    """Token t of a row of one number per token."""
    return gl.sum(row.index(t).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def store_row(p, x, step, use):
    """One of the four equal rows of x [4, n] to p, `step` elements apart, where `use`."""
    lane = gl.arange(0, 4, layout=gl.SliceLayout(1, x.type.layout))[:, None]
    to = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))[None, :] * step + lane * 0
    gl.store(p + to, x.to(p.dtype.element_ty), mask=(lane < gl.where(use, 1, 0)) & (to >= 0))


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
def token(k1, q1, v1, b1, d1, i1, M, J, dM, dJ, sums, NW: gl.constexpr):
    """One token backwards: the states, dq and dk [4, N], s [4, NW], rows equal; a thread's dv and dbeta go to `sums`."""
    BP: gl.constexpr = M.shape[0]
    N: gl.constexpr = M.shape[1]
    k2 = k1 * k1
    r = reciprocal(J + i1)
    F = M * r
    R = d1[:, None] * r
    U = R * F
    dM = dM + R * q1[None, :]
    dJ = dJ - U * q1[None, :]
    # Measured: a little faster than all four sums over channels as products, for two are taken within a thread first.
    dq, s_key = lane_sums(in_thread(F * d1[:, None]), in_thread(U))
    dk = over_channels(dM, v1[:, None])
    dk2 = over_channels(dJ, b1[:, None])
    by_key: gl.constexpr = gl.SliceLayout(0, dk.type.layout)
    dk += dk2 * gl.convert_layout(k1 + k1, by_key)[None, :]
    q_key = gl.convert_layout(q1, gl.SliceLayout(0, s_key.type.layout))
    s = gl.sum(gl.reshape(s_key * q_key[None, :], [4, NW, N // NW]), 2)
    dv = gl.sum(gl.reshape(dM * k1[None, :], [BP, N // 4, 4]), 2)
    db = gl.sum(gl.reshape(dJ * k2[None, :], [BP, N // 4, 4]), 2)
    sums.store(gl.permute(gl.join(dv, db), (2, 0, 1)))
    M = M - v1[:, None] * k1[None, :]
    J = J - b1[:, None] * k2[None, :]
    return M, J, dM, dJ, dq, dk, s


@gluon.jit(do_not_specialize=["n_tokens"])
def inside_loop_kernel(
    q, k, v, beta, do, within, entry, cuts, prior, M0, J0,  # inputs, segments, the states at block starts
    dM_out, dJ_out,  # written: what the block adds to the gradients of those states
    dq, dk, dv, db, s_out,  # written: partial sums
    table, scratch, total, head0, heads, n_tokens,  # blocks, states at segment ends, work and heads of this launch
    H: gl.constexpr, G: gl.constexpr, N: gl.constexpr, P: gl.constexpr,
    C: gl.constexpr, NW: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    # A thread owns 8 channels and 4 keys, a warp 32 channels and 32 keys, a program 32 channels and all keys.
    BP: gl.constexpr = 32
    NVB: gl.constexpr = P // BP
    PARTS: gl.constexpr = N // 4
    # Lanes lie as in the left operand of `contract`: the channels of lane % 4, the keys of lane / 4.
    lay: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0], [0, 4], [0, 8], [0, 16]], [[0, 32], [0, 64]][: NW // 2], [], [BP, N]
    )  # fmt: skip
    # What threads leave of dv and dbeta, [which, channel, thread], summed over threads by `contract` likewise.
    over_k: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 0, 1], [0, 0, 8], [0, 0, 16]] if NW == 4 else [[0, 1, 0], [0, 16, 0], [0, 0, 1], [0, 0, 8]],
        [[0, 0, 2], [0, 0, 4], [0, 2, 0], [0, 4, 0], [0, 8, 0]], [[1, 0, 0], [0, 16, 0]][: NW // 2], [], [2, BP, PARTS],
    )  # fmt: skip
    by_channel: gl.constexpr = gl.SliceLayout(1, lay)
    by_key: gl.constexpr = gl.SliceLayout(0, lay)
    load_k: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [NW, 1], [1, 0])
    load_v: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [NW, 1], [1, 0])
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    k_sm = gl.allocate_shared_memory(gl.float32, [C, N], plain)
    q_sm = gl.allocate_shared_memory(q.dtype.element_ty, [C, N], plain)
    v_sm = gl.allocate_shared_memory(gl.float32, [C, BP], plain)
    b_sm = gl.allocate_shared_memory(gl.float32, [C, BP], plain)
    d_sm = gl.allocate_shared_memory(gl.float32, [C, BP], plain)
    e_sm = gl.allocate_shared_memory(gl.float32, [C, 1], plain)
    # A swizzle that keeps accesses of the sums free of bank conflicts.
    sums: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 2, 0])
    a_sm = gl.allocate_shared_memory(gl.float32, [2, BP, PARTS], sums)
    c_sm = gl.allocate_shared_memory(gl.float32, [2, BP, PARTS], sums)
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
        # An empty block has nothing at its place in the states.
        there = on < gl.where(count > 0, N, 0)
        M = gl.load((M0 + at) + tile, mask=there[None, :], other=0.0).to(gl.float32)
        J = gl.load((J0 + at) + tile, mask=there[None, :], other=0.0).to(gl.float32)
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
        pq = dq + ((start * heads + i_l) * NVB + i_v) * N
        pk = dk + ((start * heads + i_l) * NVB + i_v) * N
        pv = dv + (start * heads + i_l) * P + i_v * BP
        pb = db + (start * heads + i_l) * P + i_v * BP
        ps = s_out + (i_v * NW * n_tokens.to(gl.int64) + start) * heads + i_l
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
            ea = scalar(e_row, t1 - 1)
            for pair in range((t1 - t0 + 1) // 2):
                ta = t1 - 1 - 2 * pair
                two = ta > t0
                tb = gl.maximum(ta - 1, t0)
                M, J, dM, dJ, dqa, dka, sa = token(k1, q1, v1, b1, d1, ea * ip, M, J, dM, dJ, a_sm, NW)
                # Where there is no second token, no gradient comes from it, and its state, which is not one, is not used.
                k1 = k_row.index(tb).load(by_key)
                q1 = gl.where(two, q_row.index(tb).load(by_key).to(gl.float32), 0.0)
                v1 = v_row.index(tb).load(by_channel)
                b1 = b_row.index(tb).load(by_channel)
                d1 = d_row.index(tb).load(by_channel)
                eb = scalar(e_row, tb)
                store_row(pq + ta * step_k, dqa, 1, True)
                store_row(pk + ta * step_k, dka, 1, True)
                i1 = gl.where(two, eb * ip, 1e30)
                M, J, dM, dJ, dqb, dkb, sb = token(k1, q1, v1, b1, d1, i1, M, J, dM, dJ, c_sm, NW)
                tn = gl.maximum(tb - 1, 0)
                k1 = k_row.index(tn).load(by_key)
                q1 = q_row.index(tn).load(by_key).to(gl.float32)
                v1 = v_row.index(tn).load(by_channel)
                b1 = b_row.index(tn).load(by_channel)
                d1 = d_row.index(tn).load(by_channel)
                en = scalar(e_row, tn)
                store_row(pq + tb * step_k, dqb, 1, two)
                store_row(pk + tb * step_k, dkb, 1, two)
                store_row(ps + ta * heads, sa * ea, n_tokens * heads, True)
                store_row(ps + tb * heads, sb * eb, n_tokens * heads, two)
                gl.thread_barrier()
                ya = over_keys(a_sm, over_k, PARTS) * ea
                yb = over_keys(c_sm, over_k, PARTS) * eb
                gl.thread_barrier()
                store_sums(pv + ta * step_v, pb + ta * step_v, ya, True)
                store_sums(pv + tb * step_v, pb + tb * step_v, yb, two)
                ea = en
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
            q, k, v, beta, do, within, entry, cuts, prior, *states, *d_states, *partial,
            blocks.table, scratch, work, head0, heads, k.shape[0],
            H, G, N, P, BLOCK, NW, SLOTS, num_warps=NW,
        )  # fmt: skip

    store = torch.bfloat16 if v.dtype == k.dtype == torch.bfloat16 else torch.float32
    return Inside(BLOCK, store, 1, P // channels, P // channels * NW, launch)
