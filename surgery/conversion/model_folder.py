"""The parts of a model folder: config, weights, bundled code, tokenizer. What conversion and export both write."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...base.errors import CheckpointError, SchemaError
from ...base.files import load_json, load_yaml, write_json
from ...kernels.common.precision import dtype_name
from ..checkpoint.keymap import strip_wrappers
from ..checkpoint.licenses import license_files
from ..checkpoint.sources import reading, recipe_files, tokenizer_file_name, tokenizer_files
from ..checkpoint.tokenizer import SPECIAL_TOKEN_IDS, load_tokenizer
from ..families.hybrids import PREFIX, HybridConfig
from ..families.mamba2 import Mamba2Config
from ..measure.profile import Profile
from ..planning.plan import Plan
from .initialization import STARTS, Start, StartContext
from .writer import TensorSpec, copy_files, write_tensors

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

Config = Mamba2Config | HybridConfig


def output_config(checkpoint: Checkpoint, plan: Plan) -> Config:
    """The output's config: the source's, and what the plan adds."""
    return replace(
        checkpoint.config, gate=plan.gate, palimpsa_layers=tuple(sorted({*checkpoint.palimpsa_layers, *plan.layers}))
    )


def output_specs(checkpoint: Checkpoint, config: Config, dtype: torch.dtype | None = None) -> list[TensorSpec]:
    """Name, shape and dtype (None: as the checkpoint stores it) of every tensor of the output, in its order.

    What is kept in fp32 is stored in it; a family whose files are copied has it as it was.
    """
    family = checkpoint.family

    def stored(name: str) -> torch.dtype:
        entry = checkpoint.tensors.get(name)
        if family.keeps_fp32(config, name):
            return entry.dtype if entry and family.copied else torch.float32
        return dtype or (entry.dtype if entry else checkpoint.dtype)

    return [TensorSpec(name, shape, stored(name)) for name, shape in checkpoint.shapes(config).items()]


def write_weights(
    checkpoint: Checkpoint,
    folder: Path,
    specs: list[TensorSpec],
    changed: Callable[[str], Tensor | None] = lambda name: None,
) -> tuple[str, ...]:
    """Writes the tensors of a model into `folder`, each in the dtype of its spec.

    Args:
        checkpoint: where tensors come from.
        folder: where to.
        specs: what to write.
        changed: gives the tensors that the checkpoint lacks or has otherwise, None for the others. What the checkpoint
            stores in parts it is asked for by the name of the whole, and writes whole.

    Returns:
        The names of the weight files.
    """

    def load(name: str) -> Tensor:
        tensor = changed(name)
        return checkpoint.load(name) if tensor is None else tensor

    return tuple(write_tensors(folder, _with_wholes(checkpoint, specs, changed), load))


def _with_wholes(
    checkpoint: Checkpoint, specs: list[TensorSpec], changed: Callable[[str], Tensor | None]
) -> list[TensorSpec]:
    """The specs with one in the place of the parts of each tensor that `changed` gives."""
    merged: dict[str, TensorSpec] = {}
    for spec in specs:
        name = checkpoint.whole_of.get(spec.name)
        if name in merged:
            continue
        whole = None if name is None else changed(name)
        spec = spec if whole is None else TensorSpec(name, tuple(whole.shape), spec.dtype)
        merged[spec.name] = spec
    return list(merged.values())


def can_copy(checkpoint: Checkpoint, specs: list[TensorSpec]) -> bool:
    """Whether the output's tensors are in the weight files as they must be, but for new ones, in files of their own.

    transformers has to find them there: names with what a training wrapper put before them it does not know.
    """
    kept = {spec.name: spec.dtype for spec in specs}
    if not checkpoint.family.copied or any(kept.get(n, e.dtype) != e.dtype for n, e in checkpoint.tensors.items()):
        return False
    for path, names in checkpoint.files.items():
        gone = [name not in kept for name in names.values() if name is not None]
        if path.suffix != ".safetensors" or any(strip_wrappers(name) != name for name in names):
            return False
        if any(gone) and not all(gone):
            return False
    return True


def copy_weights(
    checkpoint: Checkpoint,
    folder: Path,
    specs: list[TensorSpec],
    changed: Callable[[str], Tensor | None] = lambda name: None,
) -> tuple[str, ...]:
    """Copies the weight files into `folder`, byte for byte, and writes new tensors into one more; see `can_copy`.

    Args, returns: as for `write_weights`.
    """
    kept = {spec.name for spec in specs}
    files = {
        path: list(names)
        for path, names in checkpoint.files.items()
        if not all(name is not None and name not in kept for name in names.values())
    }
    added = [spec for spec in specs if spec.name not in checkpoint.tensors]
    return tuple(copy_files(folder, files, added, changed))


def new_tensors(checkpoint: Checkpoint, plan: Plan, profile: Profile) -> Callable[[str], Tensor | None]:
    """Gives the new tensors of the plan's layers by name, computed when asked for; the last layer's are kept."""
    places = {
        name: (layer, number)
        for layer in plan.layers
        for number, name in enumerate(checkpoint.sites[layer].new(plan.gate))
    }

    @lru_cache(maxsize=1)
    def start(layer: int) -> Start:
        site = checkpoint.sites[layer]
        return STARTS[plan.init](
            StartContext(
                layer=layer,
                geometry=site.geometry,
                gate=plan.gate,
                seed=plan.seed,
                strength=plan.strength,
                calibration=profile.of(layer).calibration,
                load_in_proj=lambda: checkpoint.load(site.tensor("in_proj.weight")),
            )
        )

    def new(name: str) -> Tensor | None:
        layer, number = places.get(name, (None, None))
        return None if layer is None else start(layer)[number]

    return new


def write_surroundings(
    checkpoint: Checkpoint, folder: Path, config: Config, dtype: torch.dtype, *, own: bool = False
) -> None:
    """config.json, the bundled code, tokenizer and generation config.

    Args:
        checkpoint: where tokenizer and generation config come from.
        folder: where to.
        config: of the model in `folder`.
        dtype: that most of its weights are stored in.
        own: keep the config.json of a checkpoint in our layout, which may have keys that this package does not read;
            only its dtype and what its tokenizer settles are written anew.
    """
    from transformers import GenerationConfig

    from ...modeling.bundle import bundle_remote_code, remote_code_keys

    family = checkpoint.family
    model_type = f"{PREFIX}{family.name}"
    stated = {**remote_code_keys(model_type), "dtype": dtype_name(dtype)}
    if own:
        ids = {key: number for key in SPECIAL_TOKEN_IDS if (number := getattr(config, key)) is not None}
        content = {**load_json(checkpoint.path / "config.json"), **ids, **stated}
        content.pop("torch_dtype", None)
        write_json(folder / "config.json", content)
    else:
        family.write_config(config, folder, **stated)
        if checkpoint.generation_config is None:
            GenerationConfig.from_model_config(family.model_config(config)).save_pretrained(folder)
    bundle_remote_code(folder, model_type)
    copy_companions(checkpoint, folder)


def copy_companions(checkpoint: Checkpoint, folder: Path) -> None:
    """The tokenizer, the texts of the license, what the model was trained on, and the generation config if there is
    one.

    Raises:
        CheckpointError: the folder has been replaced since the checkpoint was opened.
    """
    checkpoint.refuse_replaced()
    if checkpoint.generation_config is not None:
        write_json(folder / "generation_config.json", _without_paths(checkpoint.generation_config))
    with reading(checkpoint.source_id):
        copy_tokenizer(checkpoint, folder)
        for path in license_files(checkpoint.path):
            shutil.copyfile(path, folder / path.name)
        # With their times: a training text that is younger than its recipe is not what was trained on.
        for number, path in enumerate(filter(_is_recipe, recipe_files(checkpoint.path)), 1):
            shutil.copy2(path, folder / f"recipe-{number}.yaml")


def _is_recipe(path: Path) -> bool:
    """Whether a file of that name is one of `finetune`: the source may be somebody else's."""
    try:
        content = load_yaml(path) if path.stat().st_size < 2**20 else None
    except SchemaError:
        content = None
    ours = isinstance(content, dict) and {"schema_version", "mode", "data"} <= content.keys()
    if not ours:
        logger.warning("%s: is no recipe of this program and is not carried along", path.name)
    return ours


