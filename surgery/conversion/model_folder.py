"""The parts of a model folder: config, weights, bundled code, tokenizer. What conversion and export both write."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...base.errors import CheckpointError
from ...base.files import write_json
from ..checkpoint.keymap import METAPLASTIC_NAMES, expected_shapes
from ..checkpoint.licenses import license_files
from ..checkpoint.sources import tokenizer_file_name, tokenizer_files
from ..checkpoint.tokenizer import load_tokenizer
from ..measure.profile import Profile
from ..planning.plan import SHARED_KEYS, Plan
from .initialization import STARTS, Start, StartContext
from .report import dtype_name
from .writer import TensorSpec, write_tensors

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint

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
) -> list[str]:
    """Writes copied, cast and new tensors into `folder`; returns the names of the weight files."""
    start_of = start_maker(checkpoint, plan, profile)

    def load(name: str) -> Tensor:
        return checkpoint.load(name) if name in checkpoint.tensors else _created(name, start_of)

    return write_tensors(folder, specs, load)


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
