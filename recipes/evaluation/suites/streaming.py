"""Long sequences through a causal LM in pieces: the state is carried in the cache, so memory has an end."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....base.errors import UsageError
from ....mixers.states import CACHE_NAMES
from ....modeling.hybrids.hosts import is_hybrid, logits_factor
from ...training.losses import chunked_losses


def piece_bounds(length: int, chunk: int, cuts: Sequence[int] = ()) -> list[tuple[int, int]]:
    """(start, stop) of consecutive pieces of at most `chunk` tokens; every number in `cuts` ends a piece."""
    if chunk < 1:
        raise UsageError(f"chunk is {chunk}, expected at least one token a piece")
    ends = sorted({0, length, *range(chunk, length, chunk), *(cut for cut in cuts if 0 < cut < length)})
    return list(pairwise(ends))


def stream(model: Any, ids: Tensor, chunk: int) -> Iterator[tuple[int, Tensor]]:
    """Yields (start, hidden states [B, t, D] after the last norm) of each piece of `ids` [B, T].

    A sequence that fits one piece runs in one pass without a cache.
    """
    bounds = piece_bounds(ids.shape[1], chunk)
    if len(bounds) == 1:
        yield 0, model.get_decoder()(input_ids=ids, use_cache=False)[0]
        return
    cache = None
    for start, stop in bounds:
        output, cache = read_piece(model.get_decoder(), ids[:, start:stop], cache, start)
        yield start, output[0]


def read_piece(model: Any, ids: Tensor, cache: Any = None, start: int = 0, **options: Any) -> tuple[Any, Any]:
    """What a model, or its decoder, gives for the tokens [B, t] that follow `start` others, and the cache after them.

    Args:
        model: answers to `model(input_ids=, use_cache=, cache=)`; of hybrids the cache's name depends on the release.
        ids: the tokens.
        cache: what the earlier ones left, None before the first.
        start: how many they were.
        options: what else the model is given.
    """
    if is_hybrid(getattr(model, "config", None)):
        # Not every host counts on from what its cache holds.
        options["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device).unsqueeze(0)
        options[_cache_name(type(model))] = cache
    else:
        options["cache"] = cache
    output = model(input_ids=ids, use_cache=True, **options)
    found = (getattr(output, name, None) for name in CACHE_NAMES)
    return output, next(one for one in found if one is not None)


@functools.cache
def _cache_name(model_class: type) -> str:
    names = inspect.signature(model_class.forward).parameters
    return next(name for name in CACHE_NAMES if name in names)


@torch.no_grad()
def stream_losses(model: Any, ids: Tensor, chunk: int) -> Tensor:
    """Next-token losses [B, T - 1] in nats, fp32 on the CPU, of `ids` [B, T]; logits never exist for a whole piece."""
    losses = torch.empty(ids.shape[0], ids.shape[1] - 1)
    for start, hidden in stream(model, ids[:, :-1], chunk):
        targets = ids[:, start + 1 : start + 1 + hidden.shape[1]]
        head, factor = model.get_output_embeddings(), logits_factor(model.config)
        piece = chunked_losses(hidden.flatten(0, 1), head, targets.flatten(), factor)
        losses[:, start : start + hidden.shape[1]] = piece.view(targets.shape).float().cpu()
    return losses


@torch.no_grad()
def stream_logits(model: Any, ids: Tensor, positions: Sequence[int], chunk: int) -> Tensor:
    """Logits [B, len(positions), V] after the tokens at `positions` (ascending) of `ids` [B, T].

    Works with whatever answers to `model(input_ids=, use_cache=, cache=, logits_to_keep=)`.
    """
    wanted = np.asarray(positions)
    bounds = piece_bounds(ids.shape[1], chunk)
    cache, found = None, []
    for start, stop in bounds:
        here = torch.from_numpy(wanted[(wanted >= start) & (wanted < stop)] - start).to(ids.device)
        # logits_to_keep = 0 would mean all of them: where none is wanted, one is computed and dropped.
        keep = here if len(here) else torch.zeros(1, dtype=torch.long, device=ids.device)
        if len(bounds) == 1:
            output = model(input_ids=ids, use_cache=False, logits_to_keep=keep)
        else:
            output, cache = read_piece(model, ids[:, start:stop], cache, start, logits_to_keep=keep)
        found.append(output.logits[:, : len(here)].float())
    return torch.cat(found, dim=1)
