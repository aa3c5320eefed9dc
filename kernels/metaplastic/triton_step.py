"""One token of decoding in one kernel: both states are read and written once, in place."""

import triton
import triton.language as tl

from ..common.triton_launch import power_of_two


@triton.jit
def step_kernel(
    q, k, v, beta, log_decay, prior, M, J,  # inputs; the states in place
    out, variance,  # written
    sMb, sMh, sMp, sJb, sJh, sJp,  # strides of the states
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BN: tl.constexpr, BV: tl.constexpr, VARIANCE: tl.constexpr,
):  # fmt: skip
    # A beta for every channel: a program owns BV rows of both states.
    NVB: tl.constexpr = (P + BV - 1) // BV
    pid = tl.program_id(0)
    row = pid // NVB
    i_b = row // H
    i_h = row % H
    i_g = i_h // (H // G)
    on = tl.arange(0, BN)
    ov = (pid % NVB) * BV + tl.arange(0, BV)
    mn = on < N
    mv = ov < P
    inside = mv[:, None] & mn[None, :]
    pM = M + i_b.to(tl.int64) * sMb + i_h.to(tl.int64) * sMh + ov[:, None] * sMp + on[None, :]
    pJ = J + i_b.to(tl.int64) * sJb + i_h.to(tl.int64) * sJh + ov[:, None] * sJp + on[None, :]
    m = tl.load(pM, mask=inside, other=0.0).to(tl.float32)
    j = tl.load(pJ, mask=inside, other=0.0).to(tl.float32)
    pk = (i_b * G + i_g).to(tl.int64) * N + on
    kk = tl.load(k + pk, mask=mn, other=0.0).to(tl.float32)
    qq = tl.load(q + pk, mask=mn, other=0.0).to(tl.float32)
    px = row.to(tl.int64) * P + ov
    vv = tl.load(v + px, mask=mv, other=0.0).to(tl.float32)
    bb = tl.load(beta + px, mask=mv, other=0.0).to(tl.float32)
    a = tl.exp(tl.load(log_decay + row).to(tl.float32))
    ip = tl.load(prior + i_h).to(tl.float32)
    m = a * m + vv[:, None] * kk[None, :]
    j = a * j + bb[:, None] * (kk * kk)[None, :]
    tl.store(pM, m.to(M.dtype.element_ty), mask=inside)
    tl.store(pJ, j.to(J.dtype.element_ty), mask=inside)
    R = qq[None, :] / (ip + j)
    tl.store(out + px, tl.sum(m * R, 1).to(out.dtype.element_ty), mask=mv)
    if VARIANCE:
        tl.store(variance + px, tl.sum(R * qq[None, :], 1), mask=mv)


@triton.jit
def step_grouped_kernel(
    q, k, v, beta, log_decay, prior, M, J,
    out, variance,
    sMb, sMh, sMp, sJb, sJh, sJp,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BN: tl.constexpr, BV: tl.constexpr, VARIANCE: tl.constexpr, GB: tl.constexpr,
):  # fmt: skip
    # Channels that share a beta share a row of J: one program owns them all, so that the row is updated once.
    PER: tl.constexpr = P // GB
    pid = tl.program_id(0)
    row = pid // GB
    i_j = pid % GB
    i_b = row // H
    i_h = row % H
    i_g = i_h // (H // G)
    on = tl.arange(0, BN)
    mn = on < N
    pk = (i_b * G + i_g).to(tl.int64) * N + on
    kk = tl.load(k + pk, mask=mn, other=0.0).to(tl.float32)
    qq = tl.load(q + pk, mask=mn, other=0.0).to(tl.float32)
    a = tl.exp(tl.load(log_decay + row).to(tl.float32))
    ip = tl.load(prior + i_h).to(tl.float32)
    pJ = J + i_b.to(tl.int64) * sJb + i_h.to(tl.int64) * sJh + i_j * sJp + on
    j = a * tl.load(pJ, mask=mn, other=0.0).to(tl.float32) + tl.load(beta + pid).to(tl.float32) * kk * kk
    tl.store(pJ, j.to(J.dtype.element_ty), mask=mn)
    R = qq / (ip + j)
    for c in range(0, PER, BV):
        oc = c + tl.arange(0, BV)
        mv = oc < PER
        ov = i_j * PER + oc
        inside = mv[:, None] & mn[None, :]
        pM = M + i_b.to(tl.int64) * sMb + i_h.to(tl.int64) * sMh + ov[:, None] * sMp + on[None, :]
        px = row.to(tl.int64) * P + ov
        vv = tl.load(v + px, mask=mv, other=0.0).to(tl.float32)
        m = a * tl.load(pM, mask=inside, other=0.0).to(tl.float32) + vv[:, None] * kk[None, :]
        tl.store(pM, m.to(M.dtype.element_ty), mask=inside)
        tl.store(out + px, tl.sum(m * R[None, :], 1).to(out.dtype.element_ty), mask=mv)
    if VARIANCE:
        tl.store(variance + pid, tl.sum(R * qq, 0))


def step(q, k, v, beta, log_decay, prior, M, J, out, variance) -> None:
    """Advance `M` [B, H, P, N] and `J` [B, H, g, N] by one token, in place.

    Args:
        q: [B, G, N]; k likewise.
        v: [B, H, P]; out likewise, written.
        beta: [B, H, g]; variance likewise in fp32, written, or None.
        log_decay: [B, H].
        prior: [H].
        M: any strides but 1 over N; J likewise.
    """
    B, G, N = k.shape
    H, P = v.shape[1:]
    g = beta.shape[2]
    BN = power_of_two(N)
    args = (q, k, v, beta, log_decay, prior, M, J, out, variance, *M.stride()[:3], *J.stride()[:3], H, G, N, P, BN)
    BV = min(power_of_two(P // g if g < P else P, 1), max(1, 2048 // BN))
    if g == P:
        step_kernel[(B * H * triton.cdiv(P, BV),)](*args, BV, variance is not None, num_warps=4)
    else:
        step_grouped_kernel[(B * H * g,)](*args, BV, variance is not None, g, num_warps=4)
