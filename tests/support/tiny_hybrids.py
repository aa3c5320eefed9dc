"""Tiny random hosts: every family of transformers whose mixers can be swapped, with its odd options switched on."""

from functools import cache
from pathlib import Path

import torch
from palimpsa_surgery.mixers.geometry import GATE, GateSpec
from palimpsa_surgery.modeling.hybrids.configuration_palimpsa_hybrid import config_class
from palimpsa_surgery.modeling.hybrids.hosts import HOSTS, mixer_paths
from palimpsa_surgery.modeling.hybrids.modeling_palimpsa_hybrid import model_class
from palimpsa_surgery.modeling.hybrids.swapping import bound_step_sizes
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 97
_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_GRANITE = {
    **_BASE,
    **_MAMBA,
    "mamba_n_groups": 1,  # transformers 5.17 normalizes over all groups at once
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "shared_intermediate_size": 32,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.2,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
}
_FALCON = {
    **_BASE,
    **_MAMBA,
    "mamba_d_head": 4,
    "mamba_d_ssm": 32,  # not mamba_expand * hidden_size
    "num_hidden_layers": 2,
    "mamba_rms_norm": False,
    "ssm_multipliers": [0.7, 1.3, 0.9, 1.1, 0.8],
    "ssm_in_multiplier": 0.6,
    "ssm_out_multiplier": 1.4,
    "key_multiplier": 0.5,
    "attention_out_multiplier": 0.8,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "mlp_multipliers": [0.9, 1.2],
}
_DELTA = {
    **_BASE,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "head_dim": 8,
}
VARIANTS: dict[str, dict] = {
    "bamba": {**_BASE, **_MAMBA, "mamba_n_groups": 1, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "granitemoehybrid": _GRANITE,
    "granitemoehybrid/experts": {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "falcon_h1": _FALCON,
    "falcon_h1/gate first": {**_FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "falcon_h1/norm first": {**_FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": True},
    "zamba2": {
        **_BASE,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 16,
        "chunk_size": 8,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
        "use_mem_rope": True,
        "hidden_act": "gelu",
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    },
    "nemotron_h": {
        **_BASE,
        "head_dim": 8,
        "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "qwen3_5_text": _DELTA,
    "qwen3_next": {
        **_DELTA,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4, "linear_allow_neg_eigval": True},
}
"""Arguments of a host's config, by `model_type` and, behind a slash, which branch of the host's code."""

SWAPPED = {
    "bamba": [0],
    "granitemoehybrid": [2],
    "falcon_h1": [1],
    "zamba2": [0, 3],
    "nemotron_h": [0, 4],
    "qwen3_5_text": [0, 2],
    "qwen3_next": [0, 2],
    "olmo_hybrid": [0, 2],
}
"""Layers to swap, by `model_type`; each host keeps a plain mixer; zamba2 has attention beside the one in layer 3."""


DELTAS = tuple(kind for kind in SWAPPED if HOSTS[kind].delta)
"""Those of which only the rule is swapped."""

PROJECTIONS = {
    **dict.fromkeys(SWAPPED, ("in_proj", "out_proj")),
    "qwen3_5_text": ("in_proj_qkv", "out_proj"),
    "qwen3_next": ("in_proj_qkvz", "out_proj"),
    "olmo_hybrid": ("a_proj", "g_proj"),
}
"""Two matrices of each mixer that no other layer has one of the same name of."""


def make_host(variant: str, **changes) -> PreTrainedModel:
    """A host in eval mode and fp32, as transformers ships it, with decays and step sizes that are spread out."""
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[variant.partition("/")[0]](**{**VARIANTS[variant], **changes})
    )
    host = HOSTS[model.config.model_type]
    # Hosts of a delta rule sum log decays over 64 tokens before they subtract them: digits go where decays are strong.
    decays = (0.05, 4) if host.delta else (1, 16)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            leaf = name.rpartition(".")[2]
            if leaf == "A_log":
                parameter.uniform_(*decays, generator=generator).log_()
            elif leaf == "dt_bias":
                step = torch.empty_like(parameter).uniform_(-6.0, -1.0, generator=generator).exp()
                parameter.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
            elif parameter.ndim == 1:
                # What is added to a weight is added by all norms but the gated ones inside mixers.
                mean = 1.0 if "linear_attn" in name else 1.0 - host.norm_offset
                parameter.normal_(mean, 0.3, generator=generator)
            else:
                parameter.normal_(0.0, 0.25, generator=generator)
        model.tie_weights()
    return model.eval()


def with_true_bounds(host: PreTrainedModel) -> PreTrainedModel:
    """The host, its mixers bounding the step size as in training rather than as the class of transformers does."""
    for path in mixer_paths(host.config).values():
        bound_step_sizes(host.get_submodule(path), host.config)
    return host


def make_hybrid(variant: str, layers: list[int] | None = None, **changes) -> PreTrainedModel:
    """The host of `make_host` with layers swapped (those of `SWAPPED`), and importance that matters in each."""
    kind = variant.partition("/")[0]
    swapped = {"palimpsa_layers": SWAPPED[kind] if layers is None else layers}
    model = model_class(kind)(config_class(kind)(**{**VARIANTS[variant], **swapped, **changes}))
    own = {key: value for key, value in changes.items() if key not in GateSpec.KEYS}
    model.load_state_dict({**model.state_dict(), **make_host(variant, **own).state_dict()})
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("beta_scale"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith("log_prior"):
                parameter.uniform_(-0.5, 0.5, generator=generator)
            elif f".{GATE}." in name:
                parameter.normal_(0.0, 0.5, generator=generator)
    return model.eval()


def save_host(variant: str, folder: Path, **changes) -> Path:
    """The host as a model folder of transformers, without a tokenizer."""
    make_host(variant, **changes).save_pretrained(folder)
    return folder


@cache
def token_ids(rows: int = 3, length: int = 21) -> torch.Tensor:
    """Random ids [rows, length], none of them a special token."""
    return torch.randint(2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(3))


def same(kind: str, found: torch.Tensor, expected: torch.Tensor) -> bool:
    """To the bit; the experts of qwen3_next sum in another order once they were loaded, in the host's own class too."""
    if kind == "qwen3_next":
        return bool((found - expected).norm() < 1e-7 * expected.norm())
    return torch.equal(found, expected)
