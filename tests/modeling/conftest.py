"""An oracle that shares no code with the model."""

import pytest
import torch
from palimpsa_surgery.modeling import PalimpsaMamba2ForCausalLM


def _softplus(x):
    return torch.where(x > 30, x, torch.log1p(torch.exp(x.clamp(max=30))))


def _oracle_mixer(config, p, prefix, h, swapped):
    """One mixer over one sequence h [T, D], token by token, in fp64; straight from the equations of the method."""
    H, P, G, N, W = config.num_heads, config.head_dim, config.n_groups, config.state_size, config.conv_kernel
    low, high = config.time_step_limit
    weight = p[prefix + "conv1d.weight"][:, 0]
    A = torch.exp(p[prefix + "A_log"])
    group = torch.arange(H) // (H // G)
    inputs = torch.zeros(W, weight.shape[0], dtype=torch.float64)
    M = torch.zeros(H, P, N, dtype=torch.float64)
    importance = torch.ones(H, P, N, dtype=torch.float64)
    if swapped:
        m = prefix + "metaplasticity."
        prior = torch.exp(p[m + "log_prior"])
        importance = importance * prior[:, None, None]
        s = p[m + "beta_scale"]
        scale = s.abs() if config.beta_scale_form == "abs" else _softplus(s)
    mu, out = M.clone(), []
    for token in h:
        z, channels, dt = torch.split(p[prefix + "in_proj.weight"] @ token, [H * P, H * P + 2 * G * N, H])
        inputs = torch.cat([inputs[1:], channels[None]])
        mixed = (inputs * weight.T).sum(0) + p[prefix + "conv1d.bias"]
        mixed = mixed / (1 + torch.exp(-mixed))
        x, B, C = torch.split(mixed, [H * P, G * N, G * N])
        x, B, C = x.view(H, P), B.view(G, N)[group], C.view(G, N)[group]
        d = _softplus(dt + p[prefix + "dt_bias"]).clamp(low, high)
        a = torch.exp(-A * d)[:, None, None]
        v = d[:, None] * x
        if swapped:
            logits = p[m + "beta_up.weight"] @ (p[m + "beta_down.weight"] @ token)
            beta = (1 / (1 + torch.exp(-logits))).view(H, -1) * (scale * d)[:, None]
            beta = beta.repeat_interleave(P // beta.shape[1], dim=1)
            before = importance
            importance = a * before + (1 - a) * prior[:, None, None] + beta[:, :, None] * B[:, None, :] ** 2
            mu = a * (before / importance) * mu + (v[:, :, None] * B[:, None, :]) / importance
            y = (mu * C[:, None, :]).sum(-1)
        else:
            M = a * M + v[:, :, None] * B[:, None, :]
            y = (M * C[:, None, :]).sum(-1)
        y = (y + p[prefix + "D"][:, None] * x).reshape(-1) * (z / (1 + torch.exp(-z)))
        y = y.view(G, -1)
        y = y / torch.sqrt((y**2).mean(1, keepdim=True) + config.layer_norm_epsilon)
        out.append(p[prefix + "out_proj.weight"] @ (y.reshape(-1) * p[prefix + "norm.weight"]))
    return torch.stack(out)


def _oracle_attention(config, p, prefix, h):
    """mamba_ssm's attention over one sequence h [T, D], token by token, in fp64."""
    settings = config.attn_cfg
    heads, shared, size = settings["num_heads"], settings["num_heads_kv"], settings["head_dim"]
    half = settings["rotary_emb_dim"] // 2
    rows = h @ p[prefix + "in_proj.weight"].T + p.get(prefix + "in_proj.bias", 0.0)
    if taps := settings["d_conv"]:
        before = torch.cat([torch.zeros(taps - 1, rows.shape[1], dtype=torch.float64), rows])
        weight, bias = p[prefix + "conv1d.weight"][:, 0], p[prefix + "conv1d.bias"]
        rows = torch.stack([(before[t : t + taps] * weight.T).sum(0) + bias for t in range(len(h))])
    out, keys, values = [], [], []
    for t in range(len(h)):
        q, k, v = (part.view(-1, size).clone() for part in rows[t].split([heads * size, shared * size, shared * size]))
        for vectors in (q, k):
            for i in range(half):
                angle = torch.tensor(t / settings["rotary_emb_base"] ** (i / half), dtype=torch.float64)
                a, b = vectors[:, i].clone(), vectors[:, i + half].clone()
                vectors[:, i] = a * angle.cos() - b * angle.sin()
                vectors[:, i + half] = a * angle.sin() + b * angle.cos()
        keys.append(k)
        values.append(v)
        found = []
        for head in range(heads):
            group = head // (heads // shared)
            scores = torch.stack([key[group] for key in keys]) @ q[head] / size**0.5
            weights = torch.exp(scores - scores.max())
            found.append(weights @ torch.stack([value[group] for value in values]) / weights.sum())
        out.append(p[prefix + "out_proj.weight"] @ torch.cat(found) + p.get(prefix + "out_proj.bias", 0.0))
    return torch.stack(out)


def oracle_logits(model: PalimpsaMamba2ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Logits [T, vocabulary] of one sequence of token ids [T], in fp64, by the recurrences themselves."""
    config = model.config
    p = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}

    def norm(x, weight):
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + config.layer_norm_epsilon) * weight

    h = p["backbone.embeddings.weight"][ids]
    for i in range(config.num_hidden_layers):
        prefix = f"backbone.layers.{i}."
        normed = norm(h, p[prefix + "norm.weight"])
        if i in config.attn_layer_idx:
            h = h + _oracle_attention(config, p, prefix + "mixer.", normed)
        else:
            h = h + _oracle_mixer(config, p, prefix + "mixer.", normed, i in config.palimpsa_layers)
        if config.d_intermediate:
            y, gate = (norm(h, p[prefix + "norm2.weight"]) @ p[prefix + "mlp.fc1.weight"].T).chunk(2, dim=-1)
            h = h + (y * gate / (1 + torch.exp(-gate))) @ p[prefix + "mlp.fc2.weight"].T
    return norm(h, p["backbone.norm_f.weight"]) @ p["lm_head.weight"].T


@pytest.fixture
def oracle():
    return oracle_logits
