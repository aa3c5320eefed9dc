"""Adapters as files: written by name, read again on the same base, merged into a normal model folder.

An adapter folder is PEFT's own (`adapter_config.json`, `adapter_model.safetensors`) and holds the new parameters whole
beside the low-rank matrices; `adapter_source.json` says which base it belongs to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
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
from .recipe import Recipe, dump_recipe, load_recipe
from .saving import keep_own, save_tensors

logger = logging.getLogger(__name__)

_PREFIX = "base_model.model."
_NOT_PLAIN = (
    *("use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "lora_bias", "use_qalora", "use_bdlora"),
    *("layer_replication", "target_parameters", "trainable_token_indices", "alora_invocation_tokens"),
    *("arrow_config", "kasa_config", "monteclora_config"),
)
"""Settings of PEFT under which a weight is not base + scale * (B @ A)."""


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

    state = get_peft_model_state_dict(peft_model, state_dict=trained)
    config = peft_model.peft_config["default"]
    config.base_model_name_or_path = checkpoint.source_id
    with output_folder(out, force=True) as folder:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / TENSORS)
        config.save_pretrained(folder)
        # PEFT writes sets in any order; the same adapter should be the same file.
        settings = load_json(folder / CONFIG)
        settings["target_modules"] = sorted(settings["target_modules"])
        write_json(folder / CONFIG, settings)
        source = AdapterSource(
            base=checkpoint.source_id,
            fingerprint=checkpoint.fingerprint,
            palimpsa_layers=checkpoint.palimpsa_layers,
            weights=checkpoint.file_digests,
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
        CheckpointError: the base is another model, or has no place for a tensor of the adapter.
    """
    dtype_of(dtype, ("source", *STORED))
    refuse_existing(out, force=force)
    adapter = find_adapter(run)
    scale = adapter_scale(read_adapter_config(adapter))
    checkpoint = with_tokenizer(open_base(adapter, base), option=None)
    refuse_to_delete(out, adapter, checkpoint.path)
    changed = merged_tensors(read_adapter_tensors(adapter), scale, checkpoint)
    recipe = adapter_recipe(adapter)
    if recipe is None:
        logger.warning("%s: has no %s, so what the adapter was trained on is not known", adapter, RECIPE)
    save_tensors(checkpoint, Path(out), changed, dtype, None if recipe is None else load_recipe(recipe), force=force)
    return Path(out)


def adapter_scale(config: dict[str, Any]) -> float:
    """What the product of the low-rank matrices is multiplied with.

    Raises:
        UsageError: a kind of adapter that this cannot merge.
    """
    odd = [key for key in _NOT_PLAIN if config.get(key)]
    if config.get("peft_type") != "LORA" or odd:
        kind = f"{config.get('peft_type')}{' with ' + ', '.join(odd) if odd else ''}"
        raise UsageError(f"{CONFIG}: the adapter is {kind}; only plain LORA can be merged here, PEFT merges others")
    for key in ("r", "lora_alpha"):
        if type(config.get(key)) not in (int, float) or not config[key] > 0:
            raise UsageError(f"{CONFIG}:{key}: is {config.get(key)!r}, expected a number above 0; write the file again")
    root = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]
    return config["lora_alpha"] / root


def merged_tensors(adapter: dict[str, Tensor], scale: float, checkpoint: Checkpoint) -> Callable[[str], Tensor | None]:
    """A function that gives each tensor that differs from the base's by its canonical name, None for the others.

    Args:
        adapter: tensors by their name in an adapter file, or in a PEFT model.
        scale: see `adapter_scale`.
        checkpoint: the base.

    Raises:
        CheckpointError: the adapter holds a tensor that the base has no place for, or of another shape, or changes
            an embedding in a way that cannot be merged.
    """
    whole: dict[str, Tensor] = {}
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in adapter.items():
        plain = name.removeprefix(_PREFIX).replace(".default", "").replace(".modules_to_save", "")
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
    shapes = {**{name: tuple(tensor.shape) for name, tensor in whole.items()}, **_product_shapes(pairs)}
    for name, shape in shapes.items():
        if shape != checkpoint.tensors[name].shape:
            raise CheckpointError(
                f"the adapter's part of {name} does not fit its shape {list(checkpoint.tensors[name].shape)} in the "
                f"base {checkpoint.source_id}; train or copy the adapter again"
            )

    def changed(name: str) -> Tensor | None:
        if name in pairs:
            up, down = pairs[name]["B"].float(), pairs[name]["A"].float()
            return checkpoint.load(name).float() + scale * (up @ down)
        return whole.get(name)

    return changed


def _product_shapes(pairs: dict[str, dict[str, Tensor]]) -> dict[str, tuple[int, ...] | None]:
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
    scale = adapter_scale(read_adapter_config(out / "adapter"))
    changed = merged_tensors(read_adapter_tensors(out / "adapter"), scale, checkpoint)
    save_tensors(checkpoint, out / "final", changed, recipe.save_dtype, recipe, force=True)