def copy_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """The tokenizer's files, chat templates included.

    Without its settings transformers reads a tokenizer by the type of the model beside it, which may be another now;
    so they are written.
    """
    files = checkpoint.tokenizer_files
    if not files or any(path.name == "tokenizer_config.json" for path in files):
        for path in files:
            copy_without_paths(path, folder / tokenizer_file_name(path))
        return
    with tempfile.TemporaryDirectory(prefix="palimpsa-tokenizer-") as temporary:
        load_tokenizer(files[0].parent).save_pretrained(temporary)
        for path in tokenizer_files(Path(temporary)):
            copy_without_paths(path, folder / tokenizer_file_name(path))


def copy_without_paths(source: Path, target: Path) -> None:
    """Copies a tokenizer file; a JSON of settings loses entries that are paths of somebody's machine.

    Raises:
        CheckpointError: a JSON that is none.
    """
    target.parent.mkdir(exist_ok=True)
    if source.suffix == ".json" and source.stat().st_size < 2**20:
        try:
            content = json.loads(source.read_text(encoding="utf-8-sig"))
        except ValueError as error:
            raise CheckpointError(
                f"{source}: is no JSON in UTF-8 ({error}); fetch or write this file of the tokenizer again"
            ) from error
        clean = _without_paths(content)
        if clean != content:
            write_json(target, clean)
            return
    shutil.copyfile(source, target)


def _without_paths(content: Any) -> Any:
    if not isinstance(content, dict):
        return content
    return {key: value for key, value in content.items() if not (isinstance(value, str) and _is_path(value))}


def _is_path(text: str) -> bool:
    return (text.startswith(("/", "~/", "\\\\")) and len(text) > 2) or (len(text) > 3 and text[1:3] in (":\\", ":/"))
