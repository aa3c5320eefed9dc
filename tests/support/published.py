"""The recurrences of other models as their papers write them, one head, token by token: oracles, sharing no code.

q, k [T, N], v [T, P]; gates [T]. States are [P, N] and read by S q, unless a paper has them the other way round.
"""

import torch


def read(states, q):
    return torch.stack([S @ q[t] for t, S in enumerate(states)])


def mamba2(x, dt, A, B, C):
    """h_t = exp(dt A) h_{t-1} + dt B x^T, y_t = C^T h_t, with h [N, P] (Dao and Gu, 2024)."""
    h, out = torch.zeros(B.shape[1], x.shape[1], dtype=x.dtype), []
    for t in range(len(x)):
        h = torch.exp(dt[t] * A) * h + dt[t] * B[t][:, None] * x[t][None, :]
        out.append(C[t] @ h)
    return torch.stack(out)


def retention(q, k, v, gamma):
    """(Q K^T * D) V with D[n, m] = gamma^(n - m), the parallel form (Sun et al., 2023)."""
    n = torch.arange(len(q), dtype=q.dtype)
    distance = n[:, None] - n[None, :]
    return ((q @ k.T) * torch.where(distance < 0, 0.0, gamma**distance)) @ v


def lightning(q, k, v, slope):
    """kv_t = exp(-s) kv_{t-1} + k v^T, o_t = q^T kv_t (Qin et al., 2024)."""
    kv, out = torch.zeros(k.shape[1], v.shape[1], dtype=k.dtype), []
    for t in range(len(q)):
        kv = torch.exp(-slope) * kv + k[t][:, None] @ v[t][None, :]
        out.append(q[t] @ kv)
    return torch.stack(out)


def linear_attention(q, k, v):
    """o_t = sum over s <= t of (q_t k_s) v_s (Katharopoulos et al., 2020, without the normalizer)."""
    return (q @ k.T).tril() @ v


def gated_linear_attention(q, k, v, a):
    """S_t = a_t S_{t-1} + k v^T with one gate per head (Yang et al., 2024a)."""
    S, out = torch.zeros(k.shape[1], v.shape[1], dtype=k.dtype), []
    for t in range(len(q)):
        S = a[t] * S + torch.outer(k[t], v[t])
        out.append(S.T @ q[t])
    return torch.stack(out)


def palimpsa(q, k, v, a, beta, prior):
    """I = a I + (1 - a) I_prior + beta k^2, mu = a (I_old / I) mu + v k / I; beta [T, P] (Bonnet et al., 2026)."""
    importance = torch.full((v.shape[1], k.shape[1]), prior, dtype=k.dtype)
    mu, out = torch.zeros_like(importance), []
    for t in range(len(q)):
        old = importance
        importance = a[t] * old + (1 - a[t]) * prior + beta[t][:, None] * k[t].square()
        mu = a[t] * (old / importance) * mu + torch.outer(v[t], k[t]) / importance
        out.append(mu @ q[t])
    return torch.stack(out)


def mesa(q, k, v, a, beta, ridge):
    """G = a G + beta v k^T, H = a H + beta k k^T, o = G (H + ridge)^-1 q (von Oswald et al., 2025)."""
    G, H, out = torch.zeros(v.shape[1], k.shape[1], dtype=k.dtype), torch.zeros(k.shape[1], k.shape[1]).to(k), []
    for t in range(len(q)):
        G, H = a[t] * G + beta[t] * torch.outer(v[t], k[t]), a[t] * H + beta[t] * torch.outer(k[t], k[t])
        out.append(G @ torch.linalg.inv(H + ridge * torch.eye(len(H), dtype=H.dtype)) @ q[t])
    return torch.stack(out)


def gated_delta_net(q, k, v, a, b):
    """S = S (a (I - b k k^T)) + b v k^T (Yang, Kautz and Hatamizadeh, 2025); a [T], or [T, N] for Kimi's decay."""
    S, states = torch.zeros(v.shape[1], k.shape[1], dtype=k.dtype), []
    eye = torch.eye(k.shape[1], dtype=k.dtype)
    for t in range(len(q)):
        S = S @ (a[t] * eye) @ (eye - b[t] * torch.outer(k[t], k[t])) + b[t] * torch.outer(v[t], k[t])
        states.append(S)
    return read(states, q)


def delta_net(q, k, v, b):
    """v_old = S k; S = S - v_old k^T + (b v + (1 - b) v_old) k^T (Schlag et al., 2021)."""
    S, states = torch.zeros(v.shape[1], k.shape[1], dtype=k.dtype), []
    for t in range(len(q)):
        old = S @ k[t]
        S = S - torch.outer(old, k[t]) + torch.outer(b[t] * v[t] + (1 - b[t]) * old, k[t])
        states.append(S)
    return read(states, q)


def longhorn_implicit(q, k, v, beta):
    """S = argmin |S - S_old|^2 + beta |S k - v|^2, its stationary point solved for (Liu et al., 2024)."""
    S, states = torch.zeros(v.shape[1], k.shape[1], dtype=k.dtype), []
    for t in range(len(q)):
        system = torch.eye(k.shape[1], dtype=k.dtype) + beta[t] * torch.outer(k[t], k[t])
        S = (S + beta[t] * torch.outer(v[t], k[t])) @ torch.linalg.inv(system)
        states.append(S)
    return read(states, q)


def longhorn(q, k, v, beta):
    """S = (1 - e k^2) * S + e v k^T, e = beta / (1 + beta k.k): the diagonal of k k^T (Liu et al., 2024)."""
    S, states = torch.zeros(v.shape[1], k.shape[1], dtype=k.dtype), []
    for t in range(len(q)):
        e = beta[t] / (1 + beta[t] * k[t] @ k[t])
        S = (1 - e * k[t] ** 2)[None, :] * S + e * torch.outer(v[t], k[t])
        states.append(S)
    return read(states, q)
