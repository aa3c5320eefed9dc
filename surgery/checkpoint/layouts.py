"""What kind of checkpoint a folder holds, told by content, and its config in the terms of its family."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...base.console import counted
from ...base.errors import CheckpointError
from ...mixers.geometry import SCALE_FORMS, GateSpec
from ..families.base import Family
from ..families.hybrids import HYBRIDS
from ..families.mamba2 import MAMBA2
from .config_keys import (
    CODESTRAL_READ,
    HF_DEFAULTS,
    HF_READ,
    PALIMPSA_DEFAULTS,
    PALIMPSA_KEYS,
    PALIMPSA_READ,
    SSM_DEFAULTS,
    SSM_READ,
    account_for,
    hybrid_keys,
    number,
    refuse_other,
    require,
    require_size,
    require_switch,
    resolve_aliases,
    shown,
    step_limit,
)
from .hosts import HostNames, host_of, read_host, refuse_kind
from .keymap import Rule, strip_wrappers, translate
from .metamamba2 import MARKS, MODEL_TYPES, SOFTPLUS_NOTE, translate_config
from .sources import read_foreign_json
from .weights import TensorInfo

_SSM_SIZES = ("d_state", "d_conv", "expand", "headdim", "ngroups", "chunk_size")
# Keys of `ssm_cfg` that concern initialization or speed, never the function a trained model computes.
_SSM_IGNORED = {"layer", "A_init_range", "conv_init", "use_mem_eff_path", "process_group", "sequence_parallel"}
# Sizes that index shapes: anything but a positive whole number is a fault of the file.
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_heads",
    "head_dim",
    "state_size",
    "n_groups",
    "conv_kernel",
    "expand",
    "vocab_size",
    "chunk_size",
    *GateSpec.KEYS[:2],
)


class Layout(NamedTuple):
    """A recognized layout.

    Attributes:
        name: its table in `keymap.TABLES`.
        config: keys under transformers' names, for `family.config`. `vocab_size` is the file's word, the embedding's
            rows decide later.
        says_tied: what the config says of head and embedding, None when it says nothing.
        config_file: the file the config was read from.
        notes: what a user should know of how the config was read.
        family: the kind of model.
        names: of a hybrid, whose names are no table.
    """

    name: str
    config: dict[str, Any]
    says_tied: bool | None
    config_file: Path
    notes: tuple[str, ...] = ()
    family: Family = MAMBA2
    names: HostNames | None = None

    def translate(self, source_name: str) -> tuple[str, Rule] | None:
        """The canonical name of a source tensor and the rule that gave it; None for a stranger."""
        return translate(source_name, self.name) if self.names is None else self.names.translate(source_name)


def detect(folder: Path, tensors: Mapping[str, TensorInfo]) -> Layout:
    """Tells a folder's layout from the keys of its config and the shapes of its tensors, never from a name.

    Raises:
        CheckpointError: there is no config, or it is one of the kinds refused by name: Mamba1, attention of
            another kind than mamba_ssm's, other architectures, quantized weights, a geometry that contradicts itself.
    """
    _refuse_mamba1(tensors)
    for file, readers in (("config.json", _CONFIG_READERS), ("params.json", _PARAMS_READERS)):
        path = folder / file
        if not path.is_file():
            continue
        content = read_foreign_json(path)
        if file == "config.json":
            refuse_kind(file, content)
        if host_of(content) is not None:
            return Layout(**read_host(path, content, len(tensors)))
        for keys, reader in readers:
            if keys <= set(content):
                layout = reader(path, content)
                _check_geometry(path.name, layout.config, len(tensors))
                return layout
        raise CheckpointError(_unknown(path.name, content))
    raise CheckpointError(
        f"{folder}: has weights but neither config.json nor params.json; copy the config that belongs to the weights"
    )


def _refuse_mamba1(tensors: Mapping[str, TensorInfo]) -> None:
    for name, info in tensors.items():
        stripped = strip_wrappers(name)
        flat_a = stripped.endswith("mixer.A_log") and len(info.shape) == 2
        if flat_a or re.search(r"mixer\.(x_proj|dt_proj)\.", stripped):
            raise CheckpointError(
                f"{name}: this is a Mamba1 checkpoint (x_proj, dt_proj and a two-dimensional A_log are its marks), "
                "expected Mamba2; choose a Mamba2 checkpoint such as state-spaces/mamba2-130m"
            )


def _from_mamba_ssm(path: Path, content: dict[str, Any]) -> Layout:
    where = path.name
    ssm = content.get("ssm_cfg") or {}
    if not isinstance(ssm, dict):
        raise CheckpointError(f"{where}:ssm_cfg: holds a {type(ssm).__name__}, expected a table; correct the config")
    refuse_other(where, "layer", ssm.get("layer"), "ssm_cfg.")
    unknown = sorted(set(ssm) - set(SSM_DEFAULTS) - _SSM_IGNORED)
    if unknown:
        raise CheckpointError(
            f"{where}:ssm_cfg: has keys that mamba_ssm's Mamba2 does not know ({', '.join(unknown)}); remove them if "
            "they do not change the model"
        )
    settings = {**SSM_DEFAULTS, **ssm}
    _refuse_variants(where, content, settings)
    # mamba_ssm does not look at `attn_cfg` where no layer is attention.
    notes = account_for(where, content, SSM_READ | {"attn_cfg"} if content.get("attn_layer_idx") else SSM_READ)
    width = content["d_model"]
    config = {
        **_ssm_geometry(where, settings, width),
        **hybrid_keys(where, content, width, content["n_layer"]),
        "num_hidden_layers": content["n_layer"],
        "vocab_size": content.get("vocab_size"),
        "residual_in_fp32": content.get("residual_in_fp32", True),
        "bos_token_id": content.get("bos_token_id"),
        "eos_token_id": content.get("eos_token_id"),
        "pad_token_id": content.get("pad_token_id"),
    }
    return Layout("mamba_ssm", config, _says_tied(where, content, "tie_embeddings", True), path, tuple(notes))


def _says_tied(where: str, content: dict[str, Any], key: str, default: bool | None) -> bool | None:
    said = content.get(key, default)
    if said is not None:
        require_switch(where, key, said)
    return said


def _ssm_geometry(where: str, settings: dict[str, Any], width: int) -> dict[str, Any]:
    """The part of the config that a `ssm_cfg`, completed by its defaults, decides."""
    for key, value in (("d_model", width), *((f"ssm_cfg.{key}", settings[key]) for key in _SSM_SIZES)):
        require_size(where, key, value)
    for key, default in SSM_DEFAULTS.items():
        if isinstance(default, bool):
            require_switch(where, f"ssm_cfg.{key}", settings[key])
        elif isinstance(default, float):
            number(where, f"ssm_cfg.{key}", settings[key])
    inner = settings["expand"] * width
    if settings["d_ssm"] not in (None, inner):
        raise CheckpointError(
            f"{where}:ssm_cfg.d_ssm: is {settings['d_ssm']}, expected expand * d_model = {inner}; "
            "mixers with an MLP part are not supported"
        )
    if inner % settings["headdim"]:
        raise CheckpointError(
            f"{where}:ssm_cfg.headdim: {settings['headdim']} does not divide expand * d_model = {inner}; "
            "correct the config"
        )
    return {
        "hidden_size": width,
        "num_heads": inner // settings["headdim"],
        "head_dim": settings["headdim"],
        "state_size": settings["d_state"],
        "n_groups": settings["ngroups"],
        "expand": settings["expand"],
        "conv_kernel": settings["d_conv"],
        "use_bias": settings["bias"],
        "use_conv_bias": settings["conv_bias"],
        "hidden_act": "silu",
        "layer_norm_epsilon": 1e-5,
        "time_step_min": settings["dt_min"],
        "time_step_max": settings["dt_max"],
        "time_step_floor": settings["dt_init_floor"],
        "time_step_limit": step_limit(f"{where}:ssm_cfg.dt_limit", settings["dt_limit"]),
        "chunk_size": settings["chunk_size"],
    }


def _refuse_variants(where: str, content: dict[str, Any], settings: dict[str, Any]) -> None:
    """Options of mamba_ssm that change the computed function and that this package's mixer does not have."""
    for key in ("D_has_hdim", "rmsnorm"):
        refuse_other(where, key, settings[key], "ssm_cfg.")
    variants = {
        "ssm_cfg.norm_before_gate": (settings["norm_before_gate"], False),
        "norm_epsilon": (content.get("norm_epsilon", 1e-5), 1e-5),
    }
    for key, (value, supported) in variants.items():
        if value != supported:
            raise CheckpointError(
                f"{where}:{key}: is {shown(value)}, only {supported} is supported; choose a checkpoint without this "
                "variant"
            )


