"""Models whose answers are known: one that looks things up in what it has read, and one that guesses."""

from types import SimpleNamespace

import torch
from torch import nn

LONGEST_MATCH = 6


class Oracle(nn.Module):
    """Predicts what followed the last time the text ended in the same tokens; the longest such ending wins.

    It answers to the calls that a causal LM answers to; its cache is the text so far.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.dummy = nn.Parameter(torch.zeros(1))
        self.lengths: list[int] = []

    def forward(self, input_ids, logits_to_keep, use_cache, cache=None):
        self.lengths.append(input_ids.shape[1])
        read = input_ids if cache is None else torch.cat([cache, input_ids], dim=1)
        before = read.shape[1] - input_ids.shape[1]
        logits = torch.zeros(len(read), len(logits_to_keep), self.vocab_size)
        for row, text in enumerate(read.tolist()):
            for column, position in enumerate(logits_to_keep.tolist()):
                logits[row, column, self.answer(text[: before + position + 1])] = 20.0
        return SimpleNamespace(logits=logits, cache=read if use_cache else None)

    def answer(self, text: list[int]) -> int:
        for length in range(LONGEST_MATCH, 0, -1):
            for end in range(len(text) - 1, length - 1, -1):
                if text[end - length : end] == text[-length:]:
                    return text[end]
        return 0


class Guesser(Oracle):
    """Every logit is drawn at random."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, input_ids, logits_to_keep, use_cache, cache=None):
        shape = (input_ids.shape[0], len(logits_to_keep), self.vocab_size)
        return SimpleNamespace(logits=torch.randn(shape, generator=self.generator), cache=0)
