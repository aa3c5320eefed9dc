"""The trained model as a folder like the one it came from: plain transformers loads it, the next stage reads it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from ...base.files import RECIPE, not_ours, output_folder, write_text
from ...kernels.common.precision import DTYPES
from ...surgery.checkpoint.checkpoint import Checkpoint
from ...surgery.checkpoint.sources import is_of_tokenizer, reading
from ...surgery.conversion.card import kept_readme
from ...surgery.conversion.export import card_without_surgery
from ...surgery.conversion.model_folder import output_specs, write_surroundings, write_weights
from ...surgery.families.hybrids import PREFIX
from .checkpointing import full_tensor, trained_parameters
from .recipe import Recipe, dump_recipe

logger = logging.getLogger(__name__)

_OF_THE_SOURCE = ("eval.json", "eval-*.png", RECIPE, "recipe-*.yaml")
"""What is said of a source alone: its figures, and its recipes, which `copy_companions` counts among the earlier."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth")


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
    save_tensors(checkpoint, out, trained.get, recipe.save_dtype, recipe, force=True)


def save_tensors(
    checkpoint: Checkpoint,
    out: Path,
    changed: Callable[[str], Tensor | None],
    dtype: str,
    recipe: Recipe | None = None,
    *,
    force: bool = False,
) -> None:
    """A model folder, whole or not at all, with the tensors that `changed` gives and everything else from `checkpoint`.

    Tokenizer, generation config, plan, profile, report and card of the source come along.

    Args:
        checkpoint: the model that was trained.
        out: the folder to make.
        changed: gives the tensor of a canonical name, None where it is the checkpoint's.
        dtype: "source", or the dtype of the matrices.
        recipe: written beside the weights.
        force: replace `out`, but for what a user has put there.
    """
    asked = DTYPES.get(dtype)
    specs = output_specs(checkpoint, checkpoint.config, asked)
    own = checkpoint.layout.startswith(PREFIX)
    checkpoint.refuse_replaced()
    with output_folder(out, force=force) as folder:
        if own:
            _carry_along(checkpoint, folder)
        else:
            name = out.resolve().name
            write_text(folder / "README.md", card_without_surgery(checkpoint, name, checkpoint.palimpsa_layers))
        write_weights(checkpoint, folder, specs, changed)
        write_surroundings(checkpoint, folder, checkpoint.config, asked or checkpoint.dtype, own=own)
        if recipe is not None:
            write_text(folder / RECIPE, dump_recipe(recipe))
        keep_own(out, folder)
    logger.info("saved %s", out)


def _carry_along(checkpoint: Checkpoint, folder: Path) -> None:
    """Copies what lies beside the weights and the tokenizer of a model folder of ours, but for its own figures."""
    with reading(checkpoint.source_id):
        for path in sorted(checkpoint.path.iterdir()):
            said = any(path.match(pattern) for pattern in _OF_THE_SOURCE)
            if path.is_file() and not (said or _is_weights(path) or is_of_tokenizer(path.name)):
                shutil.copyfile(path, folder / path.name)


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


def _is_weights(path: Path) -> bool:
    return any(path.match(pattern) for pattern in _WEIGHTS)
