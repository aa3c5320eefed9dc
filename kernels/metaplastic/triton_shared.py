# ruff: noqa: E741  (I is the importance)
"""One beta per head: the importance is then a vector over keys, and the read-out is Mamba2's on q / I.

Everything is a matrix product over blocks of tokens, so this costs about what Mamba2's own scan does. A few beta
groups per head are that many narrower heads. `docs/kernels.md` has the names.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..common.kept import kept
from ..common.triton_blocks import Blocks, clear_first_tokens, make_blocks
from ..common.triton_launch import UNFUSED_SUMS, on_device_of, power_of_two
from .triton_backward import add_heads
from .triton_states import block_states, dot_types, load_log_decay, reverse_states


@triton.jit
def vector_states_kernel(
    k, beta, log_decay, initial,  # inputs
    out,  # written
    table, documents, n_blocks,  # blocks
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    BK: tl.constexpr, BT: tl.constexpr, HAS_INITIAL: tl.constexpr,
):  # fmt: skip
    # J at every block's start, and behind the blocks each document's final one.
    NKB: tl.constexpr = (N + BK - 1) // BK
    pid = tl.program_id(0)
    ok = (pid % NKB) * BK + tl.arange(0, BK)
    row = pid // NKB
    i_d = row // H
    i_h = row % H
    i_g = i_h // (H // G)
    ot = tl.arange(0, BT)
    mk = ok < N
    J = tl.zeros([BK], tl.float32)
    if HAS_INITIAL:
        J = tl.load(initial + row.to(tl.int64) * N + ok, mask=mk, other=0.0)
    first = tl.load(documents + i_d)
    last = tl.load(documents + i_d + 1)
    for i in range(last - first):
        block = first + i
        tl.store(out + (block.to(tl.int64) * H + i_h) * N + ok, J, mask=mk)
        start = tl.load(table + block * 3).to(tl.int64)
        m = ot < tl.load(table + block * 3 + 1)
        kf = tl.load(
            (k + (start * G + i_g) * N) + ot[:, None] * (G * N) + ok[None, :], mask=m[:, None] & mk[None, :], other=0.0
        ).to(tl.float32)
        bb = tl.load((beta + start * H + i_h) + ot * H, mask=m, other=0.0).to(tl.float32)
        la = load_log_decay((log_decay + start * H + i_h) + ot * H, m)
        total = tl.sum(la, 0)
        J = tl.exp(total) * J + tl.sum((bb * tl.exp(total - tl.cumsum(la, 0)))[:, None] * kf * kf, 0)
    tl.store(out + ((n_blocks + i_d).to(tl.int64) * H + i_h) * N + ok, J, mask=mk)


@triton.jit
def _block(
    q, k, beta, log_decay, prior, J0,
    table, block, i_h, pid,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    S: tl.constexpr, BN: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """What every kernel below needs of a block: first token, mask, L, e, w, keys, beta, importance and q / I."""
    i_g = i_h // (H // G)
    os = tl.arange(0, S)
    on = tl.arange(0, BN)
    mn = on < N
    start = tl.load(table + block * 3).to(tl.int64)
    m = os < tl.load(table + block * 3 + 1)
    la = load_log_decay((log_decay + start * H + i_h) + os * H, m)
    g = tl.cumsum(la, 0)
    L = tl.exp(tl.where(os[:, None] >= os[None, :], g[:, None] - g[None, :], float("-inf")))
    e = tl.exp(g)
    w = tl.exp(tl.sum(la, 0) - g)
    at = (start * G + i_g) * N
    ok = os[:, None] * (G * N) + on[None, :]
    mk = m[:, None] & mn[None, :]
    kf = tl.load((k + at) + ok, mask=mk, other=0.0).to(tl.float32)
    qf = tl.load((q + at) + ok, mask=mk, other=0.0).to(tl.float32)
    bb = tl.load((beta + start * H + i_h) + os * H, mask=m, other=0.0).to(tl.float32)
    J = tl.load(J0 + pid.to(tl.int64) * N + on, mask=mn, other=0.0)
    I = e[:, None] * J[None, :] + tl.load(prior + i_h).to(tl.float32)
    I = tl.dot((L * bb[None, :]).to(DOT), (kf * kf).to(DOT), I, input_precision=PREC)
    return start, m, L, e, w, kf, bb, I, qf / I


@triton.jit
def shared_forward_kernel(
    q, k, v, beta, log_decay, prior, M0, J0,  # inputs, and the states at block starts
    out, variance,  # written
    table,  # blocks
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    S: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
    VARIANCE: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    block = pid // H
    i_h = pid % H
    if tl.load(table + block * 3 + 1) == 0:
        return  # an empty block: nothing is at its place in the states
    os = tl.arange(0, S)
    on = tl.arange(0, BN)
    start, m, L, e, _, kf, _, I, R = _block(
        q, k, beta, log_decay, prior, J0, table, block, i_h, pid, H, G, N, S, BN, DOT, PREC
    )
    if VARIANCE:
        tl.store((variance + start * H + i_h) + os * H, tl.sum(R * R * I, 1), mask=m)
    Rd = R.to(DOT)
    SL = (tl.dot(Rd, tl.trans(kf.to(DOT)), input_precision=PREC) * L).to(DOT)
    for iv in range((P + BV - 1) // BV):
        ov = iv * BV + tl.arange(0, BV)
        mv = m[:, None] & (ov < P)[None, :]
        px = (start * H + i_h) * P + os[:, None] * (H * P) + ov[None, :]
        vv = tl.load(v + px, mask=mv, other=0.0).to(DOT)
        M = tl.load(
            M0 + pid.to(tl.int64) * (N * P) + ov[:, None] * N + on[None, :],
            mask=(ov < P)[:, None] & (on < N)[None, :],
            other=0.0,
        )
        o = e[:, None] * tl.dot(Rd, tl.trans(M.to(DOT)), input_precision=PREC)
        o = tl.dot(SL, vv, o, input_precision=PREC)
        tl.store(out + px, o.to(out.dtype.element_ty), mask=mv)


@triton.jit
def _q_gradient(
    v, do, M0,
    start, m, L, e, kf, i_h, pid,  # of `_block`
    H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    S: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """L * (do v^T), and the gradient of q / I."""
    os = tl.arange(0, S)
    on = tl.arange(0, BN)
    A = tl.zeros([S, S], tl.float32)
    D = tl.zeros([S, BN], tl.float32)
    for iv in range((P + BV - 1) // BV):
        ov = iv * BV + tl.arange(0, BV)
        mv = m[:, None] & (ov < P)[None, :]
        px = (start * H + i_h) * P + os[:, None] * (H * P) + ov[None, :]
        vv = tl.load(v + px, mask=mv, other=0.0).to(DOT)
        dd = tl.load(do + px, mask=mv, other=0.0).to(DOT)
        M = tl.load(
            M0 + pid.to(tl.int64) * (N * P) + ov[:, None] * N + on[None, :],
            mask=(ov < P)[:, None] & (on < N)[None, :],
            other=0.0,
        )
        A = tl.dot(dd, tl.trans(vv), A, input_precision=PREC)
        D = tl.dot(dd, M.to(DOT), D, input_precision=PREC)
    A = A * L
    return A, tl.dot(A.to(DOT), kf.to(DOT), e[:, None] * D, input_precision=PREC)


@triton.jit
def shared_inside_kernel(
    q, k, v, beta, do, log_decay, prior, M0, J0,  # inputs, and the states at block starts
    dM, dJ,  # written
    table,  # blocks
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    S: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
    DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    # What a block adds to the gradients of the states at its start.
    pid = tl.program_id(0)
    block = pid // H
    i_h = pid % H
    if tl.load(table + block * 3 + 1) == 0:
        return  # an empty block: nothing is at its place in the states
    os = tl.arange(0, S)
    on = tl.arange(0, BN)
    start, m, L, e, _, kf, _, I, R = _block(
        q, k, beta, log_decay, prior, J0, table, block, i_h, pid, H, G, N, S, BN, DOT, PREC
    )
    _, D = _q_gradient(v, do, M0, start, m, L, e, kf, i_h, pid, H, N, P, S, BN, BV, DOT, PREC)
    tl.store(dJ + pid.to(tl.int64) * N + on, tl.sum(-e[:, None] * D * R / I, 0), mask=on < N)
    Rd = R.to(DOT)
    for iv in range((P + BV - 1) // BV):
        ov = iv * BV + tl.arange(0, BV)
        px = (start * H + i_h) * P + os[:, None] * (H * P) + ov[None, :]
        dd = tl.load(do + px, mask=m[:, None] & (ov < P)[None, :], other=0.0).to(tl.float32) * e[:, None]
        G_v = tl.dot(tl.trans(dd.to(DOT)), Rd, input_precision=PREC)
        at = pid.to(tl.int64) * (N * P) + ov[:, None] * N + on[None, :]
        tl.store(dM + at, G_v.to(dM.dtype.element_ty), mask=(ov < P)[:, None] & (on < N)[None, :])


@triton.jit
def shared_backward_kernel(
    q, k, v, beta, do, log_decay, prior, M0, J0,  # inputs, and the states at block starts
    dM, dJ,  # gradients of the states at block ends
    dq, dk, dv, db, dla, s_out,  # written
    table, documents, n_blocks,  # blocks
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    S: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
    DOT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    block = pid // H
    i_h = pid % H
    if tl.load(table + block * 3 + 1) == 0:
        return  # an empty block: nothing is at its place in the states
    os = tl.arange(0, S)
    on = tl.arange(0, BN)
    mn = on < N
    start, m, L, e, w, kf, bb, I, R = _block(
        q, k, beta, log_decay, prior, J0, table, block, i_h, pid, H, G, N, S, BN, DOT, PREC
    )
    A, D = _q_gradient(v, do, M0, start, m, L, e, kf, i_h, pid, H, N, P, S, BN, BV, DOT, PREC)
    mk = m[:, None] & mn[None, :]
    ph = (start * H + i_h) * N + os[:, None] * (H * N) + on[None, :]
    D = D / I
    tl.store(dq + ph, D.to(dq.dtype.element_ty), mask=mk)
    E = -D * R
    s = -tl.sum(E, 1)
    dJe = tl.load(dJ + pid.to(tl.int64) * N + on, mask=mn, other=0.0)
    k2 = kf * kf
    Y = tl.dot(E.to(DOT), tl.trans(k2.to(DOT)), input_precision=PREC)
    db1 = tl.sum(Y * L, 0) + w * tl.sum(k2 * dJe[None, :], 1)
    tl.store((db + start * H + i_h) + os * H, db1.to(db.dtype.element_ty), mask=m)
    dk2 = tl.dot(tl.trans((L * bb[None, :]).to(DOT)), E.to(DOT), (w * bb)[:, None] * dJe[None, :], input_precision=PREC)
    Rd = R.to(DOT)
    kk = kf.to(DOT)
    dk1 = tl.dot(tl.trans(A.to(DOT)), Rd, 2.0 * kf * dk2, input_precision=PREC)
    SL = tl.trans((tl.dot(Rd, tl.trans(kk), input_precision=PREC) * L).to(DOT))
    dg = tl.load(prior + i_h).to(tl.float32) * s - bb * db1
    document = tl.load(table + block * 3 + 2)
    after = tl.where(block + 1 == tl.load(documents + document + 1), n_blocks + document, block + 1)
    end = after.to(tl.int64) * H + i_h
    carried = tl.sum(dJe * tl.load(J0 + end * N + on, mask=mn, other=0.0), 0)
    for iv in range((P + BV - 1) // BV):
        ov = iv * BV + tl.arange(0, BV)
        mv = m[:, None] & (ov < P)[None, :]
        px = (start * H + i_h) * P + os[:, None] * (H * P) + ov[None, :]
        ms = (ov < P)[:, None] & mn[None, :]
        tile = ov[:, None] * N + on[None, :]
        dMe = tl.load(dM + pid.to(tl.int64) * (N * P) + tile, mask=ms, other=0.0)
        Me = tl.load(M0 + end * (N * P) + tile, mask=ms, other=0.0)
        carried += tl.sum(tl.sum(dMe.to(tl.float32) * Me.to(tl.float32), 1), 0)
        vv = tl.load(v + px, mask=mv, other=0.0).to(tl.float32)
        dd = tl.load(do + px, mask=mv, other=0.0).to(DOT)
        dv1 = w[:, None] * tl.dot(kk, tl.trans(dMe.to(DOT)), input_precision=PREC)
        dv1 = tl.dot(SL, dd, dv1, input_precision=PREC)
        tl.store(dv + px, dv1.to(dv.dtype.element_ty), mask=mv)
        dg -= tl.sum(vv * dv1, 1)
        dk1 = tl.dot((vv * w[:, None]).to(DOT), dMe.to(DOT), dk1, input_precision=PREC)
    tl.store(dk + ph, dk1.to(dk.dtype.element_ty), mask=mk)
    tl.store((s_out + start * H + i_h) + os * H, s, mask=m)
    dg = tl.where(m, dg, 0.0)
    tl.store((dla + start * H + i_h) + os * H, carried + tl.sum(dg, 0) - tl.cumsum(dg, 0) + dg, mask=m)


def _tiles(k: Tensor, v: Tensor) -> tuple[int, int, int]:
    """(tokens of a block, padded keys, channels of a tile)."""
    half = dot_types(k, v)[0] == tl.bfloat16
    BN = power_of_two(k.shape[2])
    S = (64 if BN <= 128 else 32) if half else 16
    return S, BN, min(64 if half else 16, power_of_two(v.shape[2]))


def _states(k, v, beta, log_decay, blocks: Blocks, initial, store) -> tuple[Tensor, Tensor]:
    """M in `store` and J in fp32 at block starts, behind them the final ones."""
    H, P = v.shape[1:]
    N = k.shape[2]
    M = torch.empty(blocks.count + blocks.rows, H, P, N, dtype=store, device=k.device)
    J = torch.empty(blocks.count + blocks.rows, H, N, dtype=torch.float32, device=k.device)
    block_states(k, v, None, log_decay, blocks, initial, (M, None))
    BK = min(64, power_of_two(N))
    vector_states_kernel[(blocks.rows * H * triton.cdiv(N, BK),)](
        k, beta, log_decay, None if initial is None else initial[1], J,
        blocks.table, blocks.documents, blocks.count,
        H, k.shape[1], N, BK, power_of_two(blocks.size), initial is not None, num_warps=4,
    )  # fmt: skip
    return M, J


class SharedScan(torch.autograd.Function):
    """The scan with one beta per head.

    q, k [tokens, G, N], v [tokens, H, P], beta, log_decay [tokens, H], states M [rows, H, P, N], J [rows, H, N].
    """

    @staticmethod
    def forward(ctx, q, k, v, beta, log_decay, prior, M0, J0, batch, cu_seqlens, variance):
        ctx.save_for_backward(q, k, v, beta, log_decay, prior, M0, J0, cu_seqlens)
        ctx.batch = batch
        ctx.set_materialize_grads(False)
        found = kept(lambda: SharedScan._run(q, k, v, beta, log_decay, prior, M0, J0, batch, cu_seqlens, variance))
        if variance:
            ctx.mark_non_differentiable(found[3])
        return found

    @staticmethod
    def _run(q, k, v, beta, log_decay, prior, M0, J0, batch, cu_seqlens, variance):
        n_tokens, H, P = v.shape
        G, N = k.shape[1:]
        S, BN, BV = _tiles(k, v)
        dot, precision = dot_types(k, v)
        initial = None if M0 is None else (M0, J0)
        blocks = make_blocks(batch, n_tokens // batch, S, v.device, cu_seqlens)
        M, J = _states(k, v, beta, log_decay, blocks, initial, torch.float32)
        out = torch.empty_like(v)
        var = torch.empty(n_tokens, H, dtype=torch.float32, device=v.device) if variance else None
        shared_forward_kernel[(blocks.count * H,)](
            q, k, v, beta, log_decay, prior, M, J, out, var, blocks.table,
            H, G, N, P, S, BN, BV, variance, dot, precision, num_warps=4,
        )  # fmt: skip
        return out, M[blocks.count :].clone(), J[blocks.count :].clone(), var

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dM_last, dJ_last, _):
        saved = ctx.saved_tensors  # once: activation checkpointing lets no tensor be unpacked twice
        with on_device_of(saved[2]):
            return SharedScan._gradients(*saved, do, dM_last, dJ_last, ctx.batch)

    @staticmethod
    def _gradients(q, k, v, beta, log_decay, prior, M0, J0, cu_seqlens, do, dM_last, dJ_last, batch):
        n_tokens, H, P = v.shape
        G, N = k.shape[1:]
        S, BN, BV = _tiles(k, v)
        dot, precision = dot_types(k, v)
        half = dot == tl.bfloat16
        initial = None if M0 is None else (M0, J0)
        do = torch.zeros_like(v) if do is None else do.contiguous()
        blocks = make_blocks(batch, n_tokens // batch, S, v.device, cu_seqlens)
        store = torch.bfloat16 if half else torch.float32
        new = lambda *shape, dtype=torch.float32: torch.empty(*shape, dtype=dtype, device=v.device)  # noqa: E731
        M, J = _states(k, v, beta, log_decay, blocks, initial, store)
        dM, dJ = new(blocks.count, H, P, N, dtype=store), new(blocks.count, H, N)
        sizes = (H, G, N, P, S, BN, BV, dot, precision)
        inputs = (q, k, v, beta, do, log_decay, prior, M, J, dM, dJ)
        shared_inside_kernel[(blocks.count * H,)](*inputs, blocks.table, *sizes, num_warps=4)
        first = [None if x is None else torch.empty_like(x) for x in (M0, J0)]
        for d, PN, last, out in ((dM, P * N, dM_last, first[0]), (dJ, N, dJ_last, first[1])):
            last = None if last is None else (last.float().contiguous(), None)
            reverse_states(log_decay, d, None, last, None if out is None else (out, None), blocks, PN, 0, H)
        dq_h, dk_h = (new(n_tokens, H, 1, N, dtype=store) for _ in range(2))
        dv, db = torch.empty_like(v), torch.empty_like(beta)
        dla, s = new(n_tokens, H), new(n_tokens, H)
        shared_backward_kernel[(blocks.count * H,)](
            *inputs, dq_h, dk_h, dv, db, dla, s, blocks.table, blocks.documents, blocks.count, *sizes, **UNFUSED_SUMS
        )
        if initial is None:
            clear_first_tokens(dla, batch, cu_seqlens)
        dq, dk = (torch.zeros(n_tokens, G, N, dtype=torch.float32, device=v.device) for _ in range(2))
        add_heads(dq, dq_h, 0, H // G)
        add_heads(dk, dk_h, 0, H // G)
        grads = (dq.to(q.dtype), dk.to(k.dtype), dv, db, dla.to(log_decay.dtype), (-s.sum(0)).to(prior.dtype))
        return *grads, *first, None, None, None
