"""Long sequences through a causal LM in pieces: the state is carried in the cache, so memory has an end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....base.errors import UsageError
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
        output = model.get_decoder()(input_ids=ids[:, start:stop], cache=cache, use_cache=True)
        cache = output.cache
        yield start, output[0]


@torch.no_grad()
def stream_losses(model: Any, ids: Tensor, chunk: int) -> Tensor:
    """Next-token losses [B, T - 1] in nats, fp32 on the CPU, of `ids` [B, T]; logits never exist for a whole piece."""
    losses = torch.empty(ids.shape[0], ids.shape[1] - 1)
    for start, hidden in stream(model, ids[:, :-1], chunk):
        targets = ids[:, start + 1 : start + 1 + hidden.shape[1]]
        piece = chunked_losses(hidden.flatten(0, 1), model.get_output_embeddings(), targets.flatten())
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
        carried = {"use_cache": False} if len(bounds) == 1 else {"use_cache": True, "cache": cache}
        output = model(input_ids=ids[:, start:stop], logits_to_keep=keep, **carried)
        cache = None if len(bounds) == 1 else output.cache
        found.append(output.logits[:, : len(here)].float())
    return torch.cat(found, dim=1)
