"""The parts of a model folder: config, weights, bundled code, tokenizer. What conversion and export both write."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...base.console import progress
from ...base.errors import CheckpointError, SchemaError
from ...base.files import load_yaml, write_json
from ..checkpoint.keymap import METAPLASTIC_NAMES, expected_shapes
from ..checkpoint.licenses import license_files
from ..checkpoint.sources import reading, recipe_files, tokenizer_file_name, tokenizer_files
from ..checkpoint.tokenizer import load_tokenizer
from ..measure.profile import Profile
from ..planning.plan import SHARED_KEYS, Plan
from .initialization import STARTS, Start, StartContext
from .report import dtype_name
from .writer import StreamingSafetensorsWriter, TensorSpec, cast

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

FP32_NAMES = ("mixer.A_log", "mixer.dt_bias", "mixer.D", "metaplasticity.beta_scale", "metaplasticity.log_prior")
"""Endings of the tensors that are stored in fp32 whatever the rest is: decays amplify the rounding of these."""


def output_config(checkpoint: Checkpoint, plan: Plan) -> dict[str, Any]:
    """Arguments of the output's `PalimpsaMamba2Config`: the source's, and what the plan adds."""
    swapped = sorted({*checkpoint.palimpsa_layers, *plan.layers})
    return {**checkpoint.config, **{key: getattr(plan, key) for key in SHARED_KEYS}, "palimpsa_layers": swapped}


def output_specs(config: dict[str, Any], dtype: torch.dtype) -> list[TensorSpec]:
    """Name, shape and dtype of every tensor of the output, in the order of the model."""
    return [
        TensorSpec(name, shape, torch.float32 if name.endswith(FP32_NAMES) else dtype)
        for name, shape in expected_shapes(config).items()
    ]


def write_weights(
    checkpoint: Checkpoint, folder: Path, plan: Plan, profile: Profile, specs: list[TensorSpec]
) -> tuple[str, ...]:
    """Streams copied, cast and new tensors into `folder`; returns the names of the weight files."""
    start_of = start_maker(checkpoint, plan, profile)
    with StreamingSafetensorsWriter(folder, specs) as writer:
        for spec in progress(writer.specs, "writing"):
            if spec.name not in checkpoint.tensors:
                writer.write(spec.name, _created(spec.name, start_of).to(spec.dtype))
                continue
            as_stored = checkpoint.tensors[spec.name].dtype == spec.dtype
            extent = checkpoint.extent(spec.name) if as_stored else None
            checkpoint.check(spec.name)
            if extent is None or not writer.copy(spec.name, extent):
                writer.write(spec.name, cast(spec.name, checkpoint.load(spec.name), spec.dtype))
    return tuple(writer.files)


def start_maker(checkpoint: Checkpoint, plan: Plan, profile: Profile) -> Callable[[int], Start]:
    """The new parameters of a layer, computed when asked for; the last layer's are kept."""
    config = checkpoint.config

    @lru_cache(maxsize=1)
    def start(layer: int) -> Start:
        return STARTS[plan.init](
            StartContext(
                layer=layer,
                hidden_size=config["hidden_size"],
                num_heads=config["num_heads"],
                rank=plan.beta_rank,
                groups=plan.beta_groups,
                scale_form=plan.beta_scale_form,
                seed=plan.seed,
                strength=plan.strength,
                calibration=profile.layers[layer].calibration,
                load_in_proj=lambda: checkpoint.load(f"backbone.layers.{layer}.mixer.in_proj.weight"),
            )
        )

    return start


def _created(name: str, start_of: Callable[[int], Start]) -> Tensor:
    _, _, layer, rest = name.split(".", 3)
    start = start_of(int(layer))
    parts = dict(zip(METAPLASTIC_NAMES, (start.down, start.up, start.scale, start.log_prior), strict=True))
    return parts[rest.removeprefix("mixer.metaplasticity.")]


def write_surroundings(checkpoint: Checkpoint, folder: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    """config.json with `auto_map`, the bundled code, tokenizer and generation config."""
    from transformers import GenerationConfig

    from ...modeling.bundle import auto_map, bundle_remote_code
    from ...modeling.palimpsa_mamba2.configuration_palimpsa_mamba2 import PalimpsaMamba2Config

    model_config = PalimpsaMamba2Config(
        **config, architectures=["PalimpsaMamba2ForCausalLM"], dtype=dtype_name(dtype), auto_map=auto_map()
    )
    model_config.save_pretrained(folder)
    bundle_remote_code(folder)
    copy_companions(checkpoint, folder)
    if checkpoint.generation_config is None:
        GenerationConfig.from_model_config(model_config).save_pretrained(folder)


def copy_companions(checkpoint: Checkpoint, folder: Path) -> None:
    """The tokenizer, the texts of the licence, what the model was trained on, and the generation config if there is
    one."""
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
