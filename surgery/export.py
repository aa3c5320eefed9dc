"""A model back in mamba_ssm's layout, `config.json` with `ssm_cfg` and one `pytorch_model.bin`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.console import progress
from ..base.errors import CheckpointError, UsageError, VerificationError
from ..base.files import output_folder, refuse_existing, write_json
from .checkpoint import Checkpoint, open_checkpoint
from .convert import copy_without_paths
from .keymap import EMBEDDING, HEAD, expected_shapes

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "pytorch_model.bin"
_NORM_EPSILON = 1e-5
_LARGEST = torch.finfo(torch.float32).max


def export_mamba_ssm(
    src: str | Path | Checkpoint,
    out: str | Path,
    *,
    off: bool = False,
    force: bool = False,
    revision: str | None = None,
    token: str | None = None,
) -> Path:
    """Writes a plain Mamba2, or a converted model without its importance, as mamba_ssm would have saved it.

    mamba_ssm reads one `.bin` file, so the whole model is in memory while it is written.

    Args:
        src: folder, Hub id, or an open checkpoint, of any layout.
        out: the folder to make.
        off: leave the importance of swapped layers out. What remains is their Mamba2 part with the weights as they are
            now; it equals the model with metaplasticity off, not the model.
        force: replace `out` when it exists.
        revision: of a Hub id.
        token: for a private Hub id.

    Returns:
        `out`.

    Raises:
        UsageError: layers are swapped and `off` was not given.
        CheckpointError: the model has what mamba_ssm's layout cannot say.
        VerificationError: what was written does not read back as the same tensors; nothing is kept.
    """
    refuse_existing(out, force=force)
    checkpoint = src if isinstance(src, Checkpoint) else open_checkpoint(src, revision=revision, token=token)
    swapped = checkpoint.palimpsa_layers
    if swapped and not off:
        raise UsageError(
            f"{checkpoint.source_id}: layers {', '.join(map(str, swapped))} are Palimpsa-M, for which mamba_ssm's "
            "layout has no place; give --off to leave their importance out, which is another function"
        )
    content = mamba_ssm_config(checkpoint)
    names = list(expected_shapes({**checkpoint.config, "palimpsa_layers": []}))
    with output_folder(out, force=force) as folder:
        write_json(folder / "config.json", content)
        torch.save(_state_dict(checkpoint, names), folder / WEIGHTS_FILE)
        for path in checkpoint.tokenizer_files:
            copy_without_paths(path, folder / path.name)
        if checkpoint.generation_config is not None:
            write_json(folder / "generation_config.json", checkpoint.generation_config)
        _check(checkpoint, folder, names)
    left_out = f", {len(checkpoint.tensors) - len(names)} tensors of the importance left out" if swapped else ""
    logger.info("wrote %s: %d tensors in mamba_ssm's layout%s", Path(out).name, len(names), left_out)
    return Path(out)


def mamba_ssm_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The content of mamba_ssm's `config.json`: the fields of its `MambaConfig` and no other, which it would refuse.

    Raises:
        CheckpointError: a norm epsilon other than the one mamba_ssm has built in.
    """
    config = checkpoint.config
    if config["layer_norm_epsilon"] != _NORM_EPSILON:
        raise CheckpointError(
            f"{checkpoint.source_id}: has layer_norm_epsilon {config['layer_norm_epsilon']}, mamba_ssm's is always "
            f"{_NORM_EPSILON}; the model cannot be written in its layout"
        )
    layer = {
        "layer": "Mamba2",
        "d_state": config["state_size"],
        "d_conv": config["conv_kernel"],
        "expand": config["expand"],
        "headdim": config["head_dim"],
        "ngroups": config["n_groups"],
        "bias": config["use_bias"],
        "conv_bias": config["use_conv_bias"],
        "chunk_size": config["chunk_size"],
    }
    low, high = config["time_step_limit"]
    if (low, high) != (0.0, float("inf")):
        layer["dt_limit"] = [low, min(high, _LARGEST)]  # JSON has no infinity
    return {
        "d_model": config["hidden_size"],
        "d_intermediate": 0,
        "n_layer": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"],
        "ssm_cfg": layer,
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": config["residual_in_fp32"],
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,  # vocab_size counts the rows that are there, padding included
        "tie_embeddings": config["tie_word_embeddings"],
    }


def _state_dict(checkpoint: Checkpoint, names: list[str]) -> dict[str, Tensor]:
    """Copies under mamba_ssm's names; torch.save would write the whole file behind a mapped view. A tied head is the
    embedding itself, stored once."""
    state = {_their_name(name): checkpoint.load(name).clone() for name in progress(names, "reading")}
    if HEAD not in names:
        state[HEAD] = state[_their_name(EMBEDDING)]
    return state


def _their_name(name: str) -> str:
    return "backbone.embedding.weight" if name == EMBEDDING else name


def _check(checkpoint: Checkpoint, folder: Path, names: list[str]) -> None:
    written = open_checkpoint(folder)
    same = list(written.tensors) == names and all(
        torch.equal(written.load(name), checkpoint.load(name)) for name in names
    )
    if not same:
        raise VerificationError(
            f"{folder.name}: what was written does not read back as the tensors of {checkpoint.source_id}; "
            "nothing was kept"
        )
