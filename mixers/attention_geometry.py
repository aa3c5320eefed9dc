"""The sizes of mamba_ssm's attention layers and of its MLPs, apart from any model's config and from torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

_MLP_MULTIPLE = 128


@dataclass(frozen=True)
class AttentionGeometry:
    """An attention layer, by mamba_ssm's names of its settings: the keys of `attn_cfg`.

    Attributes:
        hidden_size: D, of the model.
        num_heads: query heads.
        num_heads_kv: key and value heads, each shared by num_heads / num_heads_kv query heads.
        head_dim: channels per head.
        qkv_proj_bias: whether the projection to queries, keys and values has a bias.
        out_proj_bias: whether the output projection has one.
        d_conv: taps of the causal convolution over queries, keys and values; 0 for none.
        rotary_emb_dim: leading channels of each query and key that turn with the position; 0 for none.
        rotary_emb_base: base of their frequencies.
    """

    hidden_size: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    qkv_proj_bias: bool = True
    out_proj_bias: bool = True
    d_conv: int = 0
    rotary_emb_dim: int = 0
    rotary_emb_base: float = 10000.0

    # Settings of mamba_ssm of which one value is computed here, with that value and mamba_ssm's default.
    FIXED: ClassVar = {
        "causal": (True, False),
        "mlp_dim": (0, 0),
        "softmax_scale": (None, None),
        "rotary_emb_interleaved": (False, False),
    }

    @classmethod
    def complete(cls, hidden_size: int, settings: Mapping[str, Any]) -> AttentionGeometry:
        """From an `attn_cfg` without `faults`; what it leaves out has mamba_ssm's defaults."""
        said = {key: value for key, value in settings.items() if key not in cls.FIXED and value is not None}
        heads = said["num_heads"]
        return cls(**{"num_heads_kv": heads, "head_dim": hidden_size // heads, **said, "hidden_size": hidden_size})

    @classmethod
    def faults(cls, hidden_size: int, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """The keys of an `attn_cfg` with which there is no such layer here, each with what is wrong."""
        sizes = {field.name: field.default for field in fields(cls)[1:]}
        for key in sorted(set(settings) - set(sizes) - set(cls.FIXED)):
            yield key, "is no setting of mamba_ssm's attention; remove it if it does not change the model"
        wrong = False
        for key, default in sizes.items():
            fault = _misfit(key, settings.get(key), default)
            if fault:
                wrong = True
                yield key, f"{fault}; correct the config"
        if not wrong:
            yield from _misfits(hidden_size, settings)
        for key, (supported, default) in cls.FIXED.items():
            value = settings.get(key, default)
            if type(value) is not type(supported) or value != supported:
                said = repr(value) if key in settings else f"missing, which mamba_ssm takes for {value!r}"
                yield key, f"is {said}, only {supported!r} is supported; choose a checkpoint without this variant"

    def settings(self) -> dict[str, Any]:
        """As a complete `attn_cfg`."""
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]} | {"causal": True}

    @property
    def inner_size(self) -> int:
        """Channels of all query heads, and of what attention gives out."""
        return self.num_heads * self.head_dim

    @property
    def projection_sizes(self) -> tuple[int, int, int]:
        """Sizes of the three parts of the input projection: queries, keys, values."""
        shared = self.num_heads_kv * self.head_dim
        return self.inner_size, shared, shared

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the layer's parameters in the order of a file."""
        rows, width = sum(self.projection_sizes), self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"in_proj.weight": (rows, width)}
        if self.qkv_proj_bias:
            shapes["in_proj.bias"] = (rows,)
        if self.d_conv:
            shapes |= {"conv1d.weight": (rows, 1, self.d_conv), "conv1d.bias": (rows,)}
        shapes["out_proj.weight"] = (width, self.inner_size)
        if self.out_proj_bias:
            shapes["out_proj.bias"] = (width,)
        return shapes


def mlp_width(d_intermediate: int) -> int:
    """Hidden channels of mamba_ssm's gated MLP: what the config says, rounded up to a multiple of 128."""
    return -(-d_intermediate // _MLP_MULTIPLE) * _MLP_MULTIPLE


def mlp_shapes(hidden_size: int, d_intermediate: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters of a gated MLP; none without one."""
    width = mlp_width(d_intermediate)
    return {"fc1.weight": (2 * width, hidden_size), "fc2.weight": (hidden_size, width)} if width else {}


def _misfit(key: str, value: Any, default: Any) -> str | None:
    """What is wrong with one value by itself; null stands for the default, where there is one."""
    if isinstance(default, bool):
        return None if value is None or isinstance(value, bool) else f"is {value!r}, expected true or false"
    if isinstance(default, float):
        right = value is None or (type(value) in (int, float) and 0 < value < float("inf"))
        return None if right else f"is {value!r}, expected a number above 0"
    if key == "num_heads" and value is None:
        return "is missing, expected a number of heads"
    if value is None:
        return None
    least = 0 if key in ("d_conv", "rotary_emb_dim") else 1
    return None if type(value) is int and least <= value < 2**31 else f"is {value!r}, expected a whole number"


def _misfits(hidden_size: int, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is wrong between values that are right by themselves."""
    heads = settings["num_heads"]
    shared, size = settings.get("num_heads_kv") or heads, settings.get("head_dim") or hidden_size // heads
    rotary, taps = settings.get("rotary_emb_dim") or 0, settings.get("d_conv") or 0
    if heads % shared:
        yield "num_heads_kv", f"{shared} does not divide {heads} heads; correct the config"
    if settings.get("head_dim") is None and hidden_size % heads:
        yield "head_dim", f"is missing, and {heads} heads do not divide the width {hidden_size}; correct the config"
    if rotary % 2 or rotary > size:
        yield "rotary_emb_dim", f"is {rotary}, expected an even number up to the head's {size}; correct the config"
    if taps == 1:
        yield "d_conv", "is 1, expected 0 (no convolution) or at least 2; correct the config"
