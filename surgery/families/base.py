"""What the stages know of a kind of model: where its mixers are, and which tensors it has. One file here a family.

A family is data and a few lines. How the programs that write its files call the tensors and the keys of the config is
no part of it: that differs by file, not by model, and stands in `checkpoint/` (layouts, names).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ...mixers.geometry import GATE, GateSpec, MixerGeometry


@dataclass(frozen=True)
class Site:
    """A mixer that is swapped, or may be; layers of attention or MLPs alone have none.

    Attributes:
        layer: its number in the model.
        module: path of the mixer in the model, and so what the names of its tensors begin with.
        norm: path of the norm before it.
        geometry: the sizes of the source's mixer.
        gate: of a swapped mixer, else None.
    """

    layer: int
    module: str
    norm: str
    geometry: MixerGeometry
    gate: GateSpec | None = None

    def tensor(self, name: str) -> str:
        """The full name of a tensor of the mixer, such as `A_log`."""
        return f"{self.module}.{name}"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Full names and shapes of the mixer's tensors."""
        return {self.tensor(name): shape for name, shape in self.geometry.shapes(self.gate).items()}

    def new(self, gate: GateSpec) -> dict[str, tuple[int, ...]]:
        """Full names and shapes of the tensors that a swap adds, in the order of `GateSpec.shapes`."""
        shapes = gate.shapes(self.geometry.hidden_size, self.geometry.num_heads)
        return {self.tensor(f"{GATE}.{name}"): shape for name, shape in shapes.items()}


class Config(Protocol):
    """What any stage may ask a model's config for; transformers' own configs have these names too.

    Anything else that a stage needs to know of a mixer is in the geometry of its site.
    """

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    tie_word_embeddings: bool
    palimpsa_layers: tuple[int, ...]
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None


class Family(Protocol):
    """A kind of model.

    Configs are typed and checked once, where a checkpoint is opened. `config` and `shapes` are cheap: opening does
    not wait for transformers, whose import takes longer; a family that needs a class of transformers to know its
    tensors builds it on `meta` in `shapes`. Nothing is asked of a config whose number of layers exceeds the number of
    tensors. There is no factor of the logits here, as no family that is supported has one.
    """

    name: str

    def config(self, where: str, keys: Mapping[str, Any]) -> Config:
        """The config of a checkpoint, from keys under transformers' names; `CheckpointError` names the file `where`."""

    def sites(self, config: Config) -> dict[int, Site]:
        """The mixers by layer, in order."""

    def shapes(self, config: Config) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that is stored, in the order of the files that are written."""

    def model_config(self, config: Config, **more: Any) -> Any:
        """The config as the class of the model takes it, a `PreTrainedConfig`."""

    def model_class(self) -> type:
        """The `PreTrainedModel` that runs the model, its swapped layers included."""
