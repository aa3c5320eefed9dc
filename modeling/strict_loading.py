"""Loading in which every tensor of a model must be in its folder."""

from __future__ import annotations

from ..base.errors import CheckpointError
from ..mixers.metaplasticity import Metaplasticity


class StrictLoadingMixin:
    """Before `PreTrainedModel` among the bases of a model."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """As in transformers, but a model folder that lacks a tensor is an error, never a layer of random numbers.

        Raises:
            CheckpointError: tensors of this model are missing in the folder, or the folder has importance gates for
                layers that its config does not list as swapped.
        """
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        missing = sorted(info["missing_keys"])
        if missing:
            raise CheckpointError(
                f"{pretrained_model_name_or_path}: config.json calls for tensors that are missing, {len(missing)} in "
                f"all ({_some(missing)}); convert the source again, or correct palimpsa_layers"
            )
        stray = sorted(key for key in info["unexpected_keys"] if ".metaplasticity." in key)
        if stray:
            raise CheckpointError(
                f"{pretrained_model_name_or_path}: has importance gates for layers that palimpsa_layers in config.json "
                f"does not list ({_some(stray)}); correct palimpsa_layers"
            )
        for module in model.modules():
            if isinstance(module, Metaplasticity):  # loading makes parameters anew, and all of them trainable
                module.log_prior.requires_grad_(module.spec.train_prior)
        return (model, info) if output_loading_info else model


def _some(names: list[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
