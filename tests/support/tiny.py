"""Tiny models of our own class: one that is random, and one whose importance gates really matter.

`pico.py` writes tiny checkpoints in every layout that sources come in, without our code.
"""

import math
import shutil

import torch
from palimpsa_surgery.base.text import embedded_checkpoint_path
from palimpsa_surgery.mixers.attention import Attention
from palimpsa_surgery.modeling import PalimpsaMamba2Config, PalimpsaMamba2ForCausalLM

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 8,
    "state_size": 8,
    "n_groups": 2,
    "chunk_size": 16,
    "beta_rank": 2,
    "beta_groups": 2,
}


def make_model(layers=(1,), seed=0, **changes) -> PalimpsaMamba2ForCausalLM:
    """A random model with these layers swapped, its importance gate at the paper's start."""
    torch.manual_seed(seed)
    return PalimpsaMamba2ForCausalLM(PalimpsaMamba2Config(**{**SIZES, **changes, "palimpsa_layers": list(layers)}))


def save_folder(model, folder):
    """The model as a folder with the embedded checkpoint's tokenizer."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded_checkpoint_path() / name, folder / name)
    return folder


ATTENTION = {
    "causal": True,
    "d_conv": 4,
    "head_dim": 10,
    "num_heads": 4,
    "num_heads_kv": 2,
    "out_proj_bias": False,
    "qkv_proj_bias": True,
    "rotary_emb_dim": 6,
    "rotary_emb_base": 100.0,
}
HYBRID = {"attn_layer_idx": [1], "attn_cfg": ATTENTION, "d_intermediate": 100}
"""For `make_tiny_config`: the layer between the swapped ones is attention, and every layer has an MLP."""


def make_tiny_config(**over) -> PalimpsaMamba2Config:
    """Three layers, of which the first and last are swapped; every size differs from every other where it can."""
    values = {
        "vocab_size": 53,
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_heads": 6,
        "head_dim": 8,
        "state_size": 10,
        "n_groups": 2,
        "chunk_size": 16,
        "palimpsa_layers": [0, 2],
        "beta_rank": 5,
        "beta_groups": 8,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return PalimpsaMamba2Config(**{**values, **over})


@torch.no_grad()
def make_lively_model(config: PalimpsaMamba2Config, seed: int = 0) -> PalimpsaMamba2ForCausalLM:
    """Windows from one to hundreds of tokens, keys of order one, and a beta that changes the output a lot.

    Attention, where there is some, looks at few tokens, and not only at the last.
    """
    torch.manual_seed(seed)
    model = PalimpsaMamba2ForCausalLM(config).eval()
    for block in model.backbone.layers:
        mixer = block.mixer
        mixer.in_proj.weight.normal_(0.0, 1.0 / math.sqrt(config.hidden_size))
        mixer.out_proj.weight.normal_(0.0, 1.0 / math.sqrt(config.hidden_size))
        if mixer.conv1d is not None:
            mixer.conv1d.weight.normal_(0.0, 0.7)
            mixer.conv1d.bias.normal_(0.0, 0.3)
        if hasattr(block, "mlp"):
            block.mlp.fc1.weight.normal_(0.0, 1.0 / math.sqrt(config.hidden_size))
            block.mlp.fc2.weight.normal_(0.0, 1.0 / math.sqrt(config.hidden_size))
        if isinstance(mixer, Attention):
            mixer.in_proj.weight.mul_(2.0)
            continue
        mixer.norm.weight.uniform_(0.5, 1.5)
        block.norm.weight.uniform_(0.5, 1.5)
        mixer.A_log.copy_(torch.linspace(-5.0, 1.0, config.num_heads))
        mixer.dt_bias.uniform_(-2.0, 0.5)
        mixer.D.uniform_(-1.0, 1.0)
        if hasattr(mixer, "metaplasticity"):
            mixer.metaplasticity.beta_scale.uniform_(0.5, 3.0)
            mixer.metaplasticity.log_prior.uniform_(-1.0, 1.0)
            mixer.metaplasticity.beta_down.weight.normal_(0.0, 1.0)
            mixer.metaplasticity.beta_up.weight.normal_(0.0, 1.0)
    model.backbone.embeddings.weight.normal_(0.0, 1.0)
    return model
