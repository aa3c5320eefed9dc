"""mamba_ssm's attention and MLP alone; whole models are compared with an oracle in `tests/modeling`."""

import math
import re

import pytest
import torch
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.mixers.attention import Attention, GatedMLP
from palimpsa_surgery.mixers.attention_geometry import AttentionGeometry, mlp_shapes, mlp_width
from palimpsa_surgery.mixers.attention_states import AttentionStates
from tiny import HYBRID, make_tiny_config
from torch.nn.functional import conv1d, silu
from transformers import DynamicCache

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative L2

SETTINGS = [
    {"num_heads": 4},
    {"num_heads": 4, "qkv_proj_bias": False, "out_proj_bias": False, "head_dim": 10, "rotary_emb_dim": 10},
    {"num_heads": 6, "num_heads_kv": 2, "head_dim": 6, "d_conv": 4, "rotary_emb_dim": 4, "rotary_emb_base": 50},
    {"num_heads": 3, "num_heads_kv": 1, "d_conv": 2, "softmax_scale": None, "mlp_dim": 0},
]


def geometry(**settings):
    settings = {"causal": True, **settings}
    assert list(AttentionGeometry.faults(24, settings)) == []
    return AttentionGeometry.complete(24, settings)


def expected(module, hidden):
    """The whole layer at once, by matrices: [B, T, D] in fp64."""
    of = module.geometry
    length, heads, shared, size = hidden.shape[1], of.num_heads, of.num_heads_kv, of.head_dim
    p = {name: tensor.detach().double() for name, tensor in module.state_dict().items()}
    rows = hidden.double() @ p["in_proj.weight"].T + p.get("in_proj.bias", 0.0)
    if of.d_conv:
        padded = torch.nn.functional.pad(rows.transpose(1, 2), (of.d_conv - 1, 0))
        rows = conv1d(padded, p["conv1d.weight"], p["conv1d.bias"], groups=rows.shape[-1]).transpose(1, 2)
    rows = rows.unflatten(-1, (heads + 2 * shared, size)).transpose(1, 2)
    if half := of.rotary_emb_dim // 2:
        # A complex number (first half, second half) is turned by the position times its frequency.
        turns = torch.arange(length).double()[:, None] / of.rotary_emb_base ** (torch.arange(half).double() / half)
        both = torch.complex(rows[..., :half], rows[..., half : 2 * half]) * torch.polar(turns.new_ones(()), turns)
        turned = torch.cat([both.real, both.imag, rows[..., 2 * half :]], dim=-1)
        rows = torch.cat([turned[:, : heads + shared], rows[:, heads + shared :]], dim=1)
    group = torch.arange(heads) // (heads // shared)
    q, k, v = rows[:, :heads], rows[:, heads : heads + shared][:, group], rows[:, heads + shared :][:, group]
    scores = (q @ k.transpose(2, 3) / math.sqrt(size)).masked_fill(~torch.ones(length, length).tril().bool(), -math.inf)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return mixed @ p["out_proj.weight"].T + p.get("out_proj.bias", 0.0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
def test_attention_is_what_its_equations_say(settings, dtype, rel):
    torch.manual_seed(0)
    module = Attention(geometry(**settings)).to(dtype)
    hidden = (3 * torch.randn(2, 21, 24)).to(dtype)
    output = module(hidden)
    assert output.dtype == dtype
    assert rel(output, expected(module, hidden)) < TOLERANCE[dtype]


@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
def test_shapes_are_those_of_the_module(settings):
    of = geometry(**settings)
    assert {name: tuple(p.shape) for name, p in Attention(of).state_dict().items()} == of.shapes()
    assert AttentionGeometry.complete(24, of.settings()) == of


@pytest.mark.parametrize(("said", "width"), [(1, 128), (128, 128), (129, 256), (0, 0)])
def test_the_mlp_is_as_wide_as_in_mamba_ssm(said, width, rel):
    assert mlp_width(said) == width
    if not said:
        assert mlp_shapes(24, said) == {}
        return
    module = GatedMLP(24, said).double()
    assert {name: tuple(p.shape) for name, p in module.state_dict().items()} == mlp_shapes(24, said)
    hidden = torch.randn(2, 3, 24, dtype=torch.float64)
    first, second = module.fc1.weight[:width], module.fc1.weight[width:]
    assert rel(module(hidden), (hidden @ first.T * silu(hidden @ second.T)) @ module.fc2.weight.T) < 1e-12


@pytest.mark.parametrize(
    ("changes", "key", "fault"),
    [
        ({"causal": False}, "causal", "is False, only True is supported"),
        ({"causal": ...}, "causal", "is missing, which mamba_ssm takes for False, only True is supported"),
        ({"mlp_dim": 64}, "mlp_dim", "is 64, only 0 is supported"),
        ({"softmax_scale": 1.0}, "softmax_scale", "is 1.0, only None is supported"),
        ({"rotary_emb_interleaved": True}, "rotary_emb_interleaved", "is True, only False is supported"),
        ({"window_size": 8}, "window_size", "is no setting of mamba_ssm's attention; remove it"),
        ({"num_heads": ...}, "num_heads", "is missing, expected a number of heads"),
        ({"num_heads": 0}, "num_heads", "is 0, expected a whole number"),
        ({"num_heads": 5}, "head_dim", "is missing, and 5 heads do not divide the width 24"),
        ({"num_heads_kv": 3}, "num_heads_kv", "3 does not divide 4 heads"),
        ({"head_dim": 6.0}, "head_dim", "is 6.0, expected a whole number"),
        ({"d_conv": 1}, "d_conv", r"is 1, expected 0 \(no convolution\) or at least 2"),
        ({"d_conv": True}, "d_conv", "is True, expected a whole number"),
        ({"rotary_emb_dim": 3}, "rotary_emb_dim", "is 3, expected an even number up to the head's 6"),
        ({"rotary_emb_dim": 8}, "rotary_emb_dim", "is 8, expected an even number up to the head's 6"),
        ({"rotary_emb_base": 0}, "rotary_emb_base", "is 0, expected a number above 0"),
        ({"qkv_proj_bias": "no"}, "qkv_proj_bias", "is 'no', expected true or false"),
    ],
)
def test_settings_that_are_not_computed_are_named(changes, key, fault):
    settings = {name: value for name, value in {"causal": True, "num_heads": 4, **changes}.items() if value is not ...}
    found = dict(AttentionGeometry.faults(24, settings))
    assert list(found) == [key]
    assert re.match(fault, found[key])


def test_a_cache_without_keys_is_refused():
    with pytest.raises(UsageError, match="DynamicCache holds no keys and convolution state for layer 1; build it with"):
        AttentionStates(DynamicCache(config=make_tiny_config()), 1)


def test_keys_are_kept_without_their_gradient_and_used_with_it():
    """What a piece gives the keys of its own tokens a gradient for, one pass does, too."""
    torch.manual_seed(0)
    module = Attention(geometry(num_heads=4, d_conv=4), layer_idx=1).double()
    hidden = torch.randn(1, 9, 24, dtype=torch.float64)
    whole = hidden.clone().requires_grad_()
    (module(whole)[:, 5:] ** 2).sum().backward()
    cache = DynamicCache(config=make_tiny_config(**HYBRID))
    module(hidden[:, :5], cache=cache)
    assert not cache.layers[1].keys.requires_grad
    rest = hidden[:, 5:].clone().requires_grad_()
    (module(rest, cache=cache) ** 2).sum().backward()
    assert torch.allclose(rest.grad, whole.grad[:, 5:], atol=1e-12)
