"""Tensor names: one table per source layout, from the names found in files to the names of `modeling/`.

A new layout is one more table in `TABLES` (and, where its config differs, one function in `layouts.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...mixers.geometry import GATE, GateSpec
from ..families.mamba2 import EMBEDDING, HEAD

# Wrappers that leave their name in a state dict: DataParallel, torch.compile, FSDP, activation checkpointing.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


@dataclass(frozen=True)
class Rule:
    """One line of a table.

    Attributes:
        source: pattern of the whole source name, after wrappers are stripped.
        target: the canonical name, with the pattern's groups as `\\1`.
        transform: turns the source tensor into the canonical one, or None when it is copied. It must also work on
            meta tensors, from which the canonical shape is read before any weight is.
        dropped: why a tensor of this name is no part of the model; None when it is.
        part_of: the model's tensor that this one is a part of; None when it is all of it.
    """

    source: str
    target: str
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None
    dropped: str | None = None
    part_of: str | None = None


# `embedding` is mamba_ssm's name and `embeddings` that of transformers, yet files of both kinds carry either. A model
# saved without its head lacks the `backbone.` prefix; Codestral's consolidated file and trainers add `model.`.
_MAMBA2 = (
    Rule(r"(?:model\.)?(?:backbone\.)?embeddings?\.weight", EMBEDDING),
    Rule(
        r"(?:model\.)?(?:backbone\.)?layers\.(\d+)\.(norm\.weight|mixer\.(?:(?:in_proj|out_proj|conv1d)\.(?:weight|bias)"
        r"|norm\.weight|A_log|D|dt_bias))",
        r"backbone.layers.\1.\2",
    ),
    Rule(r"(?:model\.)?(?:backbone\.)?norm_f\.weight", "backbone.norm_f.weight"),
    Rule(r"(?:model\.)?lm_head\.weight", HEAD),
)
# Of the authors' MetaMamba2 (see `metamamba2.py`), in the order of `GateSpec.TENSORS`.
_META_NAMES = (r"b_rank_proj\.weight", r"b_proj\.weight", "b_scale", "Ip_log")
_METAPLASTIC = (
    Rule(
        rf"(?:model\.)?(?:backbone\.)?layers\.(\d+)\.mixer\.{GATE}\.({'|'.join(map(re.escape, GateSpec.TENSORS))})",
        rf"backbone.layers.\1.mixer.{GATE}.\2",
    ),
)
_META = tuple(
    Rule(
        rf"(?:model\.)?(?:backbone\.)?layers\.(\d+)\.mixer\.{theirs}",
        rf"backbone.layers.\1.mixer.{GATE}.{ours}",
    )
    for theirs, ours in zip(_META_NAMES, GateSpec.TENSORS, strict=True)
)
_META_UNUSED = Rule(
    rf"(?:model\.)?(?:backbone\.)?layers\.\d+\.mixer\.(?:{'|'.join(_META_NAMES)})",
    "",
    dropped="part of the importance gate, which this model was trained without (metaplasticity: false)",
)
TABLES: dict[str, tuple[Rule, ...]] = {
    "mamba_ssm": _MAMBA2,
    "codestral": _MAMBA2,
    "hf_mamba2": _MAMBA2,
    "palimpsa_mamba2": _MAMBA2 + _METAPLASTIC,
    "meta_mamba2": _MAMBA2 + _META,
    "meta_mamba2 (off)": (*_MAMBA2, _META_UNUSED),
}


def strip_wrappers(name: str) -> str:
    """The name without what training wrappers add to it: `module.`, `_orig_mod.` and their like, at any depth."""
    return _WRAPPERS.sub("", name)


def translate(name: str, layout: str) -> tuple[str, Rule] | None:
    """The canonical name of a source tensor and the rule that gave it; None when no rule of the layout fits."""
    stripped = strip_wrappers(name)
    for rule in TABLES[layout]:
        match = re.fullmatch(rule.source, stripped)
        if match:
            return match.expand(rule.target), rule
    return None


def canonical_shape(rule: Rule, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape a source tensor of `shape` has after the rule's transform."""
    if rule.transform is None:
        return shape
    return tuple(rule.transform(torch.empty(shape, device="meta")).shape)
