# ruff: noqa: E501  (kernel signatures are long; I is the importance)
"""The fast forward pass for NVIDIA GPUs: a time loop in fp32 with an explicit layout; `docs/kernels.md` says why.

States are kept scaled, M_t / exp(g_t) with g the log decay summed within a tile of 16 tokens, so a token costs one FMA an
element and state; the scale is centered on the tile so that its range is the square root of the tile's decay. Blocks whose
decay is too steep for that are left to the plain kernel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.triton_blocks import Blocks
from .triton_states import load_log_decay

TILE = 16
MAX_TILE_NATS = 40.0  # the scale runs over exp(-20) .. exp(20), and products of two scaled importances stay in range


@triton.jit
def tile_decays_kernel(
    log_decay,
    within, steep,  # written
    table, n_tiles,  # blocks
    H: tl.constexpr, S: tl.constexpr, BH: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    # within[t]: the log decays from the tile's first token to t. steep[block, head]: some tile decays by more than LIMIT.
    NHB: tl.constexpr = (H + BH - 1) // BH
    pid = tl.program_id(0)
    h = (pid % NHB) * BH + tl.arange(0, BH)
    block = pid // NHB // n_tiles
    first = (pid // NHB % n_tiles) * S
    start = tl.load(table + block * 3).to(tl.int64) + first
    count = tl.minimum(tl.load(table + block * 3 + 1) - first, S)
    total = tl.zeros([BH], tl.float32)
    for t in range(count):
        total += load_log_decay(log_decay + (start + t) * H + h, h < H)
        tl.store(within + (start + t) * H + h, total, mask=h < H)
    tl.store(steep + block.to(tl.int64) * H + h, h * 0 + 1, mask=(h < H) & (total < -LIMIT))


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def time_loop_kernel(
    q, k, v, beta, within, prior, M0, J0,  # inputs, and the states at block starts
    out,  # written
    steep, table,  # blocks
    H: gl.constexpr, G: gl.constexpr, N: gl.constexpr, P: gl.constexpr,
    NW: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    # A thread owns 4 channels and N / 8 keys, a warp 16 channels and all keys.
    BP: gl.constexpr = 16 * NW
    NVB: gl.constexpr = P // BP
    lay: gl.constexpr = gl.BlockedLayout([4, 4], [4, 8], [NW, 1], [1, 0])
    by_channel: gl.constexpr = gl.SliceLayout(1, lay)
    by_key: gl.constexpr = gl.SliceLayout(0, lay)
    load_k: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [NW, 1], [1, 0])
    load_v: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [NW, 1], [1, 0])
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    pid = gl.program_id(0)
    i_v = pid % NVB
    row = pid // NVB
    block = row // H
    i_h = row % H
    i_g = i_h // (H // G)
    start = gl.load(table + block * 3).to(gl.int64)
    count = gl.where(gl.load(steep + row) > 0, 0, gl.load(table + block * 3 + 1))
    ip = gl.load(prior + i_h).to(gl.float32)
    k_sm = gl.allocate_shared_memory(gl.float32, [S, N], plain)
    q_sm = gl.allocate_shared_memory(gl.float32, [S, N], plain)
    k2_sm = gl.allocate_shared_memory(gl.float32, [S, N], plain)
    v_sm = gl.allocate_shared_memory(gl.float32, [S, BP], plain)
    b_sm = gl.allocate_shared_memory(gl.float32, [S, BP], plain)
    i_sm = gl.allocate_shared_memory(gl.float32, [S, 1], plain)
    k_row = k_sm._reinterpret(gl.float32, [S, N], rows)
    q_row = q_sm._reinterpret(gl.float32, [S, N], rows)
    k2_row = k2_sm._reinterpret(gl.float32, [S, N], rows)
    v_row = v_sm._reinterpret(gl.float32, [S, BP], rows)
    b_row = b_sm._reinterpret(gl.float32, [S, BP], rows)
    i_row = i_sm._reinterpret(gl.float32, [S, 1], rows)
    ov = gl.arange(0, BP, layout=by_channel)
    on = gl.arange(0, N, layout=by_key)
    at = row.to(gl.int64) * (N * P) + i_v * (BP * N)
    # An empty block has nothing at its place in the states.
    there = on < gl.where(count > 0, N, 0)
    M = gl.load((M0 + at) + ov[:, None] * N + on[None, :], mask=there[None, :], other=0.0)
    J = gl.load((J0 + at) + ov[:, None] * N + on[None, :], mask=there[None, :], other=0.0)
    kt = gl.arange(0, S, layout=gl.SliceLayout(1, load_k))
    kn = gl.arange(0, N, layout=gl.SliceLayout(0, load_k))
    vt = gl.arange(0, S, layout=gl.SliceLayout(1, load_v))
    vn = gl.arange(0, BP, layout=gl.SliceLayout(0, load_v))
    ok = kt[:, None] * (G * N) + kn[None, :]
    ox = vt[:, None] * (H * P) + vn[None, :]
    head = (start * H + i_h) * P + i_v * BP
    pk = k + (start * G + i_g) * N
    pq = q + (start * G + i_g) * N
    pv = v + head
    pb = beta + head
    pa = within + start * H + i_h
    po = out + head
    mk = (kt < count)[:, None]
    mv = vt < count
    kk = gl.load(pk + ok, mask=mk, other=0.0)
    qq = gl.load(pq + ok, mask=mk, other=0.0)
    vv = gl.load(pv + ox, mask=mv[:, None], other=0.0)
    bb = gl.load(pb + ox, mask=mv[:, None], other=0.0)
    g = gl.load(pa + vt * H, mask=mv, other=0.0)
    half = ip * 0.0 + 1.0
    for i in range(0, count, S):
        # Half of the tile's decay is taken before it and half after it: the scale is centered.
        before = half
        half = gl.exp(0.5 * gl.min(g, 0))
        M = M * (before * half)
        J = J * (before * half)
        scale = gl.exp(-g) * half
        kf = kk.to(gl.float32)
        gl.thread_barrier()
        k_sm.store(kf)
        q_sm.store(qq.to(gl.float32))
        k2_sm.store(kf * kf)
        v_sm.store(vv.to(gl.float32) * scale[:, None])
        b_sm.store(bb.to(gl.float32) * scale[:, None])
        i_sm.store((scale * ip)[:, None])
        gl.thread_barrier()
        # The next tile is on its way while this one is used.
        pk += S * G * N
        pq += S * G * N
        pv += S * H * P
        pb += S * H * P
        pa += S * H
        left = count - i - S
        mk = (kt < left)[:, None]
        mv = vt < left
        kk = gl.load(pk + ok, mask=mk, other=0.0)
        qq = gl.load(pq + ok, mask=mk, other=0.0)
        vv = gl.load(pv + ox, mask=mv[:, None], other=0.0)
        bb = gl.load(pb + ox, mask=mv[:, None], other=0.0)
        g = gl.load(pa + vt * H, mask=mv, other=0.0)
        for t in range(S):
            k1 = k_row.index(t).load(by_key)
            q1 = q_row.index(t).load(by_key)
            k2 = k2_row.index(t).load(by_key)
            v1 = v_row.index(t).load(by_channel)
            b1 = b_row.index(t).load(by_channel)
            i1 = i_row.index(t).load(by_channel)
            M = M + v1[:, None] * k1[None, :]
            J = J + b1[:, None] * k2[None, :]
            # One reciprocal for two elements: a/A + b/B = (aB + bA) / (AB).
            D0, D1 = gl.split(gl.reshape(J + i1[:, None], [BP, N // 2, 2]))
            n0, n1 = gl.split(gl.reshape(M * q1[None, :], [BP, N // 2, 2]))
            o = gl.convert_layout(gl.sum((n0 * D1 + n1 * D0) * reciprocal(D0 * D1), 1), by_channel)
            gl.store((po + t * (H * P)) + ov, o.to(out.dtype.element_ty), mask=ov < gl.where(i + t < count, BP, 0))
        po += S * H * P


def warps(P: int) -> int:
    """Warps of a program: 16 channels each."""
    return 4 if P % 64 == 0 else 2


def forward(q, k, v, beta, log_decay, prior, starts, blocks: Blocks, out) -> Tensor:
    """Outputs of every block that is not steep; returns `steep` [blocks, H] int32, which says what is left to do.

    Args as `triton_forward.forward`; `starts` in fp32.
    """
    G, N = k.shape[1:]
    H, P = v.shape[1:]
    within = log_decay.new_empty(log_decay.shape, dtype=torch.float32)
    steep = log_decay.new_zeros(blocks.count, H, dtype=torch.int32)
    BH = min(32, triton.next_power_of_2(H))
    tiles = triton.cdiv(blocks.size, TILE)
    tile_decays_kernel[(blocks.count * tiles * triton.cdiv(H, BH),)](
        log_decay, within, steep, blocks.table, tiles, H, TILE, BH, MAX_TILE_NATS, num_warps=1
    )
    NW = warps(P)
    time_loop_kernel[(blocks.count * H * (P // (16 * NW)),)](
        q, k, v, beta, within, prior, *starts, out, steep, blocks.table, H, G, N, P, NW, TILE, num_warps=NW
    )
    return steep
