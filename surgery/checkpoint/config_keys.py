"""The keys of a source's config: which are read and with what defaults, which change nothing, what a value may be.

Other programs write Mamba2 configs with names of their own. A key is, in this order:

- fixed: it chooses between functions, of which this package computes one (`FIXED`): any other value is refused;
- read: the reader of the layout uses it, under its own name or another of `ALIASES`;
- harmless: it concerns names, speed, initialization or generation (`HARMLESS`);
- of another kind of model (`_ANOTHER_MODEL`): attention, experts, multipliers, quantization; refused, unless its value
  asks for nothing (null, false, 0, an empty text, list or table): the model does without;
- unknown: a note names it, as it may change what the model computes. Its value does not matter: of a key that nobody
  here knows, false may be what takes a part of the layer away.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from ...base.console import counted
from ...base.errors import CheckpointError
from ...mixers.attention_geometry import AttentionGeometry
from ...mixers.geometry import GateSpec
from ..families.mamba2 import Mamba2Config

INF = math.inf
LARGEST_FLOAT = 3.4028234663852886e38
"""Of fp32, in which steps are computed: a limit from there on is none."""

# Those that only the file or its tensors can say.
_NO_DEFAULT = ("tie_word_embeddings", "palimpsa_layers", "gate", "attn_layer_idx", "attention", "d_intermediate")
# Defaults of mamba_ssm 2.3.2's Mamba2 module, for the keys a `ssm_cfg` leaves out.
SSM_DEFAULTS: dict[str, Any] = {
    "d_state": 128,
    "d_conv": 4,
    "expand": 2,
    "headdim": 64,
    "d_ssm": None,
    "ngroups": 1,
    "D_has_hdim": False,
    "rmsnorm": True,
    "norm_before_gate": False,
    "dt_min": 0.001,
    "dt_max": 0.1,
    "dt_init_floor": 1e-4,
    "dt_limit": (0.0, INF),
    "bias": False,
    "conv_bias": True,
    "chunk_size": 256,
}
# Of this package's own config: what transformers makes of a converted folder that leaves a key out.
PALIMPSA_DEFAULTS = {key: value for key, value in vars(Mamba2Config()).items() if key not in _NO_DEFAULT}
# Of transformers' Mamba2Config, which differ in these.
HF_DEFAULTS: dict[str, Any] = {
    **PALIMPSA_DEFAULTS,
    "num_heads": 128,
    "vocab_size": 32768,
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "n_groups": 8,
    "initializer_range": 0.1,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
PALIMPSA_KEYS = ("palimpsa_layers", *GateSpec.KEYS)
# The keys that each reader uses.
SSM_READ = frozenset(
    {"d_model", "n_layer", "vocab_size", "ssm_cfg", "attn_layer_idx", "d_intermediate", "residual_in_fp32"}
    | {"tie_embeddings", "norm_epsilon", "bos_token_id", "eos_token_id", "pad_token_id"}
)
CODESTRAL_READ = frozenset(
    ("dim", "n_layers", "vocab_size", "n_groups", "residual_in_fp32", "tie_embeddings", "norm_epsilon")
)
HF_READ = frozenset(HF_DEFAULTS) | {"tie_word_embeddings", "norm_before_gate", "intermediate_size"}
HYBRID_KEYS = ("attn_layer_idx", "attn_cfg", "d_intermediate")
"""Of mamba_ssm's hybrids, in its own config and in this package's."""
PALIMPSA_READ = HF_READ | {*PALIMPSA_KEYS, *HYBRID_KEYS, "layer_types"}

# Names that other programs give to keys of transformers' Mamba2Config.
ALIASES: dict[str, str] = {
    "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "n_heads": "num_heads",
    "headdim": "head_dim",
    "d_state": "state_size",
    "ssm_state_size": "state_size",
    "ngroups": "n_groups",
    "d_conv": "conv_kernel",
    "norm_eps": "layer_norm_epsilon",
    "norm_epsilon": "layer_norm_epsilon",
    "rms_norm_eps": "layer_norm_epsilon",
    "layer_norm_eps": "layer_norm_epsilon",
    "dt_limit": "time_step_limit",
    "tie_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
}
# Parts of a Mamba2 that other programs can leave out, and those that they can add.
_PARTS = (
    *("causal", "is_causal", "dt_softplus", "use_softplus", "delta_softplus", "use_dt_bias", "use_D", "use_d"),
    *("use_gate", "use_out_gate", "use_output_gate", "use_short_conv", "use_conv", "use_conv1d"),
    *("use_norm", "use_gated_norm", "use_out_norm", "final_norm", "use_final_norm", "prenorm", "pre_norm"),
    *("residual", "use_residual", "residual_connection", "skip_connection", "use_skip", "use_skip_connection"),
)
_NO_PARTS = (
    *("non_causal", "is_encoder_decoder", "no_final_norm", "no_norm", "norm_bias", "lm_head_bias", "post_norm"),
    *("normalize_embeddings", "scale_embeddings", "share_layers"),
)
# What this package computes; a message names the first of the values.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "rms_norm": (True,),
    "use_rms_norm": (True,),
    "rmsnorm": (True,),
    "norm_type": ("rms_norm", "rmsnorm", "RMSNorm"),
    "bidirectional": (False,),
    **dict.fromkeys(_PARTS, (True,)),
    **dict.fromkeys(_NO_PARTS, (False,)),
    "D_has_hdim": (False,),
    "layer": ("Mamba2",),
}
_NAMES = "architectures auto_map model_type transformers_version torch_dtype dtype tokenizer_class name_or_path"
_INITIALIZATION = (
    "initializer_range rescale_prenorm_residual time_step_rank time_step_min time_step_max time_step_floor "
    "A_init_range A_initializer_range conv_init dt_min dt_max dt_init_floor"
)
_SPEED = (
    "use_cache fused_add_norm fuse_norm fuse_cross_entropy fuse_linear_cross_entropy fuse_swiglu use_l2warp "
    "use_mem_eff_path use_mamba_kernels process_group sequence_parallel attn_implementation attn_mode "
    "pad_vocab_size_multiple gradient_checkpointing"
)
# Nothing in a Mamba2 depends on the length that it was trained on.
_LENGTH = "max_position_embeddings max_sequence_length model_max_length max_seq_len seq_length"
# What transformers once wrote for any model: heads of classifiers, outputs, generation.
_ANY_MODEL = (
    "id2label label2id num_labels problem_type finetuning_task task_specific_params return_dict torchscript "
    "use_bfloat16 tf_legacy_loss chunk_size_feed_forward tie_encoder_decoder output_attentions output_hidden_states "
    "output_scores "
    "return_dict_in_generate is_decoder pruned_heads prefix sep_token_id decoder_start_token_id max_length "
    "min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p "
    "repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences "
    "bad_words_ids forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty "
    "suppress_tokens begin_suppress_tokens"
)
# What transformers has written about a config itself; another name that begins with "_" is a key like any.
_OF_TRANSFORMERS = (
    "_name_or_path _commit_hash _auto_class _attn_implementation _attn_implementation_internal "
    "_attn_implementation_autoset _experts_implementation _experts_implementation_internal _flash_attn_2_enabled "
    "_output_attentions _configuration_file _from_auto _from_pipeline _post_init_done"
)
HARMLESS = frozenset(" ".join((_NAMES, _INITIALIZATION, _SPEED, _LENGTH, _ANY_MODEL, _OF_TRANSFORMERS)).split())
_ANOTHER_MODEL = re.compile(
    r"attn|attention|key_value_heads|rope|rotary|sliding_window|hybrid|block_type|moe|expert|mlp|d_intermediate"
    r"|multiplier|scaling|softcap|logit_scale|mup|quant|depthwise|mimo",
    re.IGNORECASE,
)
_FACTOR = re.compile(r"multiplier|scaling|scale", re.IGNORECASE)
_LISTED = 6


def resolve_aliases(where: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """The config with every key of `ALIASES` under transformers' name.

    Raises:
        CheckpointError: two names of one key hold different values.
    """
    resolved = {key: value for key, value in content.items() if key not in ALIASES}
    spelled = {name: name for name in resolved}
    for key, name in ALIASES.items():
        value = content.get(key)
        if value is None:
            continue
        if resolved.get(name) is None:
            resolved[name], spelled[name] = value, key
        elif resolved[name] != value:
            raise CheckpointError(
                f"{where}: gives {key} = {shown(value)} and {spelled[name]} = {shown(resolved[name])}, two names of "
                "one setting; keep the one that the model was trained with"
            )
    return resolved


def account_for(where: str, content: Mapping[str, Any], read: Collection[str]) -> list[str]:
    """Looks at every key of a config.

    Args:
        where: name of the file, for messages.
        content: the config.
        read: the keys that the layout's reader uses.

    Returns:
        A note that names the keys nobody knows, if there are any.

    Raises:
        CheckpointError: a key asks for what this package does not compute.
    """
    unknown = []
    for key, value in content.items():
        if key in FIXED:
            refuse_other(where, key, value)
        elif key in read or key in HARMLESS:
            continue
        elif _ANOTHER_MODEL.search(key):
            factor = _FACTOR.search(key) is not None and type(value) in (int, float)
            if factor and value == 0:  # no such factor, or a branch that adds nothing
                unknown.append(f"{key} = {shown(value)}")
            elif not is_neutral(value) and not (factor and value == 1):
                raise CheckpointError(
                    f"{where}:{key}: is {shown(value)}, which asks for more than Mamba2 blocks in full precision; "
                    "choose a checkpoint of those alone, or remove the key if the model does without it"
                )
        else:
            unknown.append(f"{key} = {shown(value)}")
    if not unknown:
        return []
    more = f" and {len(unknown) - _LISTED} more" if len(unknown) > _LISTED else ""
    return [
        f"{where} has {counted(len(unknown), 'key')} that this package does not know and does not follow "
        f"({', '.join(unknown[:_LISTED])}{more}); check that the model computes the same without"
    ]


def refuse_other(where: str, key: str, value: Any, table: str = "") -> None:
    """Raises `CheckpointError` unless a fixed key of a config, or of a `table.` in it, has a value of `FIXED`."""
    supported = FIXED[key]
    if value is not None and not any(type(value) is type(one) and value == one for one in supported):
        raise CheckpointError(
            f"{where}:{table}{key}: is {shown(value)}, only {supported[0]} is supported; choose a checkpoint without "
            "this variant"
        )


def is_neutral(value: Any) -> bool:
    """Whether a value asks for nothing: null, false, 0, an empty text, list or table."""
    return value is None or value is False or (isinstance(value, (int, float, str, list, dict)) and not value)


def shown(value: Any) -> str:
    """A value in a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def require(right: bool, where: str, key: str, value: Any, expected: str) -> None:
    """Raises `CheckpointError` unless the value of a key is `right`."""
    if not right:
        raise CheckpointError(f"{where}: gives {key} = {shown(value)}, expected {expected}; correct it")


