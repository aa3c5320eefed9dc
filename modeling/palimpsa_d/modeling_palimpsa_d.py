"""Causal language model of Palimpsa-D layers, for transformers 5.17 and later.

Blocks, cache, generation, padding and packing are those of `palimpsa_mamba2`: only what the blocks hold differs.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...base.errors import CheckpointError
from ...mixers.palimpsa_d import PalimpsaDMixer
from ...mixers.states import take_cache
from ..palimpsa_mamba2.modeling_palimpsa_mamba2 import (
    PalimpsaMamba2Block,
    PalimpsaMamba2ForCausalLM,
    PalimpsaMamba2Model,
    PalimpsaMamba2PreTrainedModel,
    PalimpsaMamba2RMSNorm,
)
from ..palimpsa_mamba2.outputs import CACHE_FIELD
from .authors_layer import NO_START
from .configuration_palimpsa_d import PalimpsaDConfig
from .initial_values_d import initialize


class PalimpsaDBlock(PalimpsaMamba2Block):
    """norm, mixer, and the residual stream around them."""

    def __init__(self, config: PalimpsaDConfig, layer_idx: int) -> None:
        super(PalimpsaMamba2Block, self).__init__()  # it runs as its parent does, and is built otherwise
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = PalimpsaMamba2RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = PalimpsaDMixer(config.mixer_geometry(), config.gate, layer_idx)


class PalimpsaDPreTrainedModel(PalimpsaMamba2PreTrainedModel):
    """Loading, initialization and what transformers needs to know of these models."""

    config_class = PalimpsaDConfig
    config: PalimpsaDConfig
    _no_split_modules = ["PalimpsaDBlock"]

    def _init_weights(self, module: nn.Module) -> None:
        initialize(module, self.config)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, config=None, **kwargs):
        """As in `palimpsa_mamba2`: a missing tensor is an error.

        Raises:
            CheckpointError: tensors are missing, or the folder holds a model of another kind.
        """
        if config is None:
            said = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **kwargs)[0].get("model_type")
            if said != PalimpsaDConfig.model_type:
                raise CheckpointError(
                    f"{pretrained_model_name_or_path}: config.json says model_type {said!r}; expected "
                    f"{PalimpsaDConfig.model_type!r}. Nothing is converted to Palimpsa-D: {NO_START}"
                )
        return super().from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)


class PalimpsaDModel(PalimpsaDPreTrainedModel, PalimpsaMamba2Model):
    """Embedding, blocks and the last norm."""

    def __init__(self, config: PalimpsaDConfig) -> None:
        PreTrainedModel.__init__(self, config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(PalimpsaDBlock(config, index) for index in range(config.num_hidden_layers))
        self.norm_f = PalimpsaMamba2RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.gradient_checkpointing = False
        self.post_init()


class PalimpsaDForCausalLM(PalimpsaDPreTrainedModel, PalimpsaMamba2ForCausalLM):
    """The backbone and a language modelling head, tied to the embedding when the config says so."""

    def __init__(self, config: PalimpsaDConfig) -> None:
        PreTrainedModel.__init__(self, config)
        self.backbone = PalimpsaDModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        """As in transformers, of which 5.17 tells the name of the cache by the letters "mamba" in that of the class."""
        if CACHE_FIELD == "cache":
            return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        _rename_cache(model_kwargs, "past_key_values")
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        return _rename_cache(model_kwargs, CACHE_FIELD)


def _rename_cache(arguments: dict, name: str) -> None:
    cache = take_cache(arguments)
    if cache is not None:
        arguments[name] = cache


# The Trainer shifts labels for label smoothing only of classes that are listed here by name.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[PalimpsaDConfig.model_type] = PalimpsaDForCausalLM.__name__
