"""Speed of reading a prompt and of writing token by token, one sequence at a time, and what a sequence keeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from .streaming import stream_logits
from .suite import EvalOptions, EvalText, Measurement, Subject, SuiteResult

_PROMPT = 64
"""Tokens before decoding starts: its speed does not depend on how many there are."""


def run(subject: Subject, text: EvalText, options: EvalOptions) -> SuiteResult:
    """Tokens a second, each timed `repeats` times after a warm-up; samples are timings.

    Prefill of each length ends with the logits of the last token. Decoding is the model's forward pass for one token
    after the other, the likeliest one, without what `generate` adds. On a GPU the peak of memory during the longest
    prefill is given as well.
    """
    found = []
    if subject.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(subject.device)
    for length in options.lengths:
        ids = subject.tensor(text.filler(length, 0)).unsqueeze(0)
        seconds = _times(lambda ids=ids: stream_logits(subject.model, ids, [ids.shape[1] - 1], options.chunk), options)
        found.append(_speed("prefill", length, seconds, {"length": length}))
    if subject.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(subject.device) / 2**20
        found.append(_amount("peak memory", "MiB", peak, {"length": options.longest}))
    prompt = subject.tensor(text.filler(min(_PROMPT, options.longest), 0)).unsqueeze(0)
    seconds, cache = _decode_times(subject, prompt, options)
    found.append(_speed("decode", options.decode_tokens, seconds, {"batch": 1}))
    kept = sum(tensor.nbytes for layer in cache.layers for tensor in _held(layer))
    found.append(_amount("state of a sequence", "MiB", kept / 2**20, {}))
    return SuiteResult(found)


def _held(layer: Any) -> Iterator[torch.Tensor]:
    """The tensors that a layer of a cache keeps, of either kind or both."""
    states = (*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values())
    for held in (*states, getattr(layer, "keys", None), getattr(layer, "values", None)):
        if held is not None:
            yield held


def _speed(name: str, tokens: int, seconds: list[float], at: dict) -> Measurement:
    samples = np.array([(tokens, value) for value in seconds], dtype=float)
    return Measurement(name, "tokens/s", samples, at, "higher", paired=False)


def _amount(name: str, unit: str, value: float, at: dict) -> Measurement:
    return Measurement(name, unit, np.array([[value, 1.0]]), at, "lower", paired=False)


def _times(run: Callable[[], object], options: EvalOptions) -> list[float]:
    """Seconds of each run but the first."""
    return [_timed(run) for _ in range(options.repeats + 1)][1:]


def _timed(run: Callable[[], object]) -> float:
    _wait()
    started = time.perf_counter()
    run()
    _wait()
    return time.perf_counter() - started


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@torch.no_grad()
def _decode_times(subject: Subject, prompt: torch.Tensor, options: EvalOptions) -> tuple[list[float], DynamicCache]:
    """Seconds for `decode_tokens` single steps, `repeats` times, and the cache they left."""
    output = subject.model(input_ids=prompt, use_cache=True, logits_to_keep=1)
    state = {"token": output.logits[:, -1:].argmax(-1), "cache": output.cache}

    def write() -> None:
        for _ in range(options.decode_tokens):
            step = subject.model(input_ids=state["token"], use_cache=True, cache=state["cache"])
            state["token"] = step.logits[:, -1:].argmax(-1)

    return _times(write, options), state["cache"]