def _from_codestral(path: Path, content: dict[str, Any]) -> Layout:
    """Mistral's `params.json`; it fixes what it does not say to mamba_ssm's defaults."""
    notes = account_for(path.name, content, CODESTRAL_READ)
    translated = {
        **{key: content[key] for key in ("vocab_size", "residual_in_fp32", "norm_epsilon") if key in content},
        "d_model": content["dim"],
        "n_layer": content["n_layers"],
        "tie_embeddings": content.get("tie_embeddings", False),
        "ssm_cfg": {"layer": "Mamba2", "ngroups": content.get("n_groups", 1)},
    }
    return _from_mamba_ssm(path, translated)._replace(name="codestral", notes=tuple(notes))


def _from_hf(path: Path, content: dict[str, Any]) -> Layout:
    where, kind = path.name, content.get("model_type", "mamba2")
    content = resolve_aliases(where, content)
    if kind not in ("mamba2", "palimpsa_mamba2") or not {"hidden_size", "num_hidden_layers"} <= set(content):
        raise CheckpointError(_unknown(where, content))
    if content.get("quantization_config"):
        raise CheckpointError(
            f"{where}:quantization_config: the weights are quantized, expected bf16, fp16 or fp32; "
            "use the original model"
        )
    converted = kind == "palimpsa_mamba2"
    defaults = PALIMPSA_DEFAULTS if converted else HF_DEFAULTS
    config = {key: content.get(key, default) for key, default in defaults.items()}
    config["time_step_limit"] = step_limit(f"{where}:time_step_limit", config["time_step_limit"])
    notes = account_for(where, content, PALIMPSA_READ if converted else HF_READ)
    _refuse_other_width(where, content, config)
    if content.get("norm_before_gate"):
        # Early exports carry true, Codestral's among them, though no release of the class ever read the key.
        notes.append(f"{where} says norm_before_gate, a key without effect: the gate is applied before the norm")
    if converted:
        config.update(_palimpsa_keys(where, content, config["num_hidden_layers"]))
    tied = _says_tied(where, content, "tie_word_embeddings", None)
    return Layout(kind if converted else "hf_mamba2", config, tied, path, tuple(notes))


