"""Measures how fast each layer and head forgets.

Per head, over all tokens, with d_t as the layer uses it (bias, softplus, limits):
    rate   = mean_t A d_t             nats per token
    window = mean_t 1 / (1 - a_t)     tokens, a_t = exp(-A d_t)
The log decay that a layer of a Gated DeltaNet gives its rule is -A d_t.
A layer's figures are the means over its heads. Sums are fp64, so batch size and order do not change them. The model
runs layer by layer (see `layerwise.py`): `measure` holds the weights of one layer at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ...base.console import progress
from ...base.errors import CheckpointError
from ...base.text import data_name, token_sequences
from ..checkpoint.tokenizer import open_tokenizer
from ..families.registry import mixers
from .calibration import CalibrationSums
from .layerwise import LayerFiles, run_by_layer
from .profile import LayerProfile, Profile, rounded

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

FLOOR = 1e-12
"""Least A d_t in nats: 1 / (1 - exp(-FLOOR)) is still finite, and no head of a real model comes near it."""

BATCH_TOKENS, BATCH_NUMBERS = 4096, 2**23
"""Most tokens in a layer at a time, and most numbers of their hidden states: 2,048 tokens of a width of 4,096."""


def window_of(decay: Tensor) -> Tensor:
    """1 / (1 - exp(-decay)) tokens; `decay` [...] fp64, at least `FLOOR`. expm1 keeps the digits of a small decay."""
    return 1 / -torch.expm1(-decay)


class ForgettingSums:
    """Running sums of one layer, [H] fp64."""

    def __init__(self, mixer: nn.Module, calibrate: bool) -> None:
        heads = len(mixer.A_log)
        self.rate, self.window = torch.zeros(heads, dtype=torch.float64), torch.zeros(heads, dtype=torch.float64)
        self.tokens = 0
        self.swapped = hasattr(mixer, "metaplasticity")
        self.calibration = CalibrationSums(heads) if calibrate else None

    def add(self, step: Tensor, strength: Tensor) -> None:
        """Adds d_t [B, T, H] of a layer with A = `strength` [H]."""
        decay = (step.double() * strength.double()).flatten(0, 1).clamp_min(FLOOR).cpu()
        self.rate += decay.sum(0)
        self.window += window_of(decay).sum(0)
        self.tokens += decay.shape[0]

    def result(self, layer: int) -> LayerProfile:
        """The layer's part of the profile.

        Raises:
            CheckpointError: a figure is not finite, which only weights that are not finite can cause.
        """
        rate, window = self.rate / self.tokens, self.window / self.tokens
        if not (rate.isfinite().all() and window.isfinite().all()):
            raise CheckpointError(f"layer {layer}: its step sizes are not finite; the checkpoint's weights are damaged")
        return _layer_profile(layer, rate, window, self.swapped, self.calibration and self.calibration.result())


def _layer_profile(layer: int, rate: Tensor, window: Tensor, swapped: bool, calibration: Any = None) -> LayerProfile:
    mean_rate, mean_window = rounded([rate.mean().item(), window.mean().item()])
    return LayerProfile(
        layer=layer,
        swapped=swapped,
        rate=mean_rate,
        window=mean_window,
        head_rate=rounded(rate.tolist()),
        head_window=rounded(window.tolist()),
        calibration=calibration,
    )


def static_forgetting(checkpoint: Checkpoint) -> Profile:
    """Estimates the figures from A_log and dt_bias alone, as if the projection of every token gave zero.

    Needs no text and reads two small tensors a layer; a rough guide, labeled `static` wherever it is shown.

    Raises:
        CheckpointError: a figure is not finite.
    """
    layers = []
    for layer, site in checkpoint.sites.items():
        strength = checkpoint.load(site.tensor("A_log")).double().exp()
        step = nn.functional.softplus(checkpoint.load(site.tensor("dt_bias")).double())
        step = step.clamp(*site.geometry.time_step_limit)
        decay = (strength * step).clamp_min(FLOOR)
        if not bool(decay.isfinite().all()):
            raise CheckpointError(
                f"{checkpoint.source_id}: layer {layer}: A_log or dt_bias gives a forget rate that is not finite; the "
                "checkpoint's weights are damaged, copy or download them again"
            )
        layers.append(_layer_profile(layer, decay, window_of(decay), site.gate is not None))
    return Profile(method="static", source=checkpoint.source_id, fingerprint=checkpoint.fingerprint, layers=layers)


def measure_forgetting(
    model: nn.Module,
    sequences: Sequence[np.ndarray],
    *,
    batch_size: int = 2,
    calibrate: bool = True,
    files: LayerFiles | None = None,
) -> list[LayerProfile]:
    """Runs the sequences through the model and sums each mixer's step sizes.

    The model is only watched: its mode, weights and outputs stay as they are, and the hooks go even after an error.

    Args:
        model: of a family in `families/`, on any device, in any dtype.
        sequences: token ids, arrays of any lengths.
        batch_size: sequences at a time; memory and speed depend on it, the figures do not.
        calibrate: also collect the statistics of the calibrated start.
        files: where the weights of the model are, unless it has them itself.

    Returns:
        One entry for each layer that has a mixer.
    """
    from ...modeling.hybrids.hosts import is_delta
    from .rules import watching_rules

    training = model.training
    model.eval()
    try:
        delta = is_delta(model.config)
        watching = watching_rules if delta else _watching
        found = mixers(model)
        # No start of a delta rule is calibrated.
        sums = {layer: ForgettingSums(mixer, calibrate and not delta) for layer, mixer in found.items()}
        last = max(found)
        with progress(len(sequences) * (last + 1), "measuring") as bar, watching(found, sums):
            run_by_layer(model, sequences, batch_size=batch_size, last=last, files=files, ran=bar.update)
    finally:
        model.train(training)
    return [layer_sums.result(layer) for layer, layer_sums in sums.items()]


@contextmanager
def _watching(mixers: dict[int, nn.Module], sums: dict[int, ForgettingSums]) -> Iterator[None]:
    """Hooks on every mixer's input projection, removed when the block ends, however it ends."""
    hooks = []
    try:
        for layer, mixer in mixers.items():
            hooks.append(mixer.in_proj.register_forward_hook(partial(_watch, mixer, sums[layer])))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _watch(
    mixer: nn.Module, sums: ForgettingSums, module: nn.Module, inputs: tuple[Tensor, ...], projected: Tensor
) -> None:
    _, channels, raw_step = mixer.split_projection(projected)
    step, strength = mixer.step_size(raw_step), mixer.decay_rate()
    sums.add(step, strength)
    if sums.calibration is not None:
        x, keys, _ = mixer.split_channels(mixer.conv1d(channels)[0])
        # The importance gate reads what the host has not multiplied yet.
        sums.calibration.add_input(inputs[0] / getattr(mixer, "input_multiplier", 1.0))
        sums.calibration.add_states(x, keys, step, -strength * step)


