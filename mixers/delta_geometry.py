"""The sizes of a layer of a Gated DeltaNet, whose projections every family cuts up in its own way."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from .geometry import GATE, GateSpec, HeadGeometry


@dataclass(frozen=True)
class DeltaGeometry(HeadGeometry):
    """What the stages ask of such a layer; attributes are called as in `MixerGeometry`.

    Attributes:
        tensors: name and shape of each of its tensors, in the order of its class.
    """

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    use_bias: ClassVar[bool] = False
    use_conv_bias: ClassVar[bool] = False
    time_step_limit: ClassVar[tuple[float, float]] = (0.0, math.inf)
    gate_channels: ClassVar[int] = 1
    """An importance of their own for the values of a head would be a linear system for each of them."""

    @property
    def conv_channels(self) -> int:
        """Channels the convolution runs over: q, k and v, so 2 G N + H P."""
        return self.inner_size + 2 * self.n_groups * self.state_size

    def shapes(self, gate: GateSpec | None = None) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the layer's parameters in the order of a file, those of its gate included."""
        new = {} if gate is None else gate.shapes(self.hidden_size, self.num_heads)
        return {**dict(self.tensors), **{f"{GATE}.{name}": shape for name, shape in new.items()}}
