"""The keys of a Mamba2's config and their defaults: one owner for the model class and readers that do without it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(repr=False, eq=False)
class Mamba2Keys:
    """The names of transformers' Mamba2, and the sizes of mamba_ssm's 130M model by default.

    Attributes:
        vocab_size: rows of the embedding, the padding of the vocabulary included.
        time_step_limit: bounds of the step size in every forward pass; `time_step_min`, `time_step_max` and
            `time_step_floor` belong to initialization alone.
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
    time_step_limit: list[float] | tuple[float, ...] | None = (0.0, math.inf)
    time_step_min: float = 0.001
    time_step_max: float = 0.1
    time_step_floor: float = 1e-4
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
