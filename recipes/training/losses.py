"""Next-token loss of a causal LM without ever holding the logits of a whole sequence."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ...base.errors import UsageError
from ...modeling.hybrids.hosts import logits_factor
from ...modeling.palimpsa_mamba2.modeling_palimpsa_mamba2 import apply_head, head_dtype
from ..data.packing import IGNORED
from .recipe import CHUNK_BYTES


class CausalLoss(nn.Module):
    """A causal LM and its loss as one module: what Accelerate wraps, so that every backend sees one forward call.

    Args:
        model: the causal LM, or a PEFT model around one.
        backend: "chunked" (plain torch, any device), "liger" (fused kernels of liger_kernel, CUDA) or "auto".
        precision: "bf16" computes matrix products under autocast, whatever the dtype of the weights; "no" leaves
            each as it is. Autocast is entered here and not by Accelerate: FSDP would otherwise cast whole units, the
            fp32 rates included.
    """

    def __init__(self, model: nn.Module, backend: str = "auto", precision: str = "no") -> None:
        super().__init__()
        self.model = model
        self.backend = backend
        self.precision = precision

    @property
    def causal(self) -> Any:
        """The causal LM inside a PEFT model; adapters live in its modules."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def forward(
        self, input_ids: Tensor, targets: Tensor, seq_idx: Tensor | None = None, *, per_token: bool = False
    ) -> Tensor:
        """Cross-entropies in nats, fp32, of all targets that are not `IGNORED`.

        Args:
            input_ids: [B, T].
            targets: [B, T], the token after each input.
            seq_idx: [B, T] document numbers, or None.
            per_token: the loss of each target, [B, T], zero where it is ignored, instead of their sum.
        """
        with torch.autocast(input_ids.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            causal = self.causal
            # Recurrent layers take the numbers of the documents, attention their positions.
            packed = {} if seq_idx is None else {"seq_idx": seq_idx, "position_ids": document_positions(seq_idx)}
            hidden = causal.get_decoder()(input_ids=input_ids, use_cache=False, **packed)[0].flatten(0, 1)
            head, factor = causal.get_output_embeddings(), logits_factor(causal.config)
            plain = head_dtype(head) is not None  # the fused kernel reads the weights past the layer
            if plain and not per_token and resolve_loss(self.backend, hidden.device) == "liger":
                return _liger_loss(hidden if factor == 1.0 else hidden * factor, head, targets.flatten())
            losses = chunked_losses(hidden, head, targets.flatten(), factor)
            return losses.view_as(targets) if per_token else losses.sum()


def resolve_loss(backend: str, device: torch.device) -> str:
    """The form of the loss that runs on `device`.

    Raises:
        UsageError: liger was asked for by name where it cannot run.
    """
    installed = importlib.util.find_spec("liger_kernel") is not None
    if backend == "liger" and not (installed and device.type == "cuda"):
        reason = "it needs a CUDA device" if installed else "liger_kernel is not installed (palimpsa-surgery[liger])"
        raise UsageError(f"loss: liger was asked for, but {reason}; set loss=chunked or loss=auto")
    if backend == "auto":
        return "liger" if installed and device.type == "cuda" else "chunked"
    return backend


def document_positions(seq_idx: Tensor) -> Tensor:
    """The position of each token in its document, [B, T], from document numbers [B, T]; a run of equal ones is one."""
    places = torch.arange(seq_idx.shape[1], device=seq_idx.device).expand_as(seq_idx)
    first = functional.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=True)
    return places - torch.where(first, places, 0).cummax(1).values


def chunked_losses(hidden: Tensor, head: nn.Module, targets: Tensor, factor: float = 1.0) -> Tensor:
    """Cross-entropy of each row; a chunk's logits are computed, reduced, dropped, and computed again for the gradient.

    Args:
        hidden: [N, D].
        head: linear layer D -> V.
        targets: [N], `IGNORED` rows give zero.
        factor: by which the head's output is multiplied to be the logits.

    Returns:
        [N] fp32.
    """
    rows = max(1, CHUNK_BYTES // (4 * head.out_features))
    pieces = zip(hidden.split(rows), targets.split(rows), strict=True)
    if torch.is_grad_enabled():
        losses = [
            checkpoint(_chunk_losses, piece, head, target, factor, use_reentrant=False) for piece, target in pieces
        ]
    else:
        losses = [_chunk_losses(piece, head, target, factor) for piece, target in pieces]
    return torch.cat(losses)


def _chunk_losses(hidden: Tensor, head: nn.Module, targets: Tensor, factor: float) -> Tensor:
    logits = apply_head(head, hidden).float()
    logits = logits if factor == 1.0 else logits * factor
    return functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")


def _liger_loss(hidden: Tensor, head: nn.Module, targets: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else head.weight.dtype
    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="sum")
    return loss(head.weight.to(dtype), hidden.to(dtype), targets, head.bias).float()
