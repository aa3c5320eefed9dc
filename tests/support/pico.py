"""Pico models written in every layout that checkpoints come in, built on the spot so that no file is shipped.

Each `write_*` function returns the tensors it wrote under their canonical names. `edit` changes the tensors by their
names in the file just before they are saved, `config` updates the config file (a value of None removes its key).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from palimpsa_surgery.base.files import load_json
from palimpsa_surgery.base.text import embedded_checkpoint_path
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
Edit = Callable[[Tensors], Tensors | None]

EMBEDDED = embedded_checkpoint_path()


# Of mamba_ssm's hybrids: two heads of queries share one of keys and values.
ATTENTION = {
    "causal": True,
    "d_conv": 4,
    "head_dim": 8,
    "num_heads": 2,
    "num_heads_kv": 1,
    "out_proj_bias": False,
    "qkv_proj_bias": False,
    "rotary_emb_dim": 4,
}


@dataclass(frozen=True)
class Pico:
    """Sizes of a pico model. `rows` is the padded vocabulary; `attention` the layers that have that in the mixer's
    place, `mlp` the hidden channels of the MLP behind every layer."""

    width: int = 16
    layers: int = 3
    head_dim: int = 8
    state: int = 8
    groups: int = 1
    vocab: int = 29
    rows: int = 32
    bias: bool = False
    conv_bias: bool = True
    tied: bool = True
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    swapped: tuple[int, ...] = ()
    rank: int = 2
    beta_groups: int = 8
    attention: tuple[int, ...] = ()
    attn_cfg: dict[str, Any] = field(default_factory=lambda: dict(ATTENTION))
    mlp: int = 0

    @property
    def inner(self) -> int:
        return 2 * self.width

    @property
    def heads(self) -> int:
        return self.inner // self.head_dim

    def tensors(self) -> Tensors:
        """Canonical names; a tied head is the embedding's own tensor."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int, scale: float = 0.2) -> torch.Tensor:
            return (scale * torch.randn(shape, generator=generator)).to(self.dtype)

        found = {"backbone.embeddings.weight": normal(self.rows, self.width, scale=1.0)}
        for layer in range(self.layers):
            block = self._attention(normal) if layer in self.attention else self._layer(normal, layer in self.swapped)
            for name, tensor in (block | self._mlp(normal)).items():
                found[f"backbone.layers.{layer}.{name}"] = tensor
        found["backbone.norm_f.weight"] = 1 + normal(self.width)
        embedding = found["backbone.embeddings.weight"]
        found["lm_head.weight"] = embedding if self.tied else normal(self.rows, self.width)
        return found

    def _attention(self, normal: Callable[..., torch.Tensor]) -> Tensors:
        heads, size = self.attn_cfg["num_heads"], self.attn_cfg["head_dim"]
        rows = (heads + 2 * self.attn_cfg.get("num_heads_kv", heads)) * size
        found = {"norm.weight": 1 + normal(self.width), "mixer.in_proj.weight": normal(rows, self.width)}
        if self.attn_cfg.get("qkv_proj_bias", True):
            found["mixer.in_proj.bias"] = normal(rows)
        if self.attn_cfg.get("d_conv"):
            found["mixer.conv1d.weight"] = normal(rows, 1, self.attn_cfg["d_conv"])
            found["mixer.conv1d.bias"] = normal(rows)
        found["mixer.out_proj.weight"] = normal(self.width, heads * size)
        if self.attn_cfg.get("out_proj_bias", True):
            found["mixer.out_proj.bias"] = normal(self.width)
        return found

    def _mlp(self, normal: Callable[..., torch.Tensor]) -> Tensors:
        if not self.mlp:
            return {}
        rounded = -(-self.mlp // 128) * 128
        return {
            "norm2.weight": 1 + normal(self.width),
            "mlp.fc1.weight": normal(2 * rounded, self.width),
            "mlp.fc2.weight": normal(self.width, rounded),
        }

    def _layer(self, normal: Callable[..., torch.Tensor], swapped: bool) -> Tensors:
        convolved = self.inner + 2 * self.groups * self.state
        projected = self.inner + convolved + self.heads
        found = {
            "norm.weight": 1 + normal(self.width),
            "mixer.in_proj.weight": normal(projected, self.width),
            "mixer.conv1d.weight": normal(convolved, 1, 4),
            "mixer.dt_bias": normal(self.heads) - 2,
            "mixer.A_log": 1 + normal(self.heads),
            "mixer.D": 1 + normal(self.heads),
            "mixer.norm.weight": 1 + normal(self.inner),
            "mixer.out_proj.weight": normal(self.width, self.inner),
        }
        if self.bias:
            found["mixer.in_proj.bias"] = normal(projected)
            found["mixer.out_proj.bias"] = normal(self.width)
        if self.conv_bias:
            found["mixer.conv1d.bias"] = normal(convolved)
        if swapped:
            found["mixer.metaplasticity.beta_down.weight"] = normal(self.rank, self.width)
            found["mixer.metaplasticity.beta_up.weight"] = normal(self.heads * self.beta_groups, self.rank)
            found["mixer.metaplasticity.beta_scale"] = normal(self.heads).float().abs()
            found["mixer.metaplasticity.log_prior"] = normal(self.heads).float()
        return found


def write_mamba_ssm(
    folder: Path,
    *,
    format: str = "bin",
    shards: int = 1,
    config: dict[str, Any] | None = None,
    edit: Edit | None = None,
    **sizes: Any,
) -> Tensors:
    """mamba_ssm's own layout: `embedding`, `d_model`, `n_layer`, `ssm_cfg`."""
    pico = Pico(**sizes)
    content = {
        "d_model": pico.width,
        "d_intermediate": pico.mlp,
        "n_layer": pico.layers,
        "vocab_size": pico.vocab,
        "ssm_cfg": {
            "layer": "Mamba2",
            "d_state": pico.state,
            "headdim": pico.head_dim,
            "ngroups": pico.groups,
            "bias": pico.bias,
            "conv_bias": pico.conv_bias,
        },
        "attn_layer_idx": list(pico.attention),
        "attn_cfg": pico.attn_cfg if pico.attention else {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": pico.tied,
    }
    _write_config(folder / "config.json", content, config)
    tensors = pico.tensors()
    renamed = {name.replace("embeddings", "embedding"): tensor for name, tensor in tensors.items()}
    save_weights(folder, _edited(renamed, edit), format=format, shards=shards)
    return tensors


def write_hf(
    folder: Path,
    *,
    format: str = "safetensors",
    shards: int = 1,
    config: dict[str, Any] | None = None,
    edit: Edit | None = None,
    **sizes: Any,
) -> Tensors:
    """transformers' Mamba2 layout; with `swapped=(1, ...)` a folder that is converted already."""
    pico = Pico(**sizes)
    content = {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "palimpsa_mamba2" if pico.swapped else "mamba2",
        "hidden_size": pico.width,
        "num_hidden_layers": pico.layers,
        "num_heads": pico.heads,
        "head_dim": pico.head_dim,
        "state_size": pico.state,
        "n_groups": pico.groups,
        "expand": 2,
        "conv_kernel": 4,
        "vocab_size": pico.rows,
        "use_bias": pico.bias,
        "use_conv_bias": pico.conv_bias,
        "tie_word_embeddings": pico.tied,
        "time_step_limit": [0.0, float("inf")],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    if pico.swapped:
        content["architectures"] = ["PalimpsaMamba2ForCausalLM"]
        content["palimpsa_layers"] = list(pico.swapped)
        content |= {
            "beta_rank": pico.rank,
            "beta_groups": pico.beta_groups,
            "beta_scale_form": "abs",
            "train_prior": True,
        }
    _write_config(folder / "config.json", content, config)
    tensors = pico.tensors()
    save_weights(folder, _edited(dict(tensors), edit), format=format, shards=shards)
    return tensors


def write_codestral(
    folder: Path, *, config: dict[str, Any] | None = None, edit: Edit | None = None, **sizes: Any
) -> Tensors:
    """Mistral's `params.json` + `consolidated.safetensors`. What it does not say is mamba_ssm's default, so the heads
    are 64 wide and the state has 128 keys."""
    pico = Pico(**{"width": 32, "layers": 2, "head_dim": 64, "state": 128, "tied": False, **sizes})
    content = {
        "dim": pico.width,
        "n_layers": pico.layers,
        "vocab_size": pico.rows,
        "n_groups": pico.groups,
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
        "tie_embeddings": pico.tied,
        "model_type": "mamba",
    }
    _write_config(folder / "params.json", content, config)
    tensors = pico.tensors()
    renamed = {"model." + name.replace("embeddings", "embedding"): tensor for name, tensor in tensors.items()}
    save_file(_separate(_edited(renamed, edit)), folder / "consolidated.safetensors")
    return tensors


def save_weights(folder: Path, tensors: Tensors, *, format: str = "safetensors", shards: int = 1) -> None:
    """Saves as one file, or as numbered shards with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    stem, suffix = ("model", "safetensors") if format == "safetensors" else ("pytorch_model", "bin")
    names = list(tensors)
    parts = [names[start::shards] for start in range(shards)]
    weight_map = {}
    for number, part in enumerate(parts, start=1):
        file = f"{stem}.{suffix}" if shards == 1 else f"{stem}-{number:05d}-of-{shards:05d}.{suffix}"
        weight_map |= dict.fromkeys(part, file)
        _save(folder / file, {name: tensors[name] for name in part})
    if shards > 1:
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))


def _save(path: Path, tensors: Tensors) -> None:
    if path.suffix == ".safetensors":
        save_file(_separate(tensors), path, metadata={"format": "pt"})
    else:
        torch.save(tensors, path)


def _separate(tensors: Tensors) -> Tensors:
    """safetensors refuses shared storage: the repeated matrix is written twice, as older exports have it."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        found[name] = tensor.clone() if tensor.data_ptr() in seen else tensor.contiguous()
        seen.add(tensor.data_ptr())
    return found


def _edited(tensors: Tensors, edit: Edit | None) -> Tensors:
    if edit is None:
        return tensors
    return edit(tensors) or tensors


def _write_config(path: Path, content: dict[str, Any], changes: dict[str, Any] | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**content, **(changes or {})}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}, indent=2))


def with_first_token(content: dict[str, Any]) -> None:
    """Changes the content of a tokenizer.json: it puts its end-of-text token, id 0, at the start of a text, too."""
    first = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    words = [{"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB")]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, words[0]],
        "pair": [first, *words],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }


def write_tokenizer(
    folder: Path,
    *,
    slow: bool = False,
    bare: bool = False,
    edit: Callable[[dict[str, Any]], None] | None = None,
    **settings: Any,
) -> Path:
    """The embedded tokenizer in `folder`: its one file, or the two of a slow one; with other settings."""
    folder.mkdir(parents=True, exist_ok=True)
    content = load_json(EMBEDDED / "tokenizer.json")
    if edit is not None:
        edit(content)
    if slow:
        merges = (" ".join(pair) if isinstance(pair, list) else pair for pair in content["model"]["merges"])
        (folder / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
        settings = {"tokenizer_class": "GPT2Tokenizer", **settings}
    else:
        (folder / "tokenizer.json").write_text(json.dumps(content))
    if not bare:
        known = load_json(EMBEDDED / "tokenizer_config.json")
        (folder / "tokenizer_config.json").write_text(json.dumps({**known, **settings}))
    return folder
