"""Adapters as files: written by name, read again on the same base, merged into a normal model folder.

An adapter folder is PEFT's own (`adapter_config.json`, `adapter_model.safetensors`) and holds the new parameters whole
beside the low-rank matrices; `adapter_source.json` says which base it belongs to.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from ...base.errors import CheckpointError, UsageError
from ...base.files import (
    RECIPE,
    load_json,
    named_path,
    output_folder,
    refuse_existing,
    refuse_to_delete,
    write_json,
    write_text,
)
from ...base.schemas import read_model, write_model
from ...surgery.checkpoint.checkpoint import Checkpoint, open_checkpoint
from ...surgery.checkpoint.dtypes import STORED, dtype_of
from ...surgery.checkpoint.keymap import strip_wrappers
from ...surgery.checkpoint.tokenizer import with_tokenizer
from ...surgery.families.mamba2 import EMBEDDING
from .adapter_files import (
    CONFIG,
    SOURCE,
    TENSORS,
    AdapterSource,
    adapter_recipe,
    read_adapter_config,
    read_adapter_tensors,
)
from .adapter_settings import LoraSettings, lora_settings
from .recipe import Recipe, dump_recipe, load_recipe
from .saving import keep_own, save_tensors

logger = logging.getLogger(__name__)

_PREFIX = "base_model.model."


def save_adapter(
    peft_model: Any, trained: dict[str, Tensor], checkpoint: Checkpoint, out: Path, recipe: Recipe | None = None
) -> None:
    """Writes an adapter folder, whole or not at all.

    Args:
        peft_model: says what belongs to the adapter.
        trained: whole trained tensors by their name in `peft_model`.
        checkpoint: the base.
        out: folder to write; an earlier one is replaced.
        recipe: how it was trained, written beside it, as an adapter may leave its run folder.
    """
    from peft import get_peft_model_state_dict

    # PEFT asks for the whole of each new module; a prior that does not train is the base's.
    frozen = {
        strip_wrappers(name): checkpoint.load(_base_name(strip_wrappers(name)))
        for name, parameter in peft_model.named_parameters()
        if ".modules_to_save." in name and not parameter.requires_grad
    }
    state = get_peft_model_state_dict(peft_model, state_dict={**frozen, **trained})
    config = peft_model.peft_config["default"]
    config.base_model_name_or_path = checkpoint.source_id
    with output_folder(out, force=True) as folder:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / TENSORS)
        config.save_pretrained(folder)
        # PEFT writes sets in any order; the same adapter should be the same file.
        settings = load_json(folder / CONFIG)
        if isinstance(settings["target_modules"], list):  # a regular expression is one text
            settings["target_modules"] = sorted(settings["target_modules"])
        write_json(folder / CONFIG, settings)
        source = AdapterSource(
            base=checkpoint.source_id,
            fingerprint=checkpoint.fingerprint,
            palimpsa_layers=checkpoint.palimpsa_layers,
            weights=checkpoint.file_digests,
            scale=lora_settings(settings).scale,
        )
        write_model(source, folder / SOURCE)
        if recipe is not None:
            write_text(folder / RECIPE, dump_recipe(recipe))
        keep_own(out, folder)


def find_adapter(run: str | Path) -> Path:
    """The adapter folder of a run folder, or the folder itself.

    Raises:
        UsageError: there is none.
    """
    run = named_path(run, "run folder")
    for folder in (run / "adapter", run):
        if (folder / CONFIG).is_file() and (folder / TENSORS).is_file():
            return folder
    raise UsageError(
        f"{run}: holds no adapter (adapter/{CONFIG} and {TENSORS}); give the folder of a lora or qlora run"
    )


def open_base(adapter: Path, base: str | Path | None) -> Checkpoint:
    """The model that an adapter was trained on.

    Args:
        adapter: adapter folder.
        base: its folder or Hub id; None for the Hub id that the adapter names.

    Raises:
        UsageError: the adapter names a folder, and none was given.
        CheckpointError: it is another model.
    """
    source = read_model(AdapterSource, adapter / SOURCE)
    if base is None and "/" not in source.base:
        raise UsageError(
            f"{adapter.name}/{SOURCE}: the adapter belongs to a model folder named {source.base!r}, whose place is not"
            " recorded; give it with --base"
        )
    checkpoint = open_checkpoint(base if base is not None else source.base)
    if not checkpoint.matches(source.fingerprint):
        raise CheckpointError(
            f"{checkpoint.source_id}: is not the model that the adapter was trained on ({source.base}, layers"
            f" {list(source.palimpsa_layers)} swapped; its fingerprint is another); give that model with --base"
        )
    return checkpoint


def merge(
    run: str | Path, out: str | Path, *, base: str | Path | None = None, dtype: str = "source", force: bool = False
) -> Path:
    """Adapter and base as one model folder, a tensor in memory at a time.

    Args:
        run: run folder of a lora or qlora run, or its adapter folder.
        out: the folder to make.
        base: the model that was trained, when it is not on the Hub.
        dtype: of the stored matrices: source, float32, bfloat16 or float16.
        force: replace `out`.

    Returns:
        `out`.

    Raises:
        UsageError: no such dtype, or no adapter that can be merged.
        CheckpointError: the base is another model, or the adapter's tensors are not those of its config and its base.
    """
    dtype_of(dtype, ("source", *STORED))
    refuse_existing(out, force=force)
    adapter = find_adapter(run)
    settings = lora_settings(read_adapter_config(adapter))
    _check_scale(adapter, settings)
    checkpoint = with_tokenizer(open_base(adapter, base), option=None)
    refuse_to_delete(out, adapter, checkpoint.path)
    changed = merged_tensors(read_adapter_tensors(adapter), settings, checkpoint)
    recipe = adapter_recipe(adapter)
    if recipe is None:
        logger.warning("%s: has no %s, so what the adapter was trained on is not known", adapter, RECIPE)
    save_tensors(checkpoint, Path(out), changed, dtype, None if recipe is None else load_recipe(recipe), force=force)
    return Path(out)


def _base_name(name: str) -> str:
    """The name in the base of a tensor of a PEFT model or file, if it is a whole one."""
    return name.removeprefix(_PREFIX).replace(".default", "").replace(".modules_to_save", "")


def _check_scale(adapter: Path, settings: LoraSettings) -> None:
    """The matrices have no trace of `lora_alpha`, so what it was when they were trained stands beside them."""
    trained = read_model(AdapterSource, adapter / SOURCE).scale
    if trained is not None and not math.isclose(trained, settings.scale):
        raise CheckpointError(
            f"{CONFIG}: r, lora_alpha and use_rslora give a scale of {settings.scale:g}, and the adapter was trained "
            f"with {trained:g} ({SOURCE}); put back the file that was written with it"
        )


def merged_tensors(
    adapter: dict[str, Tensor], settings: LoraSettings, checkpoint: Checkpoint
) -> Callable[[str], Tensor | None]:
    """A function that gives each tensor that differs from the base's by its canonical name, None for the others.

    Args:
        adapter: tensors by their name in an adapter file, or in a PEFT model.
        settings: what the adapter's config says of them.
        checkpoint: the base.

    Raises:
        CheckpointError: the adapter lacks a tensor that its settings ask for, holds one that they do not or that the
            base has no place for, or one of another shape, or changes an embedding in a way that cannot be merged.
    """
    whole: dict[str, Tensor] = {}
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in adapter.items():
        plain = _base_name(name)
        module, is_low_rank, kind = plain.rpartition(".lora_")
        if is_low_rank:
            pairs.setdefault(f"{module}.weight", {})[kind.removesuffix(".weight")] = tensor
        else:
            whole[plain] = tensor
    odd = [f"{name}: {kind}" for name, pair in pairs.items() for kind in pair if kind not in ("A", "B")]
    if odd:
        raise CheckpointError(
            f"{TENSORS}: the adapter holds a low-rank part of {odd[0]}, which is no pair of matrices A and B; only "
            "adapters on linear layers can be merged here, PEFT merges others"
        )
    if EMBEDDING in (*whole, *pairs) and checkpoint.config.tie_word_embeddings:
        raise CheckpointError(
            f"{TENSORS}: the adapter changes {EMBEDDING}, to which the head of {checkpoint.source_id} is tied and "
            "which PEFT changes without the head; a merged model would have the head follow, so untie them in the base "
            "and train the adapter again"
        )
    strangers = [name for name in (*whole, *pairs) if name not in checkpoint.tensors]
    if strangers:
        raise CheckpointError(f"the adapter holds {strangers[0]}, which the base {checkpoint.source_id} does not have")
    _check_complete(whole, pairs, settings, checkpoint)
    _check_shapes(whole, pairs, settings, checkpoint)

    def changed(name: str) -> Tensor | None:
        if name in pairs:
            up, down = pairs[name]["B"].float(), pairs[name]["A"].float()
            return checkpoint.load(name).float() + settings.scale * (up @ down)
        return whole.get(name)

    return changed


def _check_complete(
    whole: Mapping[str, Tensor], pairs: Mapping[str, Any], settings: LoraSettings, checkpoint: Checkpoint
) -> None:
    """An adapter that lacks a part would leave the base's value there, and one with more was written by another config.

    Raises:
        CheckpointError: naming the tensor.
    """
    shapes = checkpoint.family.shapes(checkpoint.config)
    for held, expected, key in (
        (pairs, settings.pairs(shapes, shapes), "target_modules"),
        (whole, settings.whole(shapes), "modules_to_save"),
    ):
        absent = [name for name in shapes if name in expected and name not in held]
        if absent:
            raise CheckpointError(
                f"{TENSORS}: has nothing for {absent[0]}, which {key} of {CONFIG} covers, so the base's value would "
                "stand there; train or copy the adapter again"
            )
        surplus = [name for name in held if name not in expected]
        if surplus:
            raise CheckpointError(
                f"{TENSORS}: holds a part of {surplus[0]}, which {key} of {CONFIG} does not cover; give the two files "
                "that were written together"
            )


def _check_shapes(
    whole: Mapping[str, Tensor],
    pairs: Mapping[str, Mapping[str, Tensor]],
    settings: LoraSettings,
    checkpoint: Checkpoint,
) -> None:
    shapes = {**{name: tuple(tensor.shape) for name, tensor in whole.items()}, **_product_shapes(pairs)}
    for name, shape in shapes.items():
        if shape != checkpoint.tensors[name].shape:
            raise CheckpointError(
                f"the adapter's part of {name} does not fit its shape {list(checkpoint.tensors[name].shape)} in the "
                f"base {checkpoint.source_id}; train or copy the adapter again"
            )
    for name, pair in pairs.items():
        rank = pair["A"].shape[0]
        if rank != settings.rank:
            raise CheckpointError(
                f"{CONFIG}:r: is {settings.rank}, but the adapter's matrices of {name} are of rank {rank}, so their "
                "scale would be another; put back the file that was written with them"
            )


def _product_shapes(pairs: Mapping[str, Mapping[str, Tensor]]) -> dict[str, tuple[int, ...] | None]:
    """The shape of B @ A by name; None where that is no product of two matrices."""
    found = {}
    for name, pair in pairs.items():
        up, down = pair.get("B"), pair.get("A")
        fit = up is not None and down is not None and up.ndim == down.ndim == 2 and up.shape[1] == down.shape[0]
        found[name] = (up.shape[0], down.shape[1]) if fit else None
    return found


def save_run(module: nn.Module, trained: dict[str, Tensor], checkpoint: Checkpoint, out: Path, recipe: Recipe) -> None:
    """Writes `out/adapter`, and `out/final` with the adapter merged, of a lora or qlora run."""
    peft_model = module.model
    save_adapter(peft_model, trained, checkpoint, out / "adapter", recipe)
    settings = lora_settings(read_adapter_config(out / "adapter"))
    changed = merged_tensors(read_adapter_tensors(out / "adapter"), settings, checkpoint)
    save_tensors(checkpoint, out / "final", changed, recipe.save_dtype, recipe, force=True)
