"""Configuration of a Mamba2 causal language model in which any subset of mixers is Palimpsa-M.

With `attn_layer_idx` and `d_intermediate` it is also that of mamba_ssm's hybrids, under the names of mamba_ssm.
"""

from __future__ import annotations

import math

from transformers import PreTrainedConfig

from ...base.errors import UsageError
from ...mixers.attention_geometry import AttentionGeometry
from ...mixers.geometry import GateSpec, MixerGeometry, checked_gate
from ...mixers.mamba2_keys import Mamba2Keys

_LARGEST_FP32 = 3.4028234663852886e38


class PalimpsaMamba2Config(Mamba2Keys, PreTrainedConfig):
    """The field names of the Mamba2 of transformers, see `Mamba2Keys`, and what the swapped layers add.

    `palimpsa_layers=[]` is a plain Mamba2: the same classes load and run a source model. The gated norm always runs
    over each group's channels (mamba_ssm's semantics), and H P need not be spelled out: `num_heads * head_dim` must
    equal `expand * hidden_size`.

    Args:
        palimpsa_layers: indices of the swapped layers; kept sorted.
        beta_rank: rank R of the projection behind beta; None for hidden_size / 16.
        beta_groups: groups of channels in a head that share one beta; None for head_dim, the form of the paper.
        beta_scale_form: "abs" or "softplus", see `Metaplasticity`.
        train_prior: whether log_prior is trained.
        attn_layer_idx: layers that are attention instead of a mixer; kept sorted.
        attn_cfg: their settings, see `AttentionGeometry`; completed by mamba_ssm's defaults.
        d_intermediate: hidden channels of the MLP behind every mixer and attention, 0 for none.
        layer_types: one "linear_attention" a mixer, one "hybrid" an attention, whose states are keys, values and the
            convolution's. It is written to config.json on purpose: there it tells the
            cache of transformers what to hold, and it makes the stock Mamba2 class, which would drop the new
            tensors, stop with an error.

    Raises:
        UsageError: naming the key and the bound it breaks.
    """

    model_type = "palimpsa_mamba2"

    rescale_prenorm_residual: bool = True
    use_cache: bool = True
    palimpsa_layers: list[int] | tuple[int, ...] | None = None
    beta_rank: int | None = None
    beta_groups: int | None = None
    beta_scale_form: str = "abs"
    train_prior: bool = True
    attn_layer_idx: list[int] | tuple[int, ...] | None = None
    attn_cfg: dict | None = None
    d_intermediate: int = 0
    layer_types: list[str] | None = None

    def __post_init__(self, **kwargs):
        self.palimpsa_layers = _checked_layers("palimpsa_layers", self.palimpsa_layers, self.num_hidden_layers)
        self.attn_layer_idx = _checked_layers("attn_layer_idx", self.attn_layer_idx, self.num_hidden_layers)
        self._check_attention()
        said = {key: getattr(self, key) for key in GateSpec.KEYS}
        for key, value in GateSpec.complete(self.hidden_size, self.head_dim, **said).keys().items():
            setattr(self, key, value)
        low, high = self.time_step_limit if self.time_step_limit is not None else (0.0, math.inf)
        # Steps are fp32: a bound from its largest number on, which some write for want of an infinity, is none.
        high = math.inf if high is None or high >= _LARGEST_FP32 else float(high)
        self.time_step_limit = [float(low or 0.0), high]
        attention = set(self.attn_layer_idx)
        self.layer_types = [
            "hybrid" if layer in attention else "linear_attention" for layer in range(self.num_hidden_layers)
        ]
        if self.hidden_act not in ("silu", "swish"):
            raise UsageError(
                f"config: hidden_act is {self.hidden_act!r}; Mamba2 has silu and nothing else is supported"
            )
        if self.num_heads * self.head_dim != self.expand * self.hidden_size:
            raise UsageError(
                f"config: num_heads * head_dim is {self.num_heads} * {self.head_dim} = "
                f"{self.num_heads * self.head_dim} but expand * hidden_size is {self.expand} * {self.hidden_size} = "
                f"{self.expand * self.hidden_size}; they must be equal"
            )
        checked_gate(self.gate, self.mixer_geometry())
        super().__post_init__(**kwargs)

    def _check_attention(self) -> None:
        both = sorted({*self.palimpsa_layers} & {*self.attn_layer_idx})
        if both:
            raise UsageError(f"config: palimpsa_layers names layer {both[0]}, which is attention; leave it out")
        if self.attn_layer_idx and len(self.attn_layer_idx) == self.num_hidden_layers:
            raise UsageError("config: attn_layer_idx names every layer; at least one must be a Mamba2 mixer")
        if self.d_intermediate < 0:
            raise UsageError(f"config: d_intermediate is {self.d_intermediate}; it must be 0 (no MLP) or more")
        if not self.attn_layer_idx:
            self.attn_cfg = None
            return
        for key, fault in AttentionGeometry.faults(self.hidden_size, self.attn_cfg or {}):
            raise UsageError(f"config: attn_cfg.{key}: {fault}")
        self.attn_cfg = self.attention_geometry().settings()

    def attention_geometry(self) -> AttentionGeometry:
        """The sizes of every attention layer of this model, which must have some."""
        return AttentionGeometry.complete(self.hidden_size, self.attn_cfg)

    def mixer_geometry(self) -> MixerGeometry:
        """The sizes that every mixer of this model is built from."""
        return MixerGeometry.of(self)

    @property
    def gate(self) -> GateSpec:
        """The importance gate of every swapped layer."""
        return GateSpec.of(self)


def _checked_layers(key: str, layers, count: int) -> list[int]:
    """Sorted layer indices; `UsageError` for one that is out of range or there twice."""
    chosen = sorted(int(layer) for layer in (layers or ()))
    for layer in chosen:
        if not 0 <= layer < count:
            raise UsageError(f"config: {key} names layer {layer}; this model has layers 0 to {count - 1}")
    if len(set(chosen)) != len(chosen):
        raise UsageError(f"config: {key} names a layer twice ({chosen}); name each once")
    return chosen
