"""Text from a model of any layout: what `palimpsa generate` runs."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList

from ...base.errors import CheckpointError, PalimpsaError, UsageError
from ...base.text import opening_ids
from ...surgery.checkpoint.checkpoint import open_checkpoint
from ...surgery.checkpoint.loading import load_model
from ...surgery.checkpoint.tokenizer import open_tokenizer, with_tokenizer

_LEAST_TEMPERATURE = 1e-6
"""Logits divided by less may leave the range of fp32."""
_NO_SETTINGS = frozenset(("transformers_version", "_from_model_config", "bos_token_id", "eos_token_id", "pad_token_id"))
"""Keys of a generation config that ask for no way of choosing tokens."""


def generate(
    model_folder: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    temperature: float | None = None,
    seed: int = 0,
    device: str = "cpu",
    tokenizer: str | Path | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> str:
    """Continues `prompt` as transformers does: after what the tokenizer puts at its start, by the generation config.

    Args:
        model_folder: a model folder or Hub id, source or converted.
        prompt: the text to continue.
        max_new_tokens: how many tokens to add at most.
        temperature: 0 takes the most likely token each time; above, samples; None does what the model's generation
            config says. The other settings there, such as top_p and the end tokens, hold in any case.
        seed: of the sampling.
        device: where the model runs.
        tokenizer: folder or Hub id; by default the model's own.
        revision: of a Hub id.
        token: Hub token.

    Returns:
        The text that was added.

    Raises:
        UsageError: as for `continue_text`.
        CheckpointError: no model or no tokenizer can be read there, or the logits are not finite.
    """
    checkpoint = with_tokenizer(open_checkpoint(model_folder, revision=revision, token=token), tokenizer, token=token)
    encoder = open_tokenizer(checkpoint)
    model = load_model(checkpoint, device=device)
    return continue_text(model, encoder, prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)


@torch.no_grad()
def continue_text(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    temperature: float | None = None,
    seed: int = 0,
) -> str:
    """`generate` with a loaded model and tokenizer.

    Raises:
        UsageError: an empty prompt or one that is no text, numbers that make no sense, or a generation config that
            transformers refuses.
        CheckpointError: the logits are not finite.
    """
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
    if temperature and not _LEAST_TEMPERATURE <= temperature < math.inf:  # nor is a NaN
        raise UsageError(
            f"temperature is {temperature}, expected 0 (the most likely token) or a number from {_LEAST_TEMPERATURE} up"
        )
    if not -(2**63) <= seed < 2**64:
        raise UsageError(f"seed is {seed}, expected a number of at most 64 bits, such as 0")
    if any("\ud800" <= character <= "\udfff" for character in prompt):  # what a shell passes on of other encodings
        raise UsageError("the prompt is not UTF-8 text; give it in that encoding")
    words = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if not words:
        raise UsageError("the prompt has no token; give some text to continue")
    rows = model.get_input_embeddings().num_embeddings
    if max(words) >= rows:
        raise UsageError(
            f"the prompt spells {tokenizer.convert_ids_to_tokens(max(words))}, whose id {max(words)} the model's "
            f"embedding of {rows} rows does not have; leave it out"
        )
    ids = torch.tensor([[*opening_ids(tokenizer), *words]], device=model.device)
    settings = model.generation_config
    end = tokenizer.eos_token_id if settings.eos_token_id in (None, []) else settings.eos_token_id
    if not all(one is None or type(one) is int for one in (end if isinstance(end, list) else [end])):
        raise UsageError(
            f"generation_config.json has eos_token_id = {end!r}, expected a token's number or a list of them; correct "
            "that file"
        )
    pads = (settings.pad_token_id, tokenizer.pad_token_id, end[0] if isinstance(end, list) else end)
    sampling = {} if temperature is None else {"do_sample": temperature > 0}
    if temperature:
        sampling["temperature"] = temperature
    if settings.stop_strings is not None:
        sampling["tokenizer"] = tokenizer
    torch.manual_seed(seed)
    with _refusals_named(settings):
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            eos_token_id=end,
            pad_token_id=next((pad for pad in pads if pad is not None), None),
            return_dict_in_generate=False,
            logits_processor=LogitsProcessorList([_Finite(model, ids.shape[1])]),
            **sampling,
        )
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


@contextlib.contextmanager
def _refusals_named(settings: Any) -> Iterator[None]:
    """Names a generation config's settings where transformers refuses them: it checks many of them only as it runs.

    Raises:
        UsageError: it refuses them, or they ask for another prompt than was given (`token_healing`).
    """
    named = {k: v for k, v in settings.to_diff_dict().items() if k not in _NO_SETTINGS and v is not None}
    said = f"generation_config.json has {', '.join(f'{key} = {value!r}' for key, value in named.items())}"
    if settings.token_healing:
        raise UsageError(f"{said}: token_healing changes the prompt, which is not done here; remove it from that file")
    try:
        yield
    except PalimpsaError:
        raise
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, ImportError) as error:
        if not named:
            raise
        reason = re.split(r"(?<=[a-z)])\. ", " ".join(str(error).split()))[0][:200].rstrip(".")
        raise UsageError(f"{said}, which transformers refuses ({reason}); correct that file") from error


class _Finite:
    """Refuses logits of which none is the largest: the most likely token would be any, such as one of no text."""

    def __init__(self, model: Any, prompt: int) -> None:
        self.model, self.prompt = model, prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not scores.amax(-1).isfinite().all():
            broken = (name for name, weight in self.model.named_parameters() if not weight.isfinite().all())
            added = input_ids.shape[1] - self.prompt
            raise CheckpointError(
                f"the logits after {added} of the new tokens are not finite; "
                + next(
                    (f"{name} has weights that are not finite, use an undamaged checkpoint" for name in broken),
                    "its weights are, so the numbers grew too large on the way; convert the model with --dtype float32",
                )
            )
        return scores
