"""Any supported checkpoint as a running model: source layouts and converted folders, through the same accounting."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel

from ...base.errors import CheckpointError
from .checkpoint import Checkpoint, open_checkpoint
from .tokenizer import with_tokenizer

logger = logging.getLogger(__name__)


def load_model(
    src: str | Path | Checkpoint,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    token: str | None = None,
) -> PreTrainedModel:
    """Builds the model of a checkpoint and fills it with its tensors, so that the files may go away.

    The modules are built without memory and each tensor is cast as it is read: the peak is the model itself.

    Args:
        src: folder, Hub id, or an open checkpoint.
        dtype: of the weights; by default the one most of the checkpoint is stored in. The parameters that decide
            decays stay in fp32 (fp64 when `dtype` is fp64).
        device: where the model goes.
        revision: branch, tag or commit of a Hub id.
        token: Hub token; by default the stored one.

    Returns:
        The model in eval mode. Mixers that are not swapped compute what the source's do.

    Raises:
        CheckpointError: as `open_checkpoint`, the checkpoint's tensors are not exactly the model's, or transformers
            refuses its generation config.
    """
    checkpoint = src if isinstance(src, Checkpoint) else open_checkpoint(src, revision=revision, token=token)
    checkpoint = _with_end(checkpoint)
    dtype = dtype or checkpoint.dtype
    state = {name: checkpoint.load(name).to(device, _dtype(checkpoint, name, dtype)) for name in checkpoint.tensors}
    try:
        model = checkpoint.family.build(checkpoint.config, state, dtype).to(device)
    except RuntimeError as error:
        raise CheckpointError(
            f"{checkpoint.source_id}: the model and the checkpoint differ ({' '.join(str(error).split())[:300]}); the "
            "checkpoint was written for another version of this package"
        ) from error
    model.config.dtype = dtype
    if checkpoint.generation_config is not None:
        model.generation_config = _generation_config(checkpoint)
    return model.eval()


def _generation_config(checkpoint: Checkpoint) -> GenerationConfig:
    try:
        return GenerationConfig.from_dict(checkpoint.generation_config)
    except (ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{checkpoint.source_id}: transformers refuses its generation_config.json ({reason.rstrip('.')}); correct "
            "that file, or remove it"
        ) from error


def _with_end(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the special tokens of its tokenizer where its files name no end of a text."""
    if checkpoint.config.eos_token_id is not None:
        return checkpoint
    try:
        return with_tokenizer(checkpoint, option=None)
    except CheckpointError as error:  # a model runs on ids, too
        logger.warning("%s; until then the model does not know which token ends a text", error)
        return checkpoint


def _dtype(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> torch.dtype:
    kept = checkpoint.family.keeps_fp32(checkpoint.config, name)
    return torch.promote_types(dtype, torch.float32) if kept else dtype
