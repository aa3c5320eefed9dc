"""What the models return. One name for the cache in every release: `.cache`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

# 5.24 calls the cache `cache` everywhere; 5.17 looks for `cache_params` in the outputs of a model of this name.
_ONE_CACHE_NAME = "cache" in CausalLMOutputWithPast.__dataclass_fields__
CACHE_FIELD = "cache" if _ONE_CACHE_NAME else "cache_params"


@dataclass
class PalimpsaMamba2Output(ModelOutput):
    """Hidden states [B, T, D] after the last norm, the cache, and the input of every layer when asked for."""

    last_hidden_state: Tensor | None = None
    if _ONE_CACHE_NAME:
        cache: object | None = None
    else:
        cache_params: object | None = None
        cache = property(lambda self: self.cache_params)
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class PalimpsaMamba2CausalLMOutput(ModelOutput):
    """Loss, logits [B, T, vocabulary], the cache, and the input of every layer when asked for."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    if _ONE_CACHE_NAME:
        cache: object | None = None
    else:
        cache_params: object | None = None
        cache = property(lambda self: self.cache_params)
    hidden_states: tuple[Tensor, ...] | None = None
