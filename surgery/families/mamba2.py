"""Models of Mamba2 blocks alone: one norm and one mixer per layer, any of which may be swapped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ...base.errors import CheckpointError
from ...mixers.geometry import GateSpec, MixerGeometry
from .base import Site

EMBEDDING, HEAD = "backbone.embeddings.weight", "lm_head.weight"


@dataclass(frozen=True)
class Mamba2Config:
    """The arguments of `PalimpsaMamba2Config` that a checkpoint decides, with the defaults of that class.

    Attributes:
        vocab_size: the rows that the embedding has.
        palimpsa_layers: the layers already swapped, sorted.
        gate: the importance gate of those; None where the config says nothing of one.
    """

    vocab_size: int = 50288
    hidden_size: int = 768
    num_hidden_layers: int = 24
    num_heads: int = 24
    head_dim: int = 64
    state_size: int = 128
    n_groups: int = 1
    expand: int = 2
    conv_kernel: int = 4
    chunk_size: int = 256
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    layer_norm_epsilon: float = 1e-5
    residual_in_fp32: bool = True
    initializer_range: float = 0.02
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    time_step_min: float = 0.001
    time_step_max: float = 0.1
    time_step_floor: float = 1e-4
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    palimpsa_layers: tuple[int, ...] = ()
    gate: GateSpec | None = None

    def arguments(self) -> dict[str, Any]:
        """For `PalimpsaMamba2Config`, and as config.json has them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        gate = values.pop("gate")
        return {**values, **(gate.keys() if gate else {}), "palimpsa_layers": list(self.palimpsa_layers)}


class Mamba2:
    """The family; see `base.Family`."""

    name = "mamba2"

    def config(self, where: str, keys: Mapping[str, Any]) -> Mamba2Config:
        keys = dict(keys)
        said = {key: keys.pop(key) for key in GateSpec.KEYS if key in keys}
        config = Mamba2Config(**{**keys, "palimpsa_layers": tuple(sorted(keys.get("palimpsa_layers") or ()))})
        if not said:
            return config
        gate = GateSpec.complete(config.hidden_size, config.head_dim, **said)
        for key, fault in gate.misfits(config.hidden_size, config.head_dim):
            raise CheckpointError(f"{where}:{key}: {fault}, or restore the config that was written with the weights")
        return Mamba2Config(**{**vars(config), "gate": gate})

    def sites(self, config: Mamba2Config) -> dict[int, Site]:
        geometry, swapped = MixerGeometry.of(config), set(config.palimpsa_layers)
        return {
            layer: Site(layer, f"{block}.mixer", f"{block}.norm", geometry, config.gate if layer in swapped else None)
            for layer in range(config.num_hidden_layers)
            for block in [f"backbone.layers.{layer}"]
        }

    def shapes(self, config: Mamba2Config) -> dict[str, tuple[int, ...]]:
        matrix, vector = (config.vocab_size, config.hidden_size), (config.hidden_size,)
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: matrix}
        for site in self.sites(config).values():
            shapes |= {f"{site.norm}.weight": vector, **site.shapes()}
        shapes["backbone.norm_f.weight"] = vector
        return shapes if config.tie_word_embeddings else {**shapes, HEAD: matrix}

    def model_config(self, config: Mamba2Config, **more: Any) -> Any:
        from ...modeling.palimpsa_mamba2.configuration_palimpsa_mamba2 import PalimpsaMamba2Config

        return PalimpsaMamba2Config(**config.arguments(), **more)

    def model_class(self) -> type:
        from ...modeling.palimpsa_mamba2.modeling_palimpsa_mamba2 import PalimpsaMamba2ForCausalLM

        return PalimpsaMamba2ForCausalLM


MAMBA2 = Mamba2()
