"""What the stages know of a kind of model: where its mixers are, and which tensors it has.

A family is data and a few lines. How the programs that write its files call the tensors and the keys of the config is
no part of it: that differs by file, not by model, and stands in `checkpoint/` (layouts, names).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...mixers.delta_geometry import DeltaGeometry
from ...mixers.geometry import GATE, GateSpec, MixerGeometry

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True)
class Site:
    """A mixer that is swapped, or may be; layers of attention or MLPs alone have none.

    Attributes:
        layer: its number in the model.
        module: path of the mixer in the model, and so what the names of its tensors begin with.
        norm: path of the norm before it.
        geometry: the sizes of the source's mixer.
        gate: of a swapped mixer, else None.
        absent: tensors of `geometry` that the mixers of this model do without.
        norm_offset: what that norm adds to its weight.
    """

    layer: int
    module: str
    norm: str
    geometry: MixerGeometry | DeltaGeometry
    gate: GateSpec | None = None
    absent: tuple[str, ...] = ()
    norm_offset: float = 0.0

    def tensor(self, name: str) -> str:
        """The full name of a tensor of the mixer, such as `A_log`."""
        return f"{self.module}.{name}"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Full names and shapes of the mixer's tensors."""
        shapes = self.geometry.shapes(self.gate).items()
        return {self.tensor(name): shape for name, shape in shapes if name not in self.absent}

    def new(self, gate: GateSpec) -> dict[str, tuple[int, ...]]:
        """Full names and shapes of the tensors that a swap adds, in the order of `GateSpec.shapes`."""
        shapes = gate.shapes(self.geometry.hidden_size, self.geometry.num_heads)
        return {self.tensor(f"{GATE}.{name}"): shape for name, shape in shapes.items()}


class Family(Protocol):
    """A kind of model.

    Its configs are typed dataclasses, and have the names of transformers where a stage asks: the sizes of the
    model, the vocabulary, tied or not, special tokens, `palimpsa_layers`, `gate`. What else is asked of a mixer is in
    its site. Opening must not wait for transformers, so the methods import it only where a family cannot know its
    tensors without building a class on `meta`. A layout refuses more layers than tensors before any of this.

    Attributes:
        name: the `model_type` that transformers has for such a model without swapped layers.
        layouts: those that its models can be exported in, the usual one first.
        plain: what its mixers are called, and `swapped` what those that were swapped are.
        exact_only: why every start but an exact one is refused; empty where none is.
        copied: whether a conversion takes the weight files as they are and puts what is new into one more.
    """

    name: str
    layouts: tuple[str, ...]
    plain: str
    swapped: str
    exact_only: str
    copied: bool

    def config(self, where: str, keys: Mapping[str, Any]) -> Any:
        """The config of a checkpoint, from keys under transformers' names; `CheckpointError` names the file `where`."""

    def paths(self, config: Any) -> dict[int, str]:
        """The paths of the mixers in the model by layer, in order; `config` may be that of a model that runs, too."""

    def sites(self, config: Any) -> dict[int, Site]:
        """The mixers by layer, in order."""

    def kind(self, config: Any, layer: int) -> str:
        """What a layer without a mixer holds, in words that go before "layer"."""

    def shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that is stored, in the order of the files that are written."""

    def keeps_fp32(self, config: Any, name: str) -> bool:
        """Whether a tensor is kept in fp32 whatever the rest of the model is in."""

    def model_config(self, config: Any, **more: Any) -> Any:
        """The config as the class of the model takes it, a `PreTrainedConfig`."""

    def write_config(self, config: Any, folder: Path, **more: Any) -> None:
        """Writes config.json of a model whose config has these keys and `more`."""

    def model_class(self) -> type:
        """The `PreTrainedModel` that runs the model, its swapped layers included."""

    def build(self, config: Any, state: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
        """The model with the tensors `state`, which are exactly its own; `RuntimeError` where they are not."""

    def reference(self, config: Any, state: Mapping[str, Tensor]) -> Any:
        """The same without gates and in fp32, as other programs run it: what a conversion must equal."""

    def mixers(self, config: Any, layer: int) -> tuple[nn.Module, nn.Module]:
        """A layer's mixer as other programs run it, and swapped as `config` has it; parameters on `meta`."""

    def remarks(self, config: Any) -> tuple[str, ...]:
        """What a user should know of how `reference` runs the model."""
