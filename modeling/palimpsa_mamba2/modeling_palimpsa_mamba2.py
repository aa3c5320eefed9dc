"""Mamba2 causal language model in which any subset of layers is Palimpsa-M, for transformers 5.17 and later."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...base.errors import UsageError
from ...kernels.common.precision import compute_dtype
from ...kernels.metaplastic.kept import KeptOutputs
from ...mixers.geometry import FP32_NAMES
from ...mixers.layout import SequenceLayout, sequence_layout
from ...mixers.mixer import Mamba2Mixer, PalimpsaMixer
from ...mixers.states import CACHE_NAMES, has_read, not_yet_read, note_tokens, take_cache, tokens_read
from ..strict_loading import StrictLoadingMixin
from .configuration_palimpsa_mamba2 import PalimpsaMamba2Config
from .initial_values import initialize
from .outputs import CACHE_FIELD, PalimpsaMamba2CausalLMOutput, PalimpsaMamba2Output


class PalimpsaMamba2RMSNorm(nn.Module):
    """RMSNorm computed in fp32, given out in the type of its weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = compute_dtype(hidden, self.weight)
        wide = hidden.to(dtype)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight.to(dtype)).to(self.weight.dtype)


class PalimpsaMamba2Block(GradientCheckpointingLayer):
    """norm, mixer, and the residual stream around them (in fp32 when the config says so)."""

    def __init__(self, config: PalimpsaMamba2Config, layer_idx: int) -> None:
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = PalimpsaMamba2RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        swapped, geometry = layer_idx in config.palimpsa_layers, config.mixer_geometry()
        self.mixer = PalimpsaMixer(geometry, config.gate, layer_idx) if swapped else Mamba2Mixer(geometry, layer_idx)

    def __call__(self, *args, **kwargs):
        recomputed = self.training and self.gradient_checkpointing and torch.is_grad_enabled()
        if recomputed and isinstance(self.mixer, PalimpsaMixer) and not torch.compiler.is_compiling():
            # Checkpointing hands the same keyword arguments to both runs of `forward`.
            kwargs["kept"] = KeptOutputs()
        return super().__call__(*args, **kwargs)

    def forward(
        self,
        hidden: Tensor,
        cache=None,
        layout: SequenceLayout | None = None,
        kept: KeptOutputs | None = None,
    ) -> Tensor:
        """hidden [B, T, D] to the same shape; `kept` saves a second run of the same block the scan."""
        residual = hidden.to(compute_dtype(hidden)) if self.residual_in_fp32 else hidden
        with nullcontext() if kept is None else kept.use():
            return residual + self.mixer(self.norm(hidden), cache=cache, layout=layout)


class PalimpsaMamba2PreTrainedModel(StrictLoadingMixin, PreTrainedModel):
    """Loading, initialisation and what transformers needs to know of these models."""

    config_class = PalimpsaMamba2Config
    config: PalimpsaMamba2Config
    base_model_prefix = "backbone"
    _no_split_modules = ["PalimpsaMamba2Block"]
    _skip_keys_device_placement = list(CACHE_NAMES)
    # Searched for in parameter names; the class's own parameters, however the checkpoint stores them.
    _keep_in_fp32_modules_strict = list(FP32_NAMES)
    supports_gradient_checkpointing = True
    _is_stateful = True

    def _init_weights(self, module: nn.Module) -> None:
        initialize(module, self.config)


class PalimpsaMamba2Model(PalimpsaMamba2PreTrainedModel):
    """Embedding, blocks and the last norm."""

    def __init__(self, config: PalimpsaMamba2Config) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(PalimpsaMamba2Block(config, index) for index in range(config.num_hidden_layers))
        self.norm_f = PalimpsaMamba2RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cache=None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs,
    ) -> PalimpsaMamba2Output | tuple:
        """Runs the blocks.

        Args:
            input_ids: [B, T]; or `inputs_embeds` [B, T, D].
            attention_mask: [B, S], S >= T, zero for padding anywhere; the last T columns belong to these tokens.
            position_ids: only read to find packed documents, where they start again at 0.
            seq_idx: [B, T], the document each token belongs to.
            cache: also under the names `cache_params` and `past_key_values`.
            use_cache: return a cache; off by default in training, and for packed documents.
            output_hidden_states: return the input of every block, and the last norm's output.
            kwargs: `cu_seq_lens_q` tells packed documents; what else collators and trainers pass is ignored.

        Raises:
            UsageError: packed documents together with a cache; a mask that does not fit.
        """
        cache = take_cache({"cache": cache, **kwargs})
        if (input_ids is None) == (inputs_embeds is None):
            raise UsageError("the model was given both or neither of input_ids and inputs_embeds; give one")
        hidden = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        shape = (hidden.shape[0], hidden.shape[1])
        layout = sequence_layout(
            shape,
            attention_mask=attention_mask,
            position_ids=position_ids,
            seq_idx=seq_idx,
            cu_seqlens=kwargs.get("cu_seq_lens_q"),
        )
        packed = layout is not None and layout.packed
        cache = self._resolve_cache(cache, use_cache, packed)
        if packed:
            hidden = hidden.reshape(1, -1, hidden.shape[-1])
        inputs, more = [], has_read(cache)
        for block in self.layers:
            inputs.append(hidden)
            hidden = block(hidden, cache=cache, layout=layout)
        if cache is not None:
            note_tokens(cache, input_ids, more=more)
        hidden = self.norm_f(hidden)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        outputs = {
            "last_hidden_state": hidden.reshape(*shape, -1),
            CACHE_FIELD: cache if use_cache is not False else None,
            "hidden_states": tuple(h.reshape(*shape, -1) for h in (*inputs, hidden)) if output_hidden_states else None,
        }
        output = PalimpsaMamba2Output(**outputs)
        return output if _wants_dict(return_dict, self.config) else output.to_tuple()

    def _resolve_cache(self, cache, use_cache: bool | None, packed: bool):
        """The cache to write to, or None."""
        if packed:
            if cache is not None or use_cache:
                raise UsageError(
                    "packed documents were given together with a cache; a cache carries one sequence a row, "
                    "so pass use_cache=False, or the documents as rows of a padded batch"
                )
            return None
        if self.training and self.gradient_checkpointing and torch.is_grad_enabled():
            # The backward pass runs each block again, and would write the states a second time.
            return None
        if use_cache is None:
            use_cache = bool(self.config.use_cache) and not self.training
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        return cache


