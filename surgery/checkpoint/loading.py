"""Any supported checkpoint as a running model: source layouts and converted folders, through the same accounting."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel

from ...base.console import counted
from ...base.errors import CheckpointError
from ...mixers.geometry import keeps_fp32
from .checkpoint import Checkpoint, open_checkpoint


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
        The model in eval mode. Layers that are not swapped are plain Mamba2.

    Raises:
        CheckpointError: as `open_checkpoint`, or the checkpoint's tensors are not exactly the model's.
    """
    checkpoint = src if isinstance(src, Checkpoint) else open_checkpoint(src, revision=revision, token=token)
    with torch.device("meta"):
        model = checkpoint.family.model_class()(checkpoint.family.model_config(checkpoint.config))
    slots = _parameters(model, checkpoint)
    dtype = dtype or checkpoint.dtype
    for name, (module, attribute) in slots.items():
        target = _stored_dtype(name, dtype)
        tensor = checkpoint.load(name).to(device=device, dtype=target)
        setattr(module, attribute, torch.nn.Parameter(tensor, requires_grad=getattr(module, attribute).requires_grad))
    model.tie_weights()
    model.config.dtype = dtype
    if checkpoint.generation_config is not None:
        model.generation_config = GenerationConfig.from_dict(checkpoint.generation_config)
    return model.eval()


def _stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if keeps_fp32(name) else dtype


def _parameters(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, tuple[torch.nn.Module, str]]:
    """Where each tensor of the checkpoint goes, once both sides agree on names and shapes to the last one."""
    tied = set(model._tied_weights_keys) if checkpoint.config.tie_word_embeddings else set()
    found = {}
    for path, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{attribute}"
            if name not in tied:
                found[name] = (module, attribute, tuple(parameter.shape))
    wanted = {name: shape for name, (_, _, shape) in found.items()}
    stored = {name: entry.shape for name, entry in checkpoint.tensors.items()}
    if wanted != stored:
        odd = sorted({name for name, _ in wanted.items() ^ stored.items()})
        raise CheckpointError(
            f"{checkpoint.source_id}: the model and the checkpoint differ in {counted(len(odd), 'tensor')} "
            f"({', '.join(odd[:5])}); the checkpoint was written for another version of this package"
        )
    return {name: (module, attribute) for name, (module, attribute, _) in found.items()}