def _refuse_other_width(where: str, content: dict[str, Any], config: dict[str, Any]) -> None:
    """`intermediate_size`, which some exports spell out, is the width of the mixer and nothing else."""
    said, expand, width = content.get("intermediate_size"), config["expand"], config["hidden_size"]
    if said and type(expand) is int and type(width) is int and said != expand * width:
        raise CheckpointError(
            f"{where}:intermediate_size: is {shown(said)}, expected expand * hidden_size = {expand * width}; "
            "blocks with an MLP are not supported"
        )


def _from_meta_mamba2(path: Path, content: dict[str, Any]) -> Layout:
    """The authors' config, read like one of this package's after its translation."""
    if content.get("model_type") not in MODEL_TYPES:
        raise CheckpointError(_unknown(path.name, content))
    layout = _from_hf(path, translate_config(path.name, content))
    if not layout.config.get("palimpsa_layers"):
        return layout._replace(name="meta_mamba2 (off)")
    return layout._replace(name="meta_mamba2", notes=(*layout.notes, SOFTPLUS_NOTE))


def _palimpsa_keys(where: str, content: dict[str, Any], layers: int) -> dict[str, Any]:
    require_size(where, "num_hidden_layers", layers)
    keys = {key: content[key] for key in PALIMPSA_KEYS if key in content}
    keys |= hybrid_keys(where, content, content["hidden_size"], layers)
    swapped = keys.get("palimpsa_layers")
    attention = keys.get("attn_layer_idx", ())
    right = isinstance(swapped, list) and all(isinstance(i, int) and 0 <= i < layers for i in swapped)
    if not right or set(swapped) & set(attention):
        others = f", and none of attention ({', '.join(map(str, attention))})" if attention else ""
        raise CheckpointError(
            f"{where}:palimpsa_layers: is {swapped!r}, expected a list of layers from 0 to {layers - 1}{others}; "
            "restore the config that was written with the weights"
        )
    absent = [key for key in GateSpec.KEYS[:3] if swapped and keys.get(key) is None]
    if absent:
        raise CheckpointError(
            f"{where}: lists swapped layers but not {' and '.join(absent)}; restore the config written with the weights"
        )
    if "beta_scale_form" in keys:
        form = keys["beta_scale_form"]
        require(form in SCALE_FORMS, where, "beta_scale_form", form, "abs or softplus")
    if "train_prior" in keys:
        require_switch(where, "train_prior", keys["train_prior"])
    return keys


