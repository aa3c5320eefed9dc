"""The sizes of one mixer and of its importance gate, apart from any model's config and from torch.

Who opens, plans, writes or estimates a model takes names, shapes and types of a mixer's tensors from here, without
importing a model class. The modules are built from the same numbers, and a test holds them to what is said here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ..base.errors import UsageError

SCALE_FORMS = ("abs", "softplus")
GATE = "metaplasticity"
"""Name of the module, in a swapped mixer, that holds every parameter which surgery adds."""

MIXER_FP32, GATE_FP32 = ("A_log", "dt_bias", "D"), ("beta_scale", "log_prior")
"""Kept and stored in fp32 whatever the rest is in: decays over thousands of tokens amplify the rounding of these."""

_FP32_ENDINGS = (*(f".mixer.{name}" for name in MIXER_FP32), *(f".{GATE}.{name}" for name in GATE_FP32))
FP32_NAMES = tuple(ending[1:] for ending in _FP32_ENDINGS)
"""As transformers' `_keep_in_fp32_modules_strict` wants them."""


def keeps_fp32(name: str) -> bool:
    """Whether the parameter of this full name is kept in fp32 whatever the rest of its model is in."""
    return f".{name}".endswith(_FP32_ENDINGS)


@dataclass(frozen=True)
class GateSpec:
    """The importance gate of the swapped layers of a model: one object from the plan to the module.

    In files its fields have the names of `KEYS`; the parameters of its module are called as in `TENSORS`.

    Attributes:
        rank: R, of the projection behind beta.
        groups: g; the value channels of a head are split in this many groups that share one beta.
        scale_form: "abs" or "softplus", see `Metaplasticity`.
        train_prior: whether `log_prior` is trained.
    """

    rank: int
    groups: int
    scale_form: str
    train_prior: bool

    KEYS: ClassVar = ("beta_rank", "beta_groups", "beta_scale_form", "train_prior")
    TENSORS: ClassVar = ("beta_down.weight", "beta_up.weight", "beta_scale", "log_prior")

    @classmethod
    def complete(cls, hidden_size: int, channels: int, **said: Any) -> GateSpec:
        """A gate from what was said of `KEYS`; None is the default: a rank of D / 16, an importance per channel.

        `channels` of a head may have one of their own: its head_dim, or 1 where a head's values share theirs.
        """
        usual = dict(zip(cls.KEYS, (max(1, hidden_size // 16), channels, "abs", True), strict=True))
        return cls(*(usual | {key: value for key, value in said.items() if value is not None}).values())

    @classmethod
    def of(cls, holder: Any) -> GateSpec:
        """The gate of a plan or a config, whose attributes have the names of `KEYS`."""
        return cls(*(getattr(holder, key) for key in cls.KEYS))

    def keys(self) -> dict[str, Any]:
        """The fields under their names in files."""
        return dict(zip(self.KEYS, (getattr(self, field.name) for field in fields(self)), strict=True))

    def misfits(self, hidden_size: int, channels: int) -> Iterator[tuple[str, str]]:
        """The keys that a mixer of these sizes cannot have, each with what is wrong; `channels` as in `complete`."""
        if self.rank < 1:
            yield "beta_rank", f"{self.rank} is less than 1; choose a larger rank"
        if self.rank > hidden_size:
            yield "beta_rank", f"{self.rank} is more than hidden_size {hidden_size}; choose a smaller rank"
        if channels == 1 and self.groups != 1:
            yield "beta_groups", f"{self.groups} is not 1, but all values of a head share one importance here; choose 1"
        elif self.groups < 1 or channels % self.groups:
            yield "beta_groups", f"{self.groups} does not divide head_dim {channels}; choose a divisor"
        if self.scale_form not in SCALE_FORMS:
            yield "beta_scale_form", f"{self.scale_form!r} is none of {', '.join(SCALE_FORMS)}; choose one of them"

    def shapes(self, hidden_size: int, num_heads: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the parameters of the module `GATE`, in the order of a file."""
        shapes = (self.rank, hidden_size), (num_heads * self.groups, self.rank), (num_heads,), (num_heads,)
        return dict(zip(self.TENSORS, shapes, strict=True))


@dataclass(frozen=True)
class HeadGeometry:
    """The sizes that mixers of every kind have.

    Attributes:
        num_heads: H, heads of values.
        head_dim: P, channels of a value.
        n_groups: G, heads of queries and keys; value head i uses group i // (H / G).
        state_size: N, channels of a key.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    n_groups: int
    state_size: int
    conv_kernel: int

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "head_dim", "n_groups", "state_size"):
            self._check_size(name)
        if self.conv_kernel < 2:
            raise UsageError(f"config: conv_kernel is {self.conv_kernel}; it must be at least 2")
        if self.num_heads % self.n_groups:
            raise UsageError(f"config: n_groups ({self.n_groups}) must divide num_heads ({self.num_heads})")

    def _check_size(self, name: str) -> None:
        if getattr(self, name) < 1:
            raise UsageError(f"config: {name} is {getattr(self, name)}; it must be at least 1")

    @property
    def inner_size(self) -> int:
        """Value channels of all heads, H P."""
        return self.num_heads * self.head_dim

    @property
    def gate_channels(self) -> int:
        """How many channels of a head may have an importance of their own: all, P, unless a kind says otherwise."""
        return self.head_dim


@dataclass(frozen=True)
class MixerGeometry(HeadGeometry):
    """The sizes of a source's mixer: everything that it needs to know to build its tensors and run.

    Attributes:
        time_step_limit: lower and upper bound of the step size d_t after the softplus; `inf` for none.
        chunk_size: tokens a chunk of the plain Mamba2 scan.
    """

    use_bias: bool
    use_conv_bias: bool
    norm_eps: float
    time_step_limit: tuple[float, float]
    chunk_size: int

    def __post_init__(self) -> None:
        self._check_size("chunk_size")
        super().__post_init__()
        low, high = self.time_step_limit
        if not 0.0 <= low <= high:
            raise UsageError(
                f"config: time_step_limit is [{low}, {high}]; it must be two numbers from 0 on, the lower first"
            )

    @classmethod
    def of(cls, config: Any) -> MixerGeometry:
        """From a config with the names of transformers' Mamba2Config."""
        read = {field.name: field.name for field in fields(cls)} | {"norm_eps": "layer_norm_epsilon"}
        values = {name: getattr(config, key) for name, key in read.items()}
        return cls(**{**values, "time_step_limit": tuple(values["time_step_limit"])})

    @property
    def conv_channels(self) -> int:
        """Channels the convolution runs over: x, B and C, so H P + 2 G N."""
        return self.inner_size + 2 * self.n_groups * self.state_size

    @property
    def projection_sizes(self) -> tuple[int, int, int]:
        """Sizes of the three parts of the input projection: z, then x B C, then dt."""
        return self.inner_size, self.conv_channels, self.num_heads

    @property
    def projection_size(self) -> int:
        """Rows of `in_proj.weight`."""
        return sum(self.projection_sizes)

    def shapes(self, gate: GateSpec | None = None) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a mixer's parameters in the order of a file, those of its gate included."""
        heads = (self.num_heads,)
        shapes = {
            "in_proj.weight": (self.projection_size, self.hidden_size),
            "in_proj.bias": (self.projection_size,),
            "conv1d.weight": (self.conv_channels, 1, self.conv_kernel),
            "conv1d.bias": (self.conv_channels,),
            **dict.fromkeys(("dt_bias", "A_log", "D"), heads),
            "norm.weight": (self.inner_size,),
            "out_proj.weight": (self.hidden_size, self.inner_size),
            "out_proj.bias": (self.hidden_size,),
        }
        absent = () if self.use_bias else ("in_proj.bias", "out_proj.bias")
        absent += () if self.use_conv_bias else ("conv1d.bias",)
        shapes = {name: shape for name, shape in shapes.items() if name not in absent}
        new = {} if gate is None else gate.shapes(self.hidden_size, self.num_heads)
        return shapes | {f"{GATE}.{name}": shape for name, shape in new.items()}


def checked_gate(gate: GateSpec, geometry: MixerGeometry) -> GateSpec:
    """The gate; `UsageError` for one that mixers of this geometry cannot have."""
    for key, fault in gate.misfits(geometry.hidden_size, geometry.gate_channels):
        raise UsageError(f"config: {key}: {fault}")
    return gate