def head_dtype(head: nn.Module) -> torch.dtype | None:
    """The dtype in which a head computes; None for a quantised one, which has whole numbers and casts by itself."""
    dtype = getattr(head.weight, "dtype", None)
    return dtype if dtype is not None and dtype.is_floating_point else None


def apply_head(head: nn.Module, hidden: Tensor) -> Tensor:
    """Logits of hidden states, in the head's own dtype."""
    dtype = head_dtype(head)
    return head(hidden if dtype is None else hidden.to(dtype))


class PalimpsaMamba2ForCausalLM(PalimpsaMamba2PreTrainedModel, GenerationMixin):
    """The backbone and a language modelling head, tied to the embedding when the config says so."""

    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}  # transformers 5 wants a dict

    def __init__(self, config: PalimpsaMamba2Config) -> None:
        super().__init__(config)
        self.backbone = PalimpsaMamba2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.backbone.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cache=None,
        cache_params=None,
        past_key_values=None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> PalimpsaMamba2CausalLMOutput | tuple:
        """Logits, and the loss when labels are given.

        Args:
            cache: under any of its three names; which one `generate` uses depends on the release.
            labels: [B, T], shifted inside; -100 is ignored.
            logits_to_keep: only the last so many positions (0 for all), or a tensor of positions.
            kwargs: `num_items_in_batch` and the like reach the loss; the other arguments are those of the backbone.
        """
        outputs = self.backbone(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            seq_idx=seq_idx,
            cache=cache,
            cache_params=cache_params,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        kept = outputs.last_hidden_state[:, keep]
        logits = apply_head(self.lm_head, kept)
        logits = logits.to(compute_dtype(logits))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = PalimpsaMamba2CausalLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            **{CACHE_FIELD: outputs.cache},
        )
        return output if _wants_dict(return_dict, self.config) else output.to_tuple()

    def prepare_inputs_for_generation(
        self, input_ids, next_sequence_length=None, attention_mask=None, inputs_embeds=None, **kwargs
    ):
        """As in transformers, with the cache under one name; a decoded token is never padding, so it needs no mask."""
        cache = take_cache(kwargs)
        decoding = cache is not None and next_sequence_length == 1 and not kwargs.get("is_first_iteration", False)
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            attention_mask=None if decoding else attention_mask,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        inputs["cache"] = cache
        return inputs

    def _prefill(self, input_ids, generation_config, model_kwargs, **kwargs):
        """The part of the prompt that a given cache has not read, in pieces when `prefill_chunk_size` asks for it.

        transformers counts cached keys for both, and recurrent states have none. As with its own models the ids are the
        whole text, or the new tokens alone beside a mask of the whole. Everything else is left to transformers.

        Raises:
            UsageError: the text does not begin with what the cache has read.
        """
        arguments = dict(model_kwargs)
        cache, mask = take_cache(arguments), arguments.get("attention_mask")
        size = generation_config.prefill_chunk_size
        resumed = bool(tokens_read(cache))
        if not (resumed or size) or cache is None or arguments.get("inputs_embeds") is not None:
            return super()._prefill(input_ids, generation_config, model_kwargs, **kwargs)
        end = 0 if mask is None else mask.shape[1] - input_ids.shape[1]
        if resumed and end == 0:
            new = not_yet_read(cache, input_ids)
            end, input_ids = input_ids.shape[1] - new.shape[1], new
        for piece in input_ids.split(size or input_ids.shape[1], dim=1):
            end += piece.shape[1]
            piece_mask = None if mask is None else mask[:, :end]
            outputs = self(piece, attention_mask=piece_mask, cache=cache, logits_to_keep=1, return_dict=True)
        return outputs


# The Trainer shifts labels for label smoothing only of classes that are listed here by name.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[PalimpsaMamba2Config.model_type] = PalimpsaMamba2ForCausalLM.__name__


def _wants_dict(return_dict: bool | None, config: PalimpsaMamba2Config) -> bool:
    return bool(config.return_dict if return_dict is None else return_dict)
