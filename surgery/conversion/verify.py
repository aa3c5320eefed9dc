"""Proves that a written model is its source: what is read back from the output folder is compared, not what was meant.

Three checks, all in fp32 on the CPU (relative L2):
- tensors: every source tensor is in the output, bit for bit, or as rounded to the dtype that was asked for;
- logits: whole models on one text; layers: each swapped mixer with its source, one pair in memory at a time.
With metaplasticity off the two must agree to `OFF_LIMIT` whatever the start; with it on, the identity start to
`ON_LIMIT`.
"""

from __future__ import annotations

import logging
import math
import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from ...base.console import progress
from ...base.errors import PalimpsaError, UsageError, VerificationError
from ...base.text import token_sequences
from ...mixers.geometry import GateSpec
from ..checkpoint.tokenizer import open_tokenizer
from ..families.hybrids import quiet_transformers
from ..planning.inits import INITS
from ..planning.plan import Plan

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint
    from ..families.base import Site

logger = logging.getLogger(__name__)

MODES = ("auto", "logits", "layers", "none")
OFF_LIMIT, ON_LIMIT = 1e-5, 1e-4
TOKENS = 300
"""Tokens compared: more than one chunk of 256, and no multiple of anything."""

SURGERY_KEYS = ("palimpsa_layers", *GateSpec.KEYS)
"""What a conversion may change in the config."""

_PIECE = 2**22
_EASY_FRACTION = 0.4
"""Of the memory that is free: an fp32 copy of the model must fit in it for `auto` to compare logits."""


@dataclass(frozen=True)
class Verification:
    """Outcome of a check that passed.

    Attributes:
        mode: `logits`, `layers` or `none`.
        on: what was compared, in words.
        off_error: worst relative L2 with metaplasticity off.
        on_error: worst relative L2 with metaplasticity on; limited only for the identity start.
        layers: for mode `layers`, both errors of each swapped layer.
        tensors: how many tensors were compared bit for bit.
    """

    mode: str
    on: str = ""
    off_error: float | None = None
    on_error: float | None = None
    layers: dict[int, tuple[float, float]] = field(default_factory=dict)
    tensors: int = 0


def relative_l2(value: Tensor, reference: Tensor) -> float:
    """||value - reference|| / ||reference|| in fp64; infinite when one is not finite or the reference alone zero."""
    difference, size = 0.0, 0.0
    for one, two in zip(value.reshape(-1).split(_PIECE), reference.reshape(-1).split(_PIECE), strict=True):
        difference += (one.double() - two.double()).square().sum().item()
        size += two.double().square().sum().item()
    if not (math.isfinite(difference) and math.isfinite(size)):  # no comparison with a NaN is true
        return math.inf
    return (difference / size) ** 0.5 if size > 0 else math.inf if difference > 0 else 0.0


def choose_mode(checkpoint: Checkpoint, mode: str) -> str:
    """Resolves `auto`: logits when an fp32 copy of the model takes less than 40 % of the free memory.

    Raises:
        UsageError: no such mode.
    """
    if mode not in MODES:
        raise UsageError(f"--verify {mode}: there is no such check; choose one of {', '.join(MODES)}")
    if mode != "auto":
        return mode
    size = 4 * sum(torch.Size(entry.shape).numel() for entry in checkpoint.tensors.values())
    return "logits" if size < _EASY_FRACTION * _free_memory() else "layers"


def _free_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def verify(checkpoint: Checkpoint, folder: Path, plan: Plan, *, mode: str) -> Verification:
    """Compares the model written to `folder` with its source.

    Args:
        checkpoint: the source.
        folder: what was written; it is read back.
        plan: the surgery.
        mode: one of `MODES`.

    Raises:
        VerificationError: a difference; the message says where and how large.
    """
    mode = choose_mode(checkpoint, mode)
    if mode == "none":
        return Verification(mode)
    tensors = verify_tensors(checkpoint, folder)
    if mode == "layers":
        layers = verify_layers(checkpoint, folder, plan)
        return Verification(
            mode,
            f"each swapped mixer on {TOKENS} random inputs",
            off_error=max(off for off, _ in layers.values()),
            on_error=max(on for _, on in layers.values()),
            layers=layers,
            tensors=tensors,
        )
    ids, text = _text(checkpoint)
    off, on = verify_logits(checkpoint, folder, plan, ids)
    return Verification(mode, f"logits of {ids.shape[1]} tokens of {text}", off, on, tensors=tensors)