def measure(
    src: str | Path | Checkpoint,
    *,
    data: str | Path | None = None,
    tokens: int = 65536,
    seq_len: int = 2048,
    seed: int = 0,
    batch_size: int | None = None,
    static: bool = False,
    calibrate: bool = True,
    device: str | torch.device = "cpu",
    tokenizer: str | Path | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> Profile:
    """Measures a checkpoint on text: the stage `measure`.

    Args:
        src: folder, Hub id, or an open checkpoint.
        data: text as for `base.text.iter_documents`; None is the embedded one.
        tokens: how many tokens in all.
        seq_len: tokens per sequence; sequences longer than a head's memory are needed to see it.
        seed: of the choice of text.
        batch_size: sequences at a time inside a layer; by default as many as `BATCH_TOKENS` and `BATCH_NUMBERS` hold.
        static: no text, `static_forgetting` instead.
        calibrate: also collect what the calibrated start needs; a quarter of the time.
        device: where the model runs; fp32 whatever the checkpoint's dtype.
        tokenizer: folder or Hub id; by default the checkpoint's own.
        revision: of a Hub id.
        token: for a private Hub id.

    Returns:
        The profile, ready for `write_profile`.
    """
    from ..checkpoint.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(src, revision=revision, token=token) if isinstance(src, str | Path) else src
    if static:
        if data is not None:
            logger.warning("--data %s: not used, as --static reads no text", data_name(data))
        return static_forgetting(checkpoint)
    sequences, about = token_sequences(
        data,
        open_tokenizer(checkpoint, tokenizer, token=token),
        tokens=tokens,
        seq_len=seq_len,
        seed=seed,
        vocab_size=checkpoint.config.vocab_size,
    )
    logger.info("measuring %s on %d tokens of %s", checkpoint.source_id, about["tokens"], about["data"])
    files = LayerFiles(checkpoint, device)
    most = min(BATCH_TOKENS, BATCH_NUMBERS // checkpoint.config.hidden_size)
    batch_size = batch_size or max(1, most // about["seq_len"])
    layers = measure_forgetting(files.model, sequences, batch_size=batch_size, calibrate=calibrate, files=files)
    return Profile(
        method="measured",
        source=checkpoint.source_id,
        fingerprint=checkpoint.fingerprint,
        data=about["data"],
        tokens=about["tokens"],
        seq_len=about["seq_len"],
        seed=seed,
        layers=layers,
    )