def hybrid_keys(where: str, content: Mapping[str, Any], width: int, layers: int) -> dict[str, Any]:
    """What `HYBRID_KEYS` ask for, as the arguments of `families.mamba2.Mamba2Config`; nothing of a plain model.

    Args:
        where: name of the file, for messages.
        content: the config.
        width: hidden size.
        layers: how many there are.

    Raises:
        CheckpointError: layers that do not exist, or an attention or MLP that this package does not compute.
    """
    found: dict[str, Any] = {}
    hidden = content.get("d_intermediate")
    if hidden:
        require_size(where, "d_intermediate", hidden)
        found["d_intermediate"] = hidden
    attention = content.get("attn_layer_idx")
    if not attention:
        return found
    require_size(where, "hidden_size", width)
    require_size(where, "num_hidden_layers", layers)
    indices = isinstance(attention, list) and all(type(layer) is int and 0 <= layer < layers for layer in attention)
    right = indices and len(set(attention)) == len(attention) < layers
    expected = f"a list of layers from 0 to {layers - 1}, each once and not all of them"
    require(right, where, "attn_layer_idx", attention, expected)
    settings = content.get("attn_cfg") or {}
    require(isinstance(settings, dict), where, "attn_cfg", settings, "a table of attention settings")
    for key, fault in AttentionGeometry.faults(width, settings):
        raise CheckpointError(f"{where}:attn_cfg.{key}: {fault}")
    return {
        **found,
        "attn_layer_idx": tuple(sorted(attention)),
        "attention": AttentionGeometry.complete(width, settings),
    }


