"""The shape of one mixer, apart from any model's config, so that the same mixer can later sit inside hybrid models."""

from __future__ import annotations

from dataclasses import dataclass

from ...base.errors import UsageError

SCALE_FORMS = ("abs", "softplus")


@dataclass(frozen=True)
class MixerGeometry:
    """Everything a mixer needs to know to build its tensors and run.

    Letters as in the method: H = `num_heads`, P = `head_dim`, G = `n_groups`, N = `state_size`, R = `beta_rank`.

    Attributes:
        time_step_limit: lower and upper bound of the step size d_t after the softplus; `inf` for none.
        chunk_size: tokens a chunk of the plain Mamba2 scan.
        beta_groups: value channels of a head are split in this many groups that share one beta; divides P.
        beta_scale_form: "abs" or "softplus", see `Metaplasticity`.
        train_prior: whether `log_prior` asks for a gradient.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    n_groups: int
    state_size: int
    conv_kernel: int
    use_bias: bool
    use_conv_bias: bool
    norm_eps: float
    time_step_limit: tuple[float, float]
    chunk_size: int
    beta_rank: int
    beta_groups: int
    beta_scale_form: str
    train_prior: bool

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "head_dim", "n_groups", "state_size", "chunk_size", "beta_rank"):
            if getattr(self, name) < 1:
                raise UsageError(f"config: {name} is {getattr(self, name)}; it must be at least 1")
        if self.conv_kernel < 2:
            raise UsageError(f"config: conv_kernel is {self.conv_kernel}; it must be at least 2")
        if self.num_heads % self.n_groups:
            raise UsageError(f"config: n_groups ({self.n_groups}) must divide num_heads ({self.num_heads})")
        if self.beta_groups < 1 or self.head_dim % self.beta_groups:
            raise UsageError(
                f"config: beta_groups is {self.beta_groups}; it must divide head_dim ({self.head_dim}), "
                f"and {self.head_dim} is the form of the paper"
            )
        if self.beta_scale_form not in SCALE_FORMS:
            raise UsageError(
                f"config: beta_scale_form is {self.beta_scale_form!r}; it must be one of {', '.join(SCALE_FORMS)}"
            )
        low, high = self.time_step_limit
        if not 0.0 <= low <= high:
            raise UsageError(
                f"config: time_step_limit is [{low}, {high}]; it must be two numbers from 0 on, the lower first"
            )

    @property
    def inner_size(self) -> int:
        """Value channels of all heads, H P."""
        return self.num_heads * self.head_dim

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
