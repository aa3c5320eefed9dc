"""The authors' own checkpoints (`MetaMamba2ForCausalLM`), read as converted models in which every layer is swapped.

Their module tree is that of transformers' Mamba2 (`backbone.embeddings`, `backbone.layers.N.norm`, `.mixer`,
`backbone.norm_f`, `lm_head`), with four more tensors in each mixer; `keymap.TABLES` has the names. What is taken for
granted, as no checkpoint says it:

- b_scale enters through a softplus, as in the layer that `docs/method.md` follows. A public revision of their code
  multiplied by b_scale itself; nothing in a file tells the two apart, so opening one says how it was read.
- Ip_log is kept as it is: they do not train it, and fine-tuning here does not either (`train_prior` false).
- The gated norm runs over all channels at once, which is the norm over each group only when there is one group.
- A model trained with `metaplasticity: false` is a plain Mamba2. Its gate tensors were never used and are dropped.
"""

from __future__ import annotations

import math
from typing import Any

from ...base.errors import CheckpointError
from ...mixers.geometry import GateSpec

MODEL_TYPES = ("meta_mamba2", "metamamba2")
MARKS = {"hidden_size", "num_hidden_layers", "beta_step_rank"}
"""Keys of their config that no other layout has together."""

SOFTPLUS_NOTE = (
    "b_scale is read as the argument of a softplus; a model of an early revision, which multiplied by b_scale, "
    "needs log(exp(b_scale) - 1) in its place"
)
# Defaults of their config, where they differ from those of transformers' Mamba2Config.
_DEFAULTS: dict[str, Any] = {
    "head_dim": 64,
    "vocab_size": 32000,
    "n_groups": 1,
    "norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "expand": 2,
    "initializer_range": 0.02,
    "metaplasticity": True,
    "rms_norm": True,
}
# Keys that are read here, and those that say how the model was trained.
_TRANSLATED = {"norm_eps", "metaplasticity", "beta_step_rank", "finetuning"}


def translate_config(where: str, content: dict[str, Any]) -> dict[str, Any]:
    """Their config in the terms of this package's `config.json`.

    Args:
        where: name of the file, for messages.
        content: the config.

    Returns:
        The keys under transformers' names; `model_type` is `palimpsa_mamba2` where metaplasticity is on, else `mamba2`.

    Raises:
        CheckpointError: several groups, another norm, or sizes that are no numbers.
    """
    settings = {**_DEFAULTS, **content}
    if settings["n_groups"] != 1:
        raise CheckpointError(
            f"{where}:n_groups: is {settings['n_groups']!r}, only 1 is supported for meta_mamba2; its gated norm runs "
            "over all groups at once, which a Mamba2 layer does not compute"
        )
    if not settings["rms_norm"]:
        raise CheckpointError(f"{where}:rms_norm: is false, only true is supported; choose another checkpoint")
    width, expand, size = (_whole(where, key, settings[key]) for key in ("hidden_size", "expand", "head_dim"))
    translated = {
        **{key: value for key, value in settings.items() if key not in _TRANSLATED},
        "model_type": "mamba2",
        "num_heads": content.get("num_heads", expand * width // size),
        "layer_norm_epsilon": settings["norm_eps"],
    }
    if not settings["metaplasticity"]:
        return translated
    rank = settings["beta_step_rank"]
    rank = math.ceil(width / 16) if rank == "auto" else _whole(where, "beta_step_rank", rank)
    return {
        **translated,
        "model_type": "palimpsa_mamba2",
        "palimpsa_layers": list(range(_whole(where, "num_hidden_layers", settings["num_hidden_layers"]))),
        **GateSpec(rank, size, "softplus", train_prior=False).keys(),
    }


def _whole(where: str, key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{where}: gives {key} = {value!r}, expected a whole number above 0; correct it")
    return value
