"""Configuration of a causal language model of Palimpsa-D layers."""

from __future__ import annotations

from transformers import PreTrainedConfig

from ...base.errors import UsageError
from ...mixers.geometry import GateSpec, checked_gate
from ...mixers.palimpsa_d import PalimpsaDGeometry


class PalimpsaDConfig(PreTrainedConfig):
    """Sizes of the authors' 170M model by default; every layer is Palimpsa-D, without an MLP.

    Args:
        num_heads: heads of values; `n_groups` heads of queries and keys divide them, None for as many.
        head_dim: channels of a value; `state_size` those of a key.
        beta_rank: rank R of the projection behind beta; None for hidden_size / 16.
        beta_groups: groups of channels in a head that share one beta; None for head_dim, as the authors have it.
        beta_scale_form: "softplus", the authors', or "abs", see `Metaplasticity`.
        train_prior: whether log_prior is trained; the authors keep it at 0.
        vocab_size: rows of the embedding, the padding of the vocabulary included.
        time_step_min: with `time_step_max` and `time_step_floor`, of the initial step sizes alone.
        layer_types: one "linear_attention" a layer, which tells the cache of transformers what to hold.

    Raises:
        UsageError: naming the key and the bound it breaks.
    """

    model_type = "palimpsa_d"

    vocab_size: int = 32000
    hidden_size: int = 768
    num_hidden_layers: int = 19
    num_heads: int = 16
    head_dim: int = 48
    state_size: int = 48
    n_groups: int | None = None
    conv_kernel: int = 4
    hidden_act: str = "silu"
    layer_norm_epsilon: float = 1e-5
    residual_in_fp32: bool = True
    rescale_prenorm_residual: bool = True
    initializer_range: float = 0.02
    time_step_min: float = 0.001
    time_step_max: float = 0.1
    time_step_floor: float = 1e-4
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    beta_rank: int | None = None
    beta_groups: int | None = None
    beta_scale_form: str = "softplus"
    train_prior: bool = False
    layer_types: list[str] | None = None

    def __post_init__(self, **kwargs):
        self.n_groups = self.num_heads if self.n_groups is None else self.n_groups
        said = {key: getattr(self, key) for key in GateSpec.KEYS}
        for key, value in GateSpec.complete(self.hidden_size, self.head_dim, **said).keys().items():
            setattr(self, key, value)
        self.layer_types = ["linear_attention"] * self.num_hidden_layers
        if self.hidden_act not in ("silu", "swish"):
            raise UsageError(
                f"config: hidden_act is {self.hidden_act!r}; Palimpsa-D has silu and nothing else is supported"
            )
        checked_gate(self.gate, self.mixer_geometry())
        super().__post_init__(**kwargs)

    def mixer_geometry(self) -> PalimpsaDGeometry:
        """The sizes that every mixer of this model is built from."""
        sizes = self.hidden_size, self.num_heads, self.head_dim, self.n_groups, self.state_size
        return PalimpsaDGeometry(*sizes, self.conv_kernel, self.layer_norm_epsilon)

    @property
    def gate(self) -> GateSpec:
        """The importance gate of every layer."""
        return GateSpec.of(self)
