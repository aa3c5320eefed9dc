"""A tiny Palimpsa-D model in which everything matters, and a time loop that shares no code with it."""

import math

import pytest
import torch
from palimpsa_surgery.modeling import PalimpsaDConfig, PalimpsaDForCausalLM


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def unit(x):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def rms(x, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def loop_layer(config, p, h):
    """One mixer over one sequence h [T, D], token by token; `p` by our names, differentiable."""
    H, P, G, N, W = config.num_heads, config.head_dim, config.n_groups, config.state_size, config.conv_kernel
    group = torch.arange(H) // (H // G)
    history = {name: [h.new_zeros(p[f"{name}_proj.weight"].shape[0])] * (W - 1) for name in "qkv"}
    prior = torch.exp(p["metaplasticity.log_prior"])[:, None, None]
    s = p["metaplasticity.beta_scale"]
    scale = s.abs() if config.beta_scale_form == "abs" else torch.log1p(torch.exp(s))
    importance, mu = prior.expand(H, P, N), h.new_zeros(H, P, N)
    out = []
    for token in h:
        mixed = {}
        for name in "qkv":
            history[name] = [*history[name][-(W - 1) :], p[f"{name}_proj.weight"] @ token]
            y = (torch.stack(history[name], 1) * p[f"{name}_conv1d.weight"][:, 0]).sum(1)
            mixed[name] = y * sigmoid(y)
        q, k = (unit(mixed[name].view(G, N))[group][:, None] for name in "qk")
        x = mixed["v"].view(H, P)
        d = torch.log1p(torch.exp(p["dt_proj.weight"] @ token + p["dt_bias"]))
        a = torch.exp(-torch.exp(p["A_log"]) * d)[:, None, None]
        b = sigmoid(p["bs_proj.weight"] @ token)
        logits = p["metaplasticity.beta_up.weight"] @ (p["metaplasticity.beta_down.weight"] @ token)
        beta = sigmoid(logits).view(H, -1) * (scale * b)[:, None]
        beta = beta.repeat_interleave(P // beta.shape[1], 1)[:, :, None]
        old = importance
        importance = a * old + (1 - a) * prior + beta * k**2
        mu = a * (old / importance) * mu + (b[:, None] * x)[:, :, None] * k / importance
        o = N**-0.5 * (mu * q).sum(-1) + p["D"][:, None] * x
        z = (p["g_proj.weight"] @ token).view(H, P)
        o = rms(o, config.layer_norm_epsilon) * p["o_norm.weight"] * z * sigmoid(z)
        out.append(p["o_proj.weight"] @ o.reshape(-1))
    return torch.stack(out)


def loop_logits(model, ids, parameters=None):
    """Logits [T, vocabulary] of ids [T], in fp64; differentiable in `parameters`, the model's own by default."""
    config = model.config
    p = parameters or {name: x.detach().double() for name, x in model.named_parameters()}
    h = p["backbone.embeddings.weight"][ids]
    for i in range(config.num_hidden_layers):
        prefix = f"backbone.layers.{i}."
        of_mixer = {name.removeprefix(f"{prefix}mixer."): x for name, x in p.items() if name.startswith(prefix)}
        h = h + loop_layer(config, of_mixer, rms(h, config.layer_norm_epsilon) * p[f"{prefix}norm.weight"])
    return rms(h, config.layer_norm_epsilon) * p["backbone.norm_f.weight"] @ p["backbone.embeddings.weight"].T


@pytest.fixture
def oracle():
    """oracle(model, ids, parameters=None)."""
    return loop_logits


@pytest.fixture
def layer_loop():
    """layer_loop(config, parameters of one mixer, h)."""
    return loop_layer


def make_config(**over):
    """Two layers; every size differs from every other where it can."""
    values = {
        **{"vocab_size": 53, "hidden_size": 24, "num_hidden_layers": 2, "num_heads": 6, "head_dim": 8},
        **{"state_size": 10, "n_groups": 3, "beta_rank": 5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    }
    return PalimpsaDConfig(**{**values, **over})


@torch.no_grad()
def make_lively(config, seed=0):
    """Windows from one to hundreds of tokens, and a beta that changes the output a lot."""
    torch.manual_seed(seed)
    model = PalimpsaDForCausalLM(config).eval()
    for block in model.backbone.layers:
        mixer = block.mixer
        for name, parameter in mixer.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 1.0 / math.sqrt(parameter.shape[1]))
            elif parameter.dim() == 3:
                parameter.normal_(0.0, 0.7)
            elif name == "o_norm.weight":
                parameter.uniform_(0.5, 1.5)
        mixer.A_log.copy_(torch.linspace(-5.0, 1.0, config.num_heads))
        mixer.dt_bias.uniform_(-2.0, 0.5)
        mixer.D.uniform_(-1.0, 1.0)
        mixer.metaplasticity.beta_scale.uniform_(2.0, 8.0)
        mixer.metaplasticity.log_prior.uniform_(-1.0, 1.0)
        block.norm.weight.uniform_(0.5, 1.5)
    model.backbone.embeddings.weight.normal_(0.0, 1.0)
    return model


@pytest.fixture
def lively_d():
    """lively_d(seed=0, **changes of the config)."""
    return lambda seed=0, **over: make_lively(make_config(**over), seed)
