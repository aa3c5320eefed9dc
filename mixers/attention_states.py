"""One attention layer's states inside a transformers cache: keys, values, the convolution's inputs, and where pads are.

The cache's own class for layers with both kinds of state keeps them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .states import CachedLayer


class AttentionStates(CachedLayer):
    """The states of one attention layer.

    Keys and values are [B, H_kv, S, P], in the order in which they were computed: the real tokens of each piece of
    text, then its pads. `recurrent_states` of the cache, which attention has no other use for, tells them apart:
    [B, S], true for real tokens, and absent as long as there were no pads.
    """

    kept, name = ("recurrent_states", "keys"), "keys and convolution state"

    @property
    def _real(self) -> Tensor | None:
        """[B, S], true for real tokens; None when there were no pads, or nothing was read."""
        known = self.filled and self._layer.is_recurrent_states_initialized[0]
        return self._layer.recurrent_states[0] if known else None

    @property
    def real_tokens(self) -> int | Tensor:
        """How many real tokens were read: a number, or [B, 1] where that differs by row."""
        return self._length if self._real is None else self._real.sum(1, keepdim=True)

    @property
    def _length(self) -> int | Tensor:
        """Tokens read, pads included; a tensor in a static cache."""
        return self._layer.get_seq_length() if self.filled else 0

    def extend(
        self, keys: Tensor, values: Tensor, conv: Tensor | None, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Adds a piece of text.

        Args:
            keys, values: [B, H_kv, T, P].
            conv: [B, C, W - 1] after the piece; None without a convolution.
            lengths: [B] real tokens of each row, which come first; None when all are.

        Returns:
            The keys and values that the piece attends to, and which of them each of its tokens sees: [T, S], or
            [B, 1, T, S] where pads were read before. None of the first piece, which sees itself alone, each token up
            to its own; and where all is seen.
        """
        before, start, first = self._real, self._length, not self.filled
        batch, _, length, _ = keys.shape
        start = start.clone() if isinstance(start, Tensor) else start  # the cache counts in place
        if first and not hasattr(self._layer, "max_cache_len"):
            self._layer.is_initialized = False  # transformers 5.17 lengthens the old keys after a reset
        all_keys, all_values = self.cache.update(keys.detach(), values.detach(), self.layer_idx)
        self._note(before, start, (batch, length), lengths, keys.device)
        if conv is not None:
            self.cache.update_conv_state(conv.detach(), layer_idx=self.layer_idx)
        self._layer.has_previous_state[0] = True
        if first:
            return keys, values, None
        slots = all_keys.shape[2]
        if torch.is_grad_enabled() and slots == start + length:
            all_keys = torch.cat([all_keys[:, :, :-length], keys], dim=2)
            all_values = torch.cat([all_values[:, :, :-length], values], dim=2)
        if before is None and length == 1 and not isinstance(start, Tensor):
            return all_keys, all_values, None
        return all_keys, all_values, _visible(before, start, length, slots, keys.device)

    def _note(self, before: Tensor | None, start, shape: tuple[int, int], lengths: Tensor | None, device) -> None:
        """Which of the piece's tokens are real, where any token so far is not."""
        layer, (batch, length) = self._layer, shape
        layer.is_recurrent_states_initialized[0] = before is not None or lengths is not None
        if not layer.is_recurrent_states_initialized[0]:
            return
        before = torch.ones(batch, int(start), dtype=torch.bool, device=device) if before is None else before
        here = torch.arange(length, device=device).expand(batch, -1)
        here = here >= 0 if lengths is None else here < lengths.unsqueeze(1)
        layer.recurrent_states[0] = torch.cat([before, here], dim=1)


def _visible(real: Tensor | None, start: int | Tensor, length: int, slots: int, device) -> Tensor:
    """The keys that each token of a piece sees: those before it that are real, and its own piece up to itself.

    Args:
        real: [B, S], of the keys before the piece; None when all are.
        start: S.
        length: T.
        slots: keys there is room for.
    """
    place = torch.arange(slots, device=device)
    causal = place <= (start + torch.arange(length, device=device)).unsqueeze(1)
    if real is None:
        return causal
    rest = real.new_ones(real.shape[0], slots - real.shape[1])
    return causal & torch.cat([real, rest], dim=1)[:, None, None]
