"""The trained model as a folder like the one it came from: plain transformers loads it, the next stage reads it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...base.files import load_json, not_ours, output_folder, write_json, write_text
from ...modeling.bundle import auto_map, bundle_remote_code
from ...modeling.palimpsa_mamba2.configuration_palimpsa_mamba2 import PalimpsaMamba2Config
from ...surgery.checkpoint.checkpoint import Checkpoint
from ...surgery.checkpoint.loading import keeps_fp32
from ...surgery.checkpoint.sources import is_of_tokenizer, reading
from ...surgery.checkpoint.tokenizer import SPECIAL_TOKEN_IDS
from ...surgery.conversion.card import kept_readme
from ...surgery.conversion.export import card_without_surgery
from ...surgery.conversion.model_folder import copy_companions
from ...surgery.conversion.writer import TensorSpec, write_tensors
from .checkpointing import full_tensor, trained_parameters
from .recipe import Recipe, dump_recipe

logger = logging.getLogger(__name__)

_OF_THE_SOURCE = ("eval.json", "eval-*.png", "recipe.yaml", "recipe-*.yaml")
"""What is said of a source alone: its figures, and its recipes, which `copy_companions` counts among the earlier."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth")


def stored_dtype(name: str, source: torch.dtype, asked: str) -> torch.dtype:
    """The dtype a tensor is written in: rates and scales fp32, the rest as asked, or as the source has it."""
    if keeps_fp32(name):
        return torch.float32
    return source if asked == "source" else getattr(torch, asked)


def gather(module: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """Whole trained tensors of a `CausalLoss` on the CPU, by their name in its model; nothing unless `keep`.

    A collective call where parameters are sharded: every process makes it.
    """
    tensors = {}
    for name, parameter in trained_parameters(module).items():
        whole = full_tensor(parameter.detach())
        if keep:
            tensors[name.removeprefix("model.")] = whole.cpu()
    return tensors


def save_model(trained: dict[str, Tensor], checkpoint: Checkpoint, out: Path, recipe: Recipe) -> None:
    """Writes the model folder `out`: what trained from `trained`, what was frozen bit for bit from `checkpoint`."""
    save_tensors(
        checkpoint,
        out,
        lambda name: trained[name] if name in trained else checkpoint.load(name),
        recipe.save_dtype,
        recipe,
        force=True,
    )


def save_tensors(
    checkpoint: Checkpoint,
    out: Path,
    load: Callable[[str], Tensor],
    dtype: str,
    recipe: Recipe | None = None,
    *,
    force: bool = False,
) -> None:
    """A model folder, whole or not at all, with the tensors that `load` gives and everything else from `checkpoint`.

    Tokenizer, generation config, plan, profile, report and card of the source come along.

    Args:
        checkpoint: the model that was trained.
        out: the folder to make.
        load: gives the tensor of a canonical name.
        dtype: "source", or the dtype of the matrices.
        recipe: written beside the weights.
        force: replace `out`, but for what a user has put there.
    """
    specs = output_specs(checkpoint, dtype)
    with output_folder(out, force=force) as folder:
        carry_along(checkpoint, folder, out.resolve().name)
        write_tensors(folder, specs, load)
        main_dtype = checkpoint.dtype if dtype == "source" else getattr(torch, dtype)
        write_json(folder / "config.json", model_config(checkpoint, main_dtype))
        bundle_remote_code(folder)
        if recipe is not None:
            write_text(folder / "recipe.yaml", dump_recipe(recipe))
        keep_own(out, folder)
    logger.info("saved %s", out)


def keep_own(old: Path, new: Path) -> None:
    """Copies what a user has put into a folder that is replaced: their README.md, and what no stage writes."""
    kept = not_ours(old) if (old / "config.json").is_file() or (old / "adapter_config.json").is_file() else []
    kept = [name for name in kept if not (new / name).exists() and not name.startswith(".")]
    for name in kept:
        if (old / name).is_dir():
            shutil.copytree(old / name, new / name, symlinks=True)
        else:
            shutil.copy2(old / name, new / name, follow_symlinks=False)
    readme = kept_readme(old)
    if readme is not None:
        write_text(new / "README.md", readme)
        kept = ["README.md", *kept]
    if kept:
        logger.info("%s: kept %s, which this program has not written", old.name, ", ".join(kept))


def output_specs(checkpoint: Checkpoint, dtype: str) -> list[TensorSpec]:
    """Every tensor of the model folder, in the dtype it is stored in."""
    tensors = checkpoint.tensors.items()
    return [TensorSpec(name, entry.shape, stored_dtype(name, entry.dtype, dtype)) for name, entry in tensors]


def carry_along(checkpoint: Checkpoint, folder: Path, name: str) -> None:
    """The files beside the weights: of a converted model all but its own figures, of another one tokenizer, generation
    config and a card that keeps its licence; of both the recipes, as those of what this one was made from."""
    if checkpoint.layout != "palimpsa_mamba2":
        write_text(folder / "README.md", card_without_surgery(checkpoint, name, checkpoint.palimpsa_layers))
    else:
        with reading(checkpoint.source_id):
            for path in sorted(checkpoint.path.iterdir()):
                said = any(path.match(pattern) for pattern in _OF_THE_SOURCE)
                if path.is_file() and not (said or _is_weights(path) or is_of_tokenizer(path.name)):
                    shutil.copyfile(path, folder / path.name)
    copy_companions(checkpoint, folder)


def model_config(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Any]:
    """The content of `config.json`: a converted model's own with the new dtype, else one made from the source's."""
    if checkpoint.layout == "palimpsa_mamba2":
        known = {key: checkpoint.config[key] for key in SPECIAL_TOKEN_IDS if checkpoint.config.get(key) is not None}
        config = {**load_json(checkpoint.path / "config.json"), **known}
    else:
        config = json.loads(PalimpsaMamba2Config(**checkpoint.config).to_json_string(use_diff=False))
    config.pop("torch_dtype", None)
    config.update(architectures=["PalimpsaMamba2ForCausalLM"], auto_map=auto_map())
    return {**config, "dtype": str(dtype).removeprefix("torch.")}


def _is_weights(path: Path) -> bool:
    return any(path.match(pattern) for pattern in _WEIGHTS)
