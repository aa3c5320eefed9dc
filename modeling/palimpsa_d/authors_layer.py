"""Reads a Palimpsa-D layer by the names that its authors' code gives the tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...base.errors import CheckpointError
from ...mixers.geometry import GATE
from ...mixers.palimpsa_d import PalimpsaDMixer

AUTHORS = {
    "b_rank_proj.weight": f"{GATE}.beta_down.weight",
    "b_proj.weight": f"{GATE}.beta_up.weight",
    "b_scale": f"{GATE}.beta_scale",
    "Ip_log": f"{GATE}.log_prior",
}
"""The authors' names -> ours, where they differ. Mind b_proj: in a Gated DeltaNet it is the write gate."""

NO_START = (
    "a Gated DeltaNet has no exact start in it, at any gate and prior, since Palimpsa-D erases nothing along its keys; "
    "train Palimpsa-D from scratch"
)


@torch.no_grad()
def load_authors_layer(mixer: PalimpsaDMixer, tensors: Mapping[str, Tensor]) -> None:
    """Copies the tensors of one layer into `mixer`, all of them and nothing else.

    Args:
        mixer: of the layer's sizes, with one beta per channel and the softplus form of the scale, as the authors have.
        tensors: by the authors' names, without the prefix of the layer.

    Raises:
        CheckpointError: they are a Gated DeltaNet's; a tensor is missing, unknown or of another shape; or the mixer's
            gate is of another form.
    """
    if "b_proj.weight" in tensors and "b_rank_proj.weight" not in tensors:
        raise CheckpointError(
            f"these are the tensors of a Gated DeltaNet, whose b_proj is its write gate, not of Palimpsa-D: {NO_START}"
        )
    if mixer.metaplasticity.spec.scale_form != "softplus":
        raise CheckpointError(
            f"the mixer's beta_scale_form is {mixer.metaplasticity.spec.scale_form!r}; expected 'softplus', in which "
            "the authors' b_scale is stored"
        )
    named, own = {AUTHORS.get(name, name): x for name, x in tensors.items()}, mixer.state_dict()
    theirs = {ours: name for name, ours in AUTHORS.items()}
    for name in own.keys() ^ named.keys():
        fault = "is missing in" if name in own else "is not known in"
        raise CheckpointError(f"{theirs.get(name, name)} {fault} the authors' layer; expected {_listed(own, theirs)}")
    for name, x in named.items():
        if x.shape != own[name].shape:
            wanted = f"{list(own[name].shape)}{' (one row a value head)' * (name == 'dt_proj.weight')}"
            raise CheckpointError(
                f"{theirs.get(name, name)} has shape {list(x.shape)}; expected {wanted}, the sizes of the mixer"
            )
    mixer.load_state_dict(named)


def _listed(own: Mapping[str, Tensor], theirs: Mapping[str, str]) -> str:
    return ", ".join(theirs.get(name, name) for name in own)
