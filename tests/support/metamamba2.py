"""Pico checkpoints as the authors' own code saves them."""

import json

import pico
import torch

THEIRS = {
    "metaplasticity.beta_down.weight": "b_rank_proj.weight",
    "metaplasticity.beta_up.weight": "b_proj.weight",
    "metaplasticity.beta_scale": "b_scale",
    "metaplasticity.log_prior": "Ip_log",
}


def config_of(model: pico.Pico, **changes):
    content = {
        "architectures": ["MetaMamba2ForCausalLM"],
        "auto_map": {"AutoConfig": "elsewhere.MetaMamba2Config"},
        "model_type": "meta_mamba2",
        "hidden_size": model.width,
        "num_hidden_layers": model.layers,
        "head_dim": model.head_dim,
        "state_size": model.state,
        "n_groups": 1,
        "beta_step_rank": model.rank,
        "norm_eps": 1e-5,
        "vocab_size": model.rows,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "metaplasticity": True,
        "finetuning": False,
        "attn_mode": "chunk",
    }
    return {key: value for key, value in {**content, **changes}.items() if value is not None}


def write(folder, sizes=None, edit=None, **changes):
    """A checkpoint as the authors' code saves it; returns the tensors under the names of this package."""
    model = pico.Pico(**{"swapped": (0, 1, 2), "dtype": torch.float32, **(sizes or {})})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(model, **changes)))
    tensors = model.tensors()
    renamed = dict(tensors)
    for ours, theirs in THEIRS.items():
        renamed = {name.replace(ours, theirs): tensor for name, tensor in renamed.items()}
    pico.save_weights(folder, edit(renamed) if edit else renamed)
    return tensors