def _check_geometry(where: str, config: dict[str, Any], tensors: int) -> None:
    _check_types(where, config)
    if config["num_hidden_layers"] > tensors:
        raise CheckpointError(
            f"{where}: gives num_hidden_layers = {config['num_hidden_layers']}, but the weights are "
            f"{counted(tensors, 'tensor')} in all; the config belongs to other weights"
        )
    heads, size = config["num_heads"], config["head_dim"]
    if heads * size != config["expand"] * config["hidden_size"]:
        expand, width = config["expand"], config["hidden_size"]
        raise CheckpointError(
            f"{where}: num_heads * head_dim = {heads} * {size} = {heads * size}, expected expand * hidden_size = "
            f"{expand} * {width} = {expand * width}; correct the config"
        )
    if heads % config["n_groups"]:
        raise CheckpointError(
            f"{where}: {config['n_groups']} groups do not divide {counted(heads, 'head')}; correct one of them"
        )


def _check_types(where: str, config: dict[str, Any]) -> None:
    """Sizes are whole numbers above 0; switches, numbers and token ids are of the kind of their defaults."""
    for key, value in config.items():
        default = HF_DEFAULTS.get(key)
        if key in _SIZES:
            require_size(where, key, value)
        elif isinstance(default, bool):
            require_switch(where, key, value)
        elif isinstance(default, float):
            config[key] = number(where, key, value, **({"most": 1.0} if key == "layer_norm_epsilon" else {}))
        elif key.endswith("_token_id"):
            ids = value if isinstance(value, list) and key == "eos_token_id" else [value]
            require(all(i is None or type(i) is int for i in ids), where, key, value, "a token's number")


def _unknown(where: str, content: dict[str, Any]) -> str:
    kind = content.get("model_type")
    if kind not in (None, "mamba2", "palimpsa_mamba2"):
        return (
            f"{where}:model_type: is {kind!r}, expected mamba2 (or mamba_ssm's own config) or one of "
            f"{', '.join(HYBRIDS)}; only models with Mamba2 mixers, and some with a Gated DeltaNet, are supported"
        )
    return (
        f"{where}: is no Mamba2 config, expected mamba_ssm's d_model and n_layer, or transformers' hidden_size and "
        "num_hidden_layers; copy the config that belongs to the weights"
    )


_Reader = Callable[[Path, dict[str, Any]], Layout]
# The keys that tell one config from another, and its reader.
_CONFIG_READERS: tuple[tuple[set[str], _Reader], ...] = (
    (MARKS, _from_meta_mamba2),
    ({"hidden_size", "num_hidden_layers"}, _from_hf),
    ({"d_model", "n_layer"}, _from_mamba_ssm),
    ({"dim", "n_layers"}, _from_codestral),
    ({"model_type"}, _from_hf),
)
_PARAMS_READERS: tuple[tuple[set[str], _Reader], ...] = (({"dim", "n_layers"}, _from_codestral),)