def verify_tensors(checkpoint: Checkpoint, folder: Path) -> int:
    """Every source tensor is in the output with the same bits, or its rounding to the output's dtype; so is the config.

    Returns:
        How many were compared.
    """
    from ..checkpoint.checkpoint import open_checkpoint

    written = open_checkpoint(folder)
    found = written.config.arguments()
    for key, value in checkpoint.config.arguments().items():
        if key not in SURGERY_KEYS and found[key] != value:
            raise VerificationError(
                f"config.json:{key}: {found[key]} was written, the source has {value}; nothing was kept"
            )
    for name in progress(list(checkpoint.tensors), "checking tensors"):
        if name not in written.tensors:
            raise VerificationError(f"{name}: is in the source but not in what was written; nothing was kept")
        if not _same(checkpoint, written, name):
            raise VerificationError(
                f"{name}: what was written differs from the source's tensor; nothing was kept, convert again"
            )
    return len(checkpoint.tensors)


def _same(source: Checkpoint, written: Checkpoint, name: str) -> bool:
    one, two = source.tensors[name], written.tensors[name]
    if one.shape != two.shape:
        return False
    if one.dtype == two.dtype:
        pairs = zip(source.pieces(name), written.pieces(name), strict=True)
    else:
        pairs = iter([(source.load(name).to(two.dtype), written.load(name))])
    return all(np.array_equal(_bits(one), _bits(two)) for one, two in pairs)


