"""A model as it is in another layout: mamba_ssm's (`config.json` with `ssm_cfg`, one `pytorch_model.bin`), or ours."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...base.console import counted, progress
from ...base.errors import CheckpointError, UsageError, VerificationError
from ...base.files import output_folder, refuse_existing, refuse_to_delete, write_json, write_text
from ...kernels.common.precision import dtype_name
from ..checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.licenses import card_metadata, license_terms
from ..checkpoint.tokenizer import with_tokenizer
from ..families.mamba2 import EMBEDDING, HEAD
from .card import MARKER, CardFacts, checkpoint_facts, front_matter, kept_readme, render_card
from .model_folder import (
    Config,
    can_copy,
    copy_companions,
    copy_weights,
    output_specs,
    write_surroundings,
    write_weights,
)
from .writer import TensorSpec, room

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "pytorch_model.bin"
_NORM_EPSILON = 1e-5
_LARGEST = torch.finfo(torch.float32).max


def export(
    src: str | Path | Checkpoint,
    out: str | Path,
    *,
    layout: str | None = None,
    off: bool = False,
    force: bool = False,
    revision: str | None = None,
    token: str | None = None,
) -> Path:
    """Writes a model, of any layout, in the one asked for. No layer is swapped.

    mamba_ssm reads one `.bin` file, so for it the whole model is in memory while it is written.

    Args:
        src: folder, Hub id, or an open checkpoint.
        out: the folder to make.
        layout: `mamba_ssm` (of a hybrid: its `model_type` in transformers), or `palimpsa_mamba2` (`palimpsa_` and that
            type), which `push` takes; None for the first.
        off: leave the importance of swapped layers out. What remains is their plain part with the weights as they are
            now; it equals the model with metaplasticity off, not the model.
        force: replace `out` when it exists, but for a README.md that a user wrote there.
        revision: of a Hub id.
        token: for a private Hub id.

    Returns:
        `out`.

    Raises:
        UsageError: the model has no such layout, or layers are swapped, the first is asked for and `off` was not given.
        CheckpointError: the model has what mamba_ssm's layout cannot say.
        VerificationError: what was written does not read back as the same tensors; nothing is kept.
    """
    refuse_existing(out, force=force)
    checkpoint = src if isinstance(src, Checkpoint) else open_checkpoint(src, revision=revision, token=token)
    layouts = checkpoint.family.layouts
    layout = layouts[0] if layout is None else layout
    if layout not in layouts:
        raise UsageError(
            f"--layout {layout}: there is no such layout to write for {checkpoint.source_id}; choose one of "
            f"{', '.join(layouts)}"
        )
    checkpoint = with_tokenizer(checkpoint, option=None)
    refuse_to_delete(out, checkpoint.path)
    swapped = checkpoint.palimpsa_layers
    listed = ", ".join(map(str, swapped))
    if swapped and layout == layouts[0] and not off:
        raise UsageError(
            f"{checkpoint.source_id}: has {checkpoint.family.swapped} layers ({listed}), for which the layout "
            f"{layout} has no place; give --off to leave their importance out, which is another function"
        )
    config = replace(checkpoint.config, palimpsa_layers=()) if off else checkpoint.config
    specs = output_specs(checkpoint, config)
    readme = kept_readme(out)
    with output_folder(out, force=force) as folder:
        writer = _write_palimpsa if layout == layouts[1] else _WRITERS.get(layout, _write_host)
        writer(checkpoint, folder, config, specs, Path(out).resolve().name)
        if readme is not None:
            write_text(folder / "README.md", readme)
        _check(checkpoint, folder, specs)
    importance = counted(len(checkpoint.tensors) - len(specs), "tensor")
    left_out = f", {importance} of the importance left out" if swapped and off else ""
    logger.info("wrote %s: %s in the layout %s%s", Path(out).name, counted(len(specs), "tensor"), layout, left_out)
    return Path(out)


def _write_mamba_ssm(checkpoint: Checkpoint, folder: Path, config: Config, specs: list[TensorSpec], name: str) -> None:
    write_json(folder / "config.json", mamba_ssm_config(checkpoint))
    state = _state_dict(checkpoint, [spec.name for spec in specs])
    with room(WEIGHTS_FILE, sum(spec.nbytes for spec in specs)):
        torch.save(state, folder / WEIGHTS_FILE)
    copy_companions(checkpoint, folder)
    _write_license(checkpoint, folder, name)


def _write_host(checkpoint: Checkpoint, folder: Path, config: Config, specs: list[TensorSpec], name: str) -> None:
    """A hybrid as its class in transformers reads it: the files from before the surgery, where they are still there."""
    _write_weights(checkpoint, folder, specs)
    checkpoint.family.write_host_config(config, folder, dtype=dtype_name(checkpoint.dtype))
    copy_companions(checkpoint, folder)
    _write_license(checkpoint, folder, name)


def _write_weights(checkpoint: Checkpoint, folder: Path, specs: list[TensorSpec]) -> None:
    write = copy_weights if can_copy(checkpoint, specs) else write_weights
    write(checkpoint, folder, specs)


def _write_license(checkpoint: Checkpoint, folder: Path, name: str) -> None:
    if checkpoint.license:
        terms = license_terms(card_metadata(checkpoint.path))
        head = front_matter(name, license=checkpoint.license, **terms)
        write_text(folder / "README.md", f"{head}\n{MARKER}\n\n# {name}\n")


def _write_palimpsa(checkpoint: Checkpoint, folder: Path, config: Config, specs: list[TensorSpec], name: str) -> None:
    _write_weights(checkpoint, folder, specs)
    write_surroundings(checkpoint, folder, config, checkpoint.dtype)
    write_text(folder / "README.md", card_without_surgery(checkpoint, name, config.palimpsa_layers))


def card_without_surgery(checkpoint: Checkpoint, name: str, swapped: Sequence[int]) -> str:
    """The card of a folder of ours that no conversion made; license and base model are those of `checkpoint`."""
    facts = CardFacts(
        name=name,
        plan=None,
        swapped=tuple(swapped),
        dtype=dtype_name(checkpoint.dtype),
        **checkpoint_facts(checkpoint),
    )
    return render_card(facts)


_WRITERS: dict[str, Callable[..., None]] = {"mamba_ssm": _write_mamba_ssm}
"""Those of layouts that are no class of transformers."""


def mamba_ssm_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The content of mamba_ssm's `config.json`: the fields of its `MambaConfig` and no other, which it would refuse.

    Raises:
        CheckpointError: a norm epsilon other than the one mamba_ssm has built in.
    """
    config = checkpoint.config
    if config.layer_norm_epsilon != _NORM_EPSILON:
        raise CheckpointError(
            f"{checkpoint.source_id}: has layer_norm_epsilon {config.layer_norm_epsilon}, mamba_ssm's is always "
            f"{_NORM_EPSILON}; the model cannot be written in its layout"
        )
    layer = {
        "layer": "Mamba2",
        "d_state": config.state_size,
        "d_conv": config.conv_kernel,
        "expand": config.expand,
        "headdim": config.head_dim,
        "ngroups": config.n_groups,
        "bias": config.use_bias,
        "conv_bias": config.use_conv_bias,
        "chunk_size": config.chunk_size,
    }
    low, high = config.time_step_limit
    if (low, high) != (0.0, float("inf")):
        layer["dt_limit"] = [low, min(high, _LARGEST)]  # JSON has no infinity
    return {
        "d_model": config.hidden_size,
        "d_intermediate": config.d_intermediate,
        "n_layer": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "ssm_cfg": layer,
        "attn_layer_idx": list(config.attn_layer_idx),
        "attn_cfg": config.attention.settings() if config.attention else {},
        "rms_norm": True,
        "residual_in_fp32": config.residual_in_fp32,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,  # vocab_size counts the rows that are there, padding included
        "tie_embeddings": config.tie_word_embeddings,
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


def _check(checkpoint: Checkpoint, folder: Path, specs: list[TensorSpec]) -> None:
    """Every tensor as it was, but for the few that are kept in fp32 whatever the rest is in."""
    written = open_checkpoint(folder)
    same = list(written.tensors) == [spec.name for spec in specs] and all(
        torch.equal(written.load(spec.name).double(), checkpoint.load(spec.name).double()) for spec in specs
    )
    if not same:
        raise VerificationError(
            f"{folder.name}: what was written does not read back as the tensors of {checkpoint.source_id}; "
            "nothing was kept"
        )
