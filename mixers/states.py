"""One layer's states inside a transformers cache, whatever the release calls things."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.errors import UsageError

# The cache argument is `cache` in transformers 5.24; 5.17 says `cache_params` or `past_key_values`.
CACHE_NAMES = ("cache", "cache_params", "past_key_values")


def take_cache(arguments: dict):
    """Pops the cache under any of its names from keyword arguments; None when there is none.

    Raises:
        UsageError: two names hold different caches.
    """
    found = [arguments.pop(name, None) for name in CACHE_NAMES]
    caches = [cache for cache in found if cache is not None]
    if any(cache is not caches[0] for cache in caches[1:]):
        raise UsageError(f"two different caches were given under {' and '.join(CACHE_NAMES)}; give one")
    return caches[0] if caches else None


def tokens_read(cache) -> list[Tensor]:
    """The ids [B, T] that this cache's states have read, piece by piece; recurrent states themselves do not tell.

    Empty for a new or reset cache, and where it is not known: another class filled it, or it has read embeddings.
    """
    return (getattr(cache, "tokens_read", None) or []) if has_read(cache) else []


def has_read(cache) -> bool:
    """Whether some text has left its states in this cache."""
    return any(
        layer.has_previous_state[0] for layer in getattr(cache, "layers", ()) if hasattr(layer, "recurrent_states")
    )


def note_tokens(cache, ids: Tensor | None, *, more: bool) -> None:
    """Notes on a cache that its states have read `ids` (None: embeddings).

    Args:
        cache: of `LayerStates`.
        ids: [B, T].
        more: whether it had read before; what is not known then, stays so.
    """
    read = getattr(cache, "tokens_read", None) if more else []
    if read is not None and ids is not None:
        read.append(ids)  # in place: once a decoded token
    cache.tokens_read = None if ids is None else read


def not_yet_read(cache, ids: Tensor) -> Tensor:
    """The part of a text [B, T] that a cache has not read.

    A text no longer than what was read can only be what comes after it, and is all new.

    Raises:
        UsageError: the text is longer than what was read, and does not begin with it.
    """
    pieces = tokens_read(cache)
    seen = sum(piece.shape[1] for piece in pieces)
    if not seen or ids.shape[1] <= seen:
        return ids
    before = torch.cat(pieces, 1)
    if before.shape[0] != ids.shape[0] or not torch.equal(before, ids[:, :seen].to(before.device)):
        raise UsageError(
            f"the cache has read {seen} tokens, and the {ids.shape[1]} that are given do not begin with them; give the "
            "whole text, or the new tokens alone with an attention_mask of the whole text"
        )
    return ids[:, seen:]


class CachedLayer:
    """One layer of a transformers cache, which keeps the tensors: reordering for beams, resetting and moving them work
    as for any model. States are kept without their gradient: a cache is for generation, not for backpropagation
    through pieces of text.

    Args:
        cache: a cache built with `DynamicCache(config=model.config)` or by `generate`.
        layer_idx: which layer.

    Raises:
        UsageError: the cache does not hold what the layer needs there.
    """

    kept, name = ("recurrent_states",), "recurrent state"
    """What transformers' own layer of a cache must have, and what that is called in messages."""

    def __init__(self, cache, layer_idx: int) -> None:
        layers = getattr(cache, "layers", ())
        layer = layers[layer_idx] if layer_idx < len(layers) else None
        if not all(hasattr(layer, attribute) for attribute in self.kept):
            raise UsageError(
                f"the cache of type {type(cache).__name__} holds no {self.name} for layer {layer_idx}; "
                "build it with DynamicCache(config=model.config)"
            )
        self.cache = cache
        self.layer_idx = layer_idx
        self._layer = layer

    @property
    def filled(self) -> bool:
        """Whether an earlier piece of text left its states here."""
        return bool(self._layer.has_previous_state[0])

    @property
    def conv(self) -> Tensor | None:
        """[B, C, W - 1], the last inputs of the convolution; None without one."""
        return self._layer.conv_states[0]


class LayerStates(CachedLayer):
    """The states of one mixer: `conv` [B, C, W - 1] and one recurrent tensor [B, H, rows, N]."""

    @property
    def recurrent(self) -> Tensor:
        return self._layer.recurrent_states[0]

    def store(self, conv: Tensor, recurrent: Tensor) -> None:
        """Replaces both states by those after a piece of text."""
        self.cache.update_conv_state(conv.detach(), layer_idx=self.layer_idx)
        self.cache.update_recurrent_state(recurrent.detach(), layer_idx=self.layer_idx)