def _bits(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def verify_layers(checkpoint: Checkpoint, folder: Path, plan: Plan) -> dict[int, tuple[float, float]]:
    """Runs each swapped mixer and its source on the same input; one pair is in memory at a time.

    Returns:
        (error with metaplasticity off, error with it on) by layer.
    """
    from ...mixers.metaplasticity import metaplasticity_off
    from ..checkpoint.checkpoint import open_checkpoint

    written = open_checkpoint(folder)
    errors = {}
    with torch.no_grad():
        for layer in progress(list(plan.layers), "checking layers"):
            site = written.sites[layer]
            hidden = _layer_input(checkpoint, site)
            plain, swapped = written.family.mixers(written.config, layer)
            expected = _mixer(plain, checkpoint, written, site)(hidden)
            _refuse_not_finite(expected, f"layer {layer}")
            del plain
            mixer = _mixer(swapped, written, written, site)
            with metaplasticity_off(mixer):
                off = relative_l2(mixer(hidden), expected)
            on = relative_l2(mixer(hidden), expected)
            del mixer, swapped
            _check(off, on, plan, f"layer {layer}")
            errors[layer] = (off, on)
    return errors


def _layer_input(checkpoint: Checkpoint, site: Site) -> Tensor:
    """[1, TOKENS, D] as a block's norm would give it, from seeded noise; fp32."""
    weight = checkpoint.load(f"{site.norm}.weight").float() + site.norm_offset
    noise = torch.randn(1, TOKENS, len(weight), generator=torch.Generator().manual_seed(site.layer))
    return noise * noise.square().mean(-1, keepdim=True).rsqrt() * weight


def _mixer(mixer: nn.Module, checkpoint: Checkpoint, written: Checkpoint, site: Site) -> nn.Module:
    """The mixer in fp32 with a checkpoint's tensors, rounded to the dtypes that were written."""
    prefix = site.tensor("")
    own = (name for name in checkpoint.tensors if name.startswith(prefix))
    names = dict.fromkeys(checkpoint.whole_of.get(name, name) for name in own)
    state = {name.removeprefix(prefix): _rounded(checkpoint, written, name) for name in names}
    mixer.load_state_dict(state, strict=True, assign=True)
    return mixer.eval()


def _rounded(checkpoint: Checkpoint, written: Checkpoint, name: str) -> Tensor:
    """A tensor in fp32, rounded as it was written; of one that is stored in parts the name may be the whole's."""
    part = checkpoint.parts.get(name, (name,))[0]
    return checkpoint.load_whole(name).to(written.tensors[part].dtype).float()


def verify_logits(checkpoint: Checkpoint, folder: Path, plan: Plan, ids: Tensor) -> tuple[float, float]:
    """Runs the source and then the written model, read by transformers, on `ids` [1, T].

    The source is rounded to the dtypes that were written. A hybrid's is run by its own class of transformers. With a
    source that was converted before, "off" compares both models without any metaplasticity, "on" both with theirs on.

    Returns:
        (error with metaplasticity off, error with it on).
    """
    from ..checkpoint.checkpoint import open_checkpoint

    written = open_checkpoint(folder)
    family, config = checkpoint.family, checkpoint.config
    state = {name: _rounded(checkpoint, written, name) for name in checkpoint.tensors}
    new = {name for site in checkpoint.sites.values() if site.gate for name in site.new(site.gate)}
    plain = {name: tensor for name, tensor in state.items() if name not in new}
    expected_on = expected_off = _logits(family.reference(config, plain), ids, off=True)
    if new:
        expected_on = _logits(family.build(config, state, torch.float32), ids, off=False)
    del state, plain
    for expected in (expected_off, expected_on):
        _refuse_not_finite(expected, "the logits")
    with quiet_transformers():
        model = checkpoint.family.model_class().from_pretrained(folder, dtype=torch.float32).eval()
    off = relative_l2(_logits(model, ids, off=True), expected_off)
    on = relative_l2(_logits(model, ids, off=False), expected_on)
    _check(off, on, plan, "the logits")
    return off, on


def _logits(model: nn.Module, ids: Tensor, *, off: bool) -> Tensor:
    from ...mixers.metaplasticity import metaplasticity_off

    with torch.no_grad(), metaplasticity_off(model) if off else nullcontext():
        return model(input_ids=ids, use_cache=False).logits


def _refuse_not_finite(expected: Tensor, what: str) -> None:
    """Nothing can be proved equal to what is not a number."""
    if not torch.isfinite(expected).all():
        raise VerificationError(
            f"{what}: the source itself gives values that are not finite in the dtype to be written; nothing was kept, "
            "use an undamaged checkpoint or a wider --dtype"
        )


def _check(off: float, on: float, plan: Plan, what: str) -> None:
    """Raises `VerificationError` for an error above its limit."""
    if off > OFF_LIMIT:
        raise VerificationError(
            f"{what}: with metaplasticity off, what was written differs from the source by {off:.2e} (relative L2, "
            f"limit {OFF_LIMIT:g}); nothing was kept, please report the checkpoint's layout"
        )
    if INITS[plan.init].exact and on > ON_LIMIT:
        raise VerificationError(
            f"{what}: the {plan.init} start differs from the source by {on:.2e} (relative L2, limit {ON_LIMIT:g}); "
            f"nothing was kept"
        )
    if on == float("inf"):
        raise VerificationError(f"{what}: not finite with the {plan.init} start; nothing was kept, lower the strength")


def _text(checkpoint: Checkpoint) -> tuple[Tensor, str]:
    """Token ids [1, T] of the embedded text, or seeded ids when there is no tokenizer."""
    vocabulary = checkpoint.config.vocab_size
    try:
        tokenizer = open_tokenizer(checkpoint)
        sequences, about = token_sequences(None, tokenizer, tokens=TOKENS, seq_len=TOKENS, vocab_size=vocabulary)
        return torch.as_tensor(sequences[0])[None], about["data"]
    except PalimpsaError as error:
        logger.info("comparing on random token ids: %s", error)
        ids = torch.randint(0, vocabulary, (1, TOKENS), generator=torch.Generator().manual_seed(0))
        return ids, "random ids"