def require_size(where: str, key: str, value: Any) -> None:
    """Raises `CheckpointError` unless a value can be a size."""
    require(type(value) is int and 0 < value < 2**31, where, key, value, "a whole number above 0 and below 2**31")


def require_switch(where: str, key: str, value: Any) -> None:
    """Raises `CheckpointError` unless a value is true or false."""
    require(isinstance(value, bool), where, key, value, "true or false")


def number(where: str, key: str, value: Any, most: float = LARGEST_FLOAT) -> float:
    """A number from 0 to `most` as a float; `CheckpointError` for anything else."""
    plain = type(value) in (int, float)
    require(plain and 0 <= value <= most, where, key, value, f"a number from 0 to {most:.4g}")
    return float(value)


def step_limit(where: str, value: Any) -> tuple[float, float]:
    """The clamp of the step size. None, or an upper end of None or beyond fp32, is no limit: JSON has no infinity.

    Raises:
        CheckpointError: not two rising numbers from 0 on.
    """
    if value is None:
        return 0.0, INF
    ends = list(value) if isinstance(value, (list, tuple)) else []
    if len(ends) != 2 or not all(end is None or type(end) in (int, float) for end in ends):
        raise CheckpointError(f"{where}: is {shown(value)}, expected two numbers; correct the config")
    low = 0.0 if ends[0] is None else ends[0]
    high = INF if ends[1] is None or ends[1] >= LARGEST_FLOAT else ends[1]
    if not 0 <= low <= high:
        raise CheckpointError(f"{where}: is {shown(value)}, expected 0 <= low <= high; correct the config")
    return float(low), float(high)
