"""Text from a model of any layout: what `palimpsa generate` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..base.errors import UsageError
from ..base.text import load_tokenizer
from ..surgery.checkpoint import open_checkpoint
from ..surgery.loading import load_model


def generate(
    model_folder: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    device: str = "cpu",
    tokenizer: str | Path | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> str:
    """Continues `prompt`.

    Args:
        model_folder: a model folder or Hub id, source or converted.
        prompt: the text to continue.
        max_new_tokens: how many tokens to add at most.
        temperature: 0 takes the most likely token each time; above, samples.
        seed: of the sampling.
        device: where the model runs.
        tokenizer: folder or Hub id, when the model has none.
        revision: of a Hub id.
        token: Hub token.

    Returns:
        The text that was added.
    """
    checkpoint = open_checkpoint(model_folder, revision=revision, token=token)
    encoder = load_tokenizer(tokenizer or checkpoint.path)
    model = load_model(checkpoint, device=device)
    return continue_text(model, encoder, prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)


@torch.no_grad()
def continue_text(
    model: Any, tokenizer: Any, prompt: str, *, max_new_tokens: int = 64, temperature: float = 0.0, seed: int = 0
) -> str:
    """`generate` with a loaded model and tokenizer.

    Raises:
        UsageError: an empty prompt, or numbers that make no sense.
    """
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
    if temperature < 0:
        raise UsageError(f"temperature is {temperature}, expected 0 (the most likely token) or more")
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    if not ids.shape[1]:
        raise UsageError("the prompt has no token; give some text to continue")
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    output = model.generate(
        ids.to(model.device),
        attention_mask=torch.ones_like(ids).to(model.device),
        max_new_tokens=max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        **sampling,
    )
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
