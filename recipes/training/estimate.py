"""What a fine-tuning run will need, from the sizes of the model alone, before anything starts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...base.console import human_bytes, human_count, human_seconds
from ...mixers.geometry import GateSpec
from ...surgery.checkpoint.checkpoint import Checkpoint
from ...surgery.families.base import Site
from .optim import is_new
from .recipe import CHUNK_BYTES, DataRecipe, Recipe

TRAINED_BYTES = 16
"""A trained parameter: fp32 weight, gradient and two moments. Under bf16 its rounded copy comes on top."""

ASSUMED_FLOPS = 2e14
"""A quarter of a current data-center GPU's bf16 rate, a second: what such models reach in training, roughly."""


@dataclass(frozen=True)
class TrainingEstimate:
    """Memory of one process without sharding, and work.

    Attributes:
        trained: parameters that train, adapters included.
        frozen: parameters that do not.
        state_bytes: weights, gradients, optimizer.
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
    sites = _sites(checkpoint, set(checkpoint.palimpsa_layers if layers is None else layers))
    shapes = _shapes(checkpoint, sites)
    trained = _trained(shapes, recipe, sites)
    total = _count(shapes.values())
    frozen = total - (_new(shapes) if recipe.mode in ("lora", "qlora") else trained)
    short = recipe.precision == "bf16"
    frozen_bytes = frozen * (2 if short else 4)
    if recipe.mode == "qlora":
        quantized = _count(shape for name, shape in shapes.items() if name.endswith("in_proj.weight"))
        frozen_bytes -= round(quantized * 1.45)  # 4 bits and a scale for 64 of them, instead of 16
    steps = recipe.total_steps()
    tokens = sum(recipe.batch_size * recipe.data.seq_len_at(step, steps) for step in range(steps))
    # Forward 2, backward of activations 2, backward of weights 2 a parameter and token.
    work = 4 * total + 2 * trained + (2 * total if recipe.gradient_checkpointing else 0)
    return TrainingEstimate(
        trained=trained,
        frozen=frozen,
        state_bytes=trained * (TRAINED_BYTES + 2 * short) + frozen_bytes,
        activation_bytes=_activations(sites, recipe),
        tokens=tokens,
        flops=float(work) * tokens,
    )


def _sites(checkpoint: Checkpoint, swapped: set[int]) -> list[Site]:
    """The mixers as they will be: those that are still to be swapped get the usual gate."""
    found = []
    for layer, site in checkpoint.sites.items():
        usual = GateSpec.complete(site.geometry.hidden_size, site.geometry.gate_channels)
        found.append(replace(site, gate=(checkpoint.config.gate or usual) if layer in swapped else None))
    return found


def _shapes(checkpoint: Checkpoint, sites: Sequence[Site]) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters by name, those of layers that are still to be swapped included."""
    shapes = {name: entry.shape for name, entry in checkpoint.tensors.items()}
    for site in sites:
        whole = {name: shape for name, shape in site.shapes().items() if name not in checkpoint.parts}
        shapes = whole | shapes
    return shapes


def _count(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))


def _new(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return _count(shape for name, shape in shapes.items() if is_new(name))


def _trained(shapes: Mapping[str, tuple[int, ...]], recipe: Recipe, sites: Sequence[Site]) -> int:
    if recipe.mode == "full":
        return _count(shapes.values())
    if recipe.mode == "new+swapped":
        parts = tuple(f"{place}." for site in sites if site.gate for place in (site.norm, site.module))
        return _count(shape for name, shape in shapes.items() if name.startswith(parts))
    if recipe.mode == "new":
        return _new(shapes)
    endings = tuple(f".{target}.weight" for target in recipe.lora.targets)
    matrices = [shape for name, shape in shapes.items() if f".{name}".endswith(endings)]
    return _new(shapes) + recipe.lora.rank * sum(sum(shape) for shape in matrices)


def _activations(sites: Sequence[Site], recipe: Recipe) -> int:
    """Bytes kept for the backward pass of one micro-batch, and the logits of one chunk with their gradient."""
    element = 2 if recipe.precision == "bf16" else 4
    widths = [site.geometry.hidden_size for site in sites]
    layers = [_layer_activations(site, element) for site in sites]
    tokens = recipe.micro_batch_size * recipe.data.seq_len
    a_token = sum(layers)
    if recipe.gradient_checkpointing:
        # What enters a block, one block at work, and the outputs of scans, which do not run again.
        a_token = 4 * sum(widths) + max(layers) + element * sum(site.geometry.inner_size for site in sites if site.gate)
    return tokens * a_token + 3 * CHUNK_BYTES


def _layer_activations(site: Site, element: int) -> int:
    """Bytes a token; residual and norms in fp32, projection, convolution, gate and output in the type of products."""
    geometry = site.geometry
    width, inner = geometry.hidden_size, geometry.inner_size
    source = 12 * width + element * (2 * (inner + geometry.conv_channels) + 4 * inner) + 8 * inner
    return source + (4 * geometry.num_heads * site.gate.groups + element * inner if site.gate else 0)


SUMMARY_TOKENS = 100_000_000


def estimate_rows(checkpoint: Checkpoint, layers: Sequence[int]) -> list[tuple[str, str, str, str]]:
    """(mode, parameters that train, memory, time) of usual ways to fine-tune a plan, for a table.

    Sequences of 2,048 tokens one at a time, bf16, blocks recomputed, `SUMMARY_TOKENS` of text.
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
