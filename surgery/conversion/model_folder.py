"""The parts of a model folder: config, weights, bundled code, tokenizer. What conversion and export both write."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...base.console import progress
from ...base.errors import CheckpointError
from ...base.files import write_json
from ...mixers.geometry import keeps_fp32
from ..checkpoint.licenses import license_files
from ..checkpoint.sources import tokenizer_file_name, tokenizer_files
from ..checkpoint.tokenizer import load_tokenizer
from ..families.base import Family
from ..families.mamba2 import Mamba2Config
from ..measure.profile import Profile
from ..planning.plan import Plan
from .initialization import STARTS, Start, StartContext
from .report import dtype_name
from .writer import StreamingSafetensorsWriter, TensorSpec, cast

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint


def output_config(checkpoint: Checkpoint, plan: Plan) -> Mamba2Config:
    """The output's config: the source's, and what the plan adds."""
    return replace(
        checkpoint.config, gate=plan.gate, palimpsa_layers=tuple(sorted({*checkpoint.palimpsa_layers, *plan.layers}))
    )


def output_specs(family: Family, config: Mamba2Config, dtype: torch.dtype) -> list[TensorSpec]:
    """Name, shape and dtype of every tensor of the output, in the order of the model."""
    return [
        TensorSpec(name, shape, torch.float32 if keeps_fp32(name) else dtype)
        for name, shape in family.shapes(config).items()
    ]


def write_weights(
    checkpoint: Checkpoint, folder: Path, plan: Plan, profile: Profile, specs: list[TensorSpec]
) -> tuple[str, ...]:
    """Streams copied, cast and new tensors into `folder`; returns the names of the weight files."""
    new = new_tensors(checkpoint, plan, profile)
    with StreamingSafetensorsWriter(folder, specs) as writer:
        for spec in progress(writer.specs, "writing"):
            if spec.name not in checkpoint.tensors:
                writer.write(spec.name, new(spec.name).to(spec.dtype))
                continue
            as_stored = checkpoint.tensors[spec.name].dtype == spec.dtype
            extent = checkpoint.extent(spec.name) if as_stored else None
            checkpoint.check(spec.name)
            if extent is None or not writer.copy(spec.name, extent):
                writer.write(spec.name, cast(spec.name, checkpoint.load(spec.name), spec.dtype))
    return tuple(writer.files)


def new_tensors(checkpoint: Checkpoint, plan: Plan, profile: Profile) -> Callable[[str], Tensor]:
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
                calibration=profile.layers[layer].calibration,
                load_in_proj=lambda: checkpoint.load(site.tensor("in_proj.weight")),
            )
        )

    def load(name: str) -> Tensor:
        layer, number = places[name]
        return start(layer)[number]

    return load


def write_surroundings(checkpoint: Checkpoint, folder: Path, config: Mamba2Config, dtype: torch.dtype) -> None:
    """config.json with `auto_map`, the bundled code, tokenizer and generation config."""
    from transformers import GenerationConfig

    from ...modeling.bundle import auto_map, bundle_remote_code

    model_config = checkpoint.family.model_config(
        config, architectures=["PalimpsaMamba2ForCausalLM"], dtype=dtype_name(dtype), auto_map=auto_map()
    )
    model_config.save_pretrained(folder)
    bundle_remote_code(folder)
    copy_companions(checkpoint, folder)
    if checkpoint.generation_config is None:
        GenerationConfig.from_model_config(model_config).save_pretrained(folder)


def copy_companions(checkpoint: Checkpoint, folder: Path) -> None:
    """The tokenizer, the texts of the licence, and the generation config if there is one."""
    copy_tokenizer(checkpoint, folder)
    if checkpoint.generation_config is not None:
        write_json(folder / "generation_config.json", _without_paths(checkpoint.generation_config))
    for path in license_files(checkpoint.path):
        shutil.copyfile(path, folder / path.name)


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
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{source}: is no JSON in UTF-8 ({str(error).partition(';')[0]}); fetch or write this file of the "
                "tokenizer again"
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
