"""What a fine-tuning run will need, from the sizes of the model alone, before anything starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...base.console import human_bytes, human_count, human_seconds
from ...surgery.checkpoint.checkpoint import Checkpoint
from .optim import is_new
from .recipe import CHUNK_BYTES, DataRecipe, Recipe

TRAINED_BYTES = 16
"""A trained parameter: fp32 weight, gradient and two moments. Under bf16 its rounded copy comes on top."""

ASSUMED_FLOPS = 2e14
"""A quarter of a current data-centre GPU's bf16 rate, a second: what such models reach in training, roughly."""


@dataclass(frozen=True)
class TrainingEstimate:
    """Memory of one process without sharding, and work.

    Attributes:
        trained: parameters that train, adapters included.
        frozen: parameters that do not.
        state_bytes: weights, gradients, optimiser.
        activation_bytes: of one micro-batch, kept for the backward pass; a rough figure.
        tokens: read in the whole run.
        flops: of the whole run, recomputation included.
    """

    trained: int
    frozen: int
    state_bytes: int
    activation_bytes: int
    tokens: int
    flops: float

    @property
    def bytes(self) -> int:
        return self.state_bytes + self.activation_bytes

    def seconds(self, flops_per_second: float = ASSUMED_FLOPS) -> float:
        """Of one GPU at the rate given; several share it."""
        return self.flops / flops_per_second


def estimate(checkpoint: Checkpoint, recipe: Recipe, layers: Sequence[int] | None = None) -> TrainingEstimate:
    """Memory and work of a recipe on a model, or on a source as it will be when `layers` are swapped.

    Args:
        checkpoint: the model, converted or not.
        recipe: what would be run.
        layers: swapped layers; None for those of the checkpoint.
    """
    config = checkpoint.config
    swapped = set(checkpoint.palimpsa_layers if layers is None else layers)
    counts = _counts(checkpoint, swapped)
    trained = _trained(counts, recipe, config, swapped)
    total = sum(counts.values())
    frozen = total - trained if recipe.mode not in ("lora", "qlora") else total - _new(counts)
    short = recipe.precision == "bf16"
    frozen_bytes = frozen * (2 if short else 4)
    if recipe.mode == "qlora":
        quantised = sum(number for name, number in counts.items() if name.endswith("in_proj.weight"))
        frozen_bytes -= round(quantised * 1.45)  # 4 bits and a scale for 64 of them, instead of 16
    steps = recipe.total_steps()
    tokens = sum(recipe.batch_size * recipe.data.seq_len_at(step, steps) for step in range(steps))
    # Forward 2, backward of activations 2, backward of weights 2 a parameter and token.
    work = 4 * total + 2 * trained + (2 * total if recipe.gradient_checkpointing else 0)
    return TrainingEstimate(
        trained=trained,
        frozen=frozen,
        state_bytes=trained * (TRAINED_BYTES + 2 * short) + frozen_bytes,
        activation_bytes=_activations(config, recipe, swapped),
        tokens=tokens,
        flops=float(work) * tokens,
    )


def _counts(checkpoint: Checkpoint, swapped: set[int]) -> dict[str, int]:
    """Parameters by name; a layer that is still to be swapped gets its new ones."""
    counts = {name: math.prod(entry.shape) for name, entry in checkpoint.tensors.items()}
    config, width = checkpoint.config, checkpoint.config["hidden_size"]
    rank = config.get("beta_rank") or max(1, width // 16)
    groups = config.get("beta_groups") or config["head_dim"]
    for layer in swapped:
        prefix = f"backbone.layers.{layer}.mixer.metaplasticity"
        counts.setdefault(f"{prefix}.beta_down.weight", rank * width)
        counts.setdefault(f"{prefix}.beta_up.weight", rank * config["num_heads"] * groups)
        counts.setdefault(f"{prefix}.beta_scale", config["num_heads"])
        counts.setdefault(f"{prefix}.log_prior", config["num_heads"])
    return counts


def _new(counts: Mapping[str, int]) -> int:
    return sum(number for name, number in counts.items() if is_new(name))


def _trained(counts: Mapping[str, int], recipe: Recipe, config: Mapping[str, Any], swapped: set[int]) -> int:
    if recipe.mode == "full":
        return sum(counts.values())
    if recipe.mode == "new+swapped":
        parts = tuple(f".layers.{layer}." for layer in swapped)
        return sum(number for name, number in counts.items() if any(part in name for part in parts))
    if recipe.mode == "new":
        return _new(counts)
    inner = config["num_heads"] * config["head_dim"]
    outputs = {
        "in_proj": 2 * inner + 2 * config["n_groups"] * config["state_size"] + config["num_heads"],
        "out_proj": inner,
    }
    sizes = sum(config["hidden_size"] + outputs.get(target, inner) for target in recipe.lora.targets)
    return _new(counts) + recipe.lora.rank * sizes * config["num_hidden_layers"]


def _activations(config: Mapping[str, Any], recipe: Recipe, swapped: set[int]) -> int:
    """Bytes kept for the backward pass of one micro-batch, and the logits of one chunk with their gradient."""
    width, inner = config["hidden_size"], config["num_heads"] * config["head_dim"]
    keys = config["n_groups"] * config["state_size"]
    element = 2 if recipe.precision == "bf16" else 4
    groups = config.get("beta_groups") or config["head_dim"]
    # Residual and norms in fp32; projection, convolution, gate and output in the type of the products.
    source = 12 * width + element * (2 * (2 * inner + 2 * keys) + 4 * inner) + 8 * inner
    extra = 4 * config["num_heads"] * groups + element * inner
    layers = [source + (extra if layer in swapped else 0) for layer in range(config["num_hidden_layers"])]
    tokens = recipe.micro_batch_size * recipe.data.seq_len
    a_token = sum(layers)
    if recipe.gradient_checkpointing:
        # What enters a block, one block at work, and the outputs of scans, which do not run again.
        a_token = 4 * width * len(layers) + max(layers) + element * inner * len(swapped)
    return tokens * a_token + 3 * CHUNK_BYTES


SUMMARY_TOKENS = 100_000_000


def estimate_rows(checkpoint: Checkpoint, layers: Sequence[int]) -> list[tuple[str, str, str, str]]:
    """(mode, parameters that train, memory, time) of usual ways to fine-tune a plan, for a table.

    Windows of 2,048 tokens one at a time, bf16, blocks recomputed, `SUMMARY_TOKENS` of text.
    """
    rows = []
    for mode in ("full", "new+swapped", "lora"):
        recipe = Recipe(
            mode=mode,
            tokens=SUMMARY_TOKENS,
            batch_size=8,
            precision="bf16",
            gradient_checkpointing=True,
            data=DataRecipe(seq_len=2048),
        )
        found = estimate(checkpoint, recipe, layers)
        rows.append((mode, human_count(found.trained), human_bytes(found.bytes), human_seconds(found.seconds())))
    return rows
