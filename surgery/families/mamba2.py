"""Models of our own class: one norm and one mixer per layer, any of which may be swapped.

mamba_ssm's hybrids are of this class too: some layers have attention in the mixer's place, and all may have an MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.errors import CheckpointError
from ...mixers.attention_geometry import AttentionGeometry, mlp_shapes
from ...mixers.geometry import GateSpec, MixerGeometry, keeps_fp32
from ...mixers.mamba2_keys import Mamba2Keys
from .base import Site

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

EMBEDDING, HEAD = "backbone.embeddings.weight", "lm_head.weight"


@dataclass
class Mamba2Config(Mamba2Keys):
    """The arguments of `PalimpsaMamba2Config` that a checkpoint decides.

    Attributes:
        palimpsa_layers: the layers already swapped, sorted.
        gate: the importance gate of those; None where the config says nothing of one.
        attn_layer_idx: the layers of attention, sorted.
        attention: their geometry; None without any.
        d_intermediate: hidden channels of the MLP of every layer, as the config says; 0 for none.
    """

    palimpsa_layers: tuple[int, ...] = ()
    gate: GateSpec | None = None
    attn_layer_idx: tuple[int, ...] = ()
    attention: AttentionGeometry | None = None
    d_intermediate: int = 0

    def arguments(self) -> dict[str, Any]:
        """For `PalimpsaMamba2Config`, and as config.json has them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        gate, attention = values.pop("gate"), values.pop("attention")
        hybrid = {"attn_cfg": attention.settings()} if attention else {}
        lists = {key: list(values[key]) for key in ("palimpsa_layers", "attn_layer_idx")}
        return {**values, **(gate.keys() if gate else {}), **hybrid, **lists}


class Mamba2:
    """The family; see `base.Family`."""

    name = "mamba2"
    layouts = ("mamba_ssm", "palimpsa_mamba2")
    plain, swapped, exact_only = "Mamba2", "Palimpsa-M", ""
    copied = False

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

    def paths(self, config: Any) -> dict[int, str]:
        attention = set(config.attn_layer_idx)
        layers = (layer for layer in range(config.num_hidden_layers) if layer not in attention)
        return {layer: f"backbone.layers.{layer}.mixer" for layer in layers}

    def sites(self, config: Mamba2Config) -> dict[int, Site]:
        geometry, swapped = MixerGeometry.of(config), set(config.palimpsa_layers)
        return {
            layer: Site(
                layer, path, f"{path.removesuffix('mixer')}norm", geometry, config.gate if layer in swapped else None
            )
            for layer, path in self.paths(config).items()
        }

    def kind(self, config: Mamba2Config, layer: int) -> str:
        return "attention" if layer in config.attn_layer_idx else "Mamba2"

    def shapes(self, config: Mamba2Config) -> dict[str, tuple[int, ...]]:
        matrix, vector = (config.vocab_size, config.hidden_size), (config.hidden_size,)
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: matrix}
        sites, mlp = self.sites(config), mlp_shapes(config.hidden_size, config.d_intermediate)
        for layer in range(config.num_hidden_layers):
            block = f"backbone.layers.{layer}"
            shapes[f"{block}.norm.weight"] = vector
            if layer in sites:
                shapes |= sites[layer].shapes()
            else:
                shapes |= {f"{block}.mixer.{name}": shape for name, shape in config.attention.shapes().items()}
            shapes |= {f"{block}.norm2.weight": vector} if mlp else {}
            shapes |= {f"{block}.mlp.{name}": shape for name, shape in mlp.items()}
        shapes["backbone.norm_f.weight"] = vector
        return shapes if config.tie_word_embeddings else {**shapes, HEAD: matrix}

    def keeps_fp32(self, config: Mamba2Config, name: str) -> bool:
        return keeps_fp32(name)

    def model_config(self, config: Mamba2Config, **more: Any) -> Any:
        from ...modeling.palimpsa_mamba2.configuration_palimpsa_mamba2 import PalimpsaMamba2Config

        return PalimpsaMamba2Config(**config.arguments(), **more)

    def write_config(self, config: Mamba2Config, folder: Path, **more: Any) -> None:
        self.model_config(config, **more).save_pretrained(folder)

    def model_class(self) -> type:
        from ...modeling.palimpsa_mamba2.modeling_palimpsa_mamba2 import PalimpsaMamba2ForCausalLM

        return PalimpsaMamba2ForCausalLM

    def build(self, config: Mamba2Config, state: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
        import torch

        with torch.device("meta"):
            model = self.model_class()(self.model_config(config))
        tied = model._tied_weights_keys.items() if config.tie_word_embeddings else ()
        model.load_state_dict({**state, **{name: state[other] for name, other in tied}}, strict=True, assign=True)
        model.tie_weights()
        return model

    def reference(self, config: Mamba2Config, state: Mapping[str, Tensor]) -> Any:
        import torch

        return self.build(replace(config, palimpsa_layers=()), state, torch.float32)

    def mixers(self, config: Mamba2Config, layer: int) -> tuple[nn.Module, nn.Module]:
        import torch

        from ...mixers.mixer import Mamba2Mixer, PalimpsaMixer

        site = self.sites(config)[layer]
        with torch.device("meta"):
            return Mamba2Mixer(site.geometry), PalimpsaMixer(site.geometry, site.gate)

    def remarks(self, config: Mamba2Config) -> tuple[str, ...]:
        return ()


MAMBA2 = Mamba2()
