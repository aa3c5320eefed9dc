"""What importance does to a memory in which keys collide: one fact written often, then others over part of its key.

    python experiments/framework/collisions.py -o docs/framework.png

Every token writes a pair of key and value. The first `OFTEN` write the same pair, the fact; each later one writes a new
pair whose key lies on the last `SHARED` of the fact's `CHANNELS` channels. All memories see the same tokens with the
same decay and the same write gate. A reading is off by the sine of its angle to the value that was written: its
length does not count, since a gated norm follows. No model is trained: the picture shows the rules, not a gain.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch
from bayesian_filter import AFTER, BEFORE, FULL, RESET, bayesian_filter
from torch import Tensor

matplotlib.use("Agg")
from matplotlib import pyplot as plt

CHANNELS, SHARED, OFTEN, OTHERS = 16, 8, 12, 48
TOKENS = OFTEN + OTHERS
DECAY, WRITE = 0.98, 0.5
SUM = "sum"
MEMORIES = {
    SUM: "sum (Mamba2)",
    RESET: "delta rule (Gated DeltaNet)",
    BEFORE: "importance (Palimpsa)",
    AFTER: "delta rule with importance",
    FULL: "full precision (MesaNet)",
}
OLD, NEW = "the fact", "the newest pair"


def draw(seed: int) -> tuple[Tensor, Tensor]:
    """Unit keys [T, N] and values [T, N]."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(TOKENS, CHANNELS, generator=generator, dtype=torch.float64) for _ in range(2))
    keys[:OFTEN], values[:OFTEN] = keys[0].clone(), values[0].clone()
    keys[OFTEN:, : CHANNELS - SHARED] = 0
    return keys / keys.norm(dim=1, keepdim=True), values


def readings(memory: str, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """What a memory gives for the query of each token once that token is written, [T, N]."""
    if memory == SUM:
        distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
        return (queries @ keys.T * DECAY**distance).tril() @ values
    return bayesian_filter(queries, keys, values, *gates(), memory)[0]


def gates() -> tuple[Tensor, Tensor]:
    """Decay and precision of every token."""
    return torch.full((TOKENS,), DECAY).double(), torch.full((TOKENS,), WRITE / (1 - WRITE)).double()


def sines(found: Tensor, wanted: Tensor) -> Tensor:
    """Sine of the angle between rows."""
    return (1 - torch.cosine_similarity(found, wanted, dim=1).square()).clamp(min=0).sqrt()


def errors(memory: str, draws: int) -> dict[str, Tensor]:
    """Means over draws after each token, [T], of the fact and of the pair just written."""
    found = {OLD: [], NEW: []}
    for seed in range(draws):
        keys, values = draw(seed)
        fact = keys[0].expand_as(keys), values[0].expand_as(values)
        for what, (queries, wanted) in {OLD: fact, NEW: (keys, values)}.items():
            found[what].append(sines(readings(memory, queries, keys, values), wanted))
    return {what: torch.stack(each).mean(0) for what, each in found.items()}


def plot(found: dict[str, dict[str, Tensor]], draws: int, path: Path) -> None:
    """The two errors by memory, and the importance of each key channel in one draw."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    for panel, what in zip(axes, (OLD, NEW), strict=False):
        for memory, label in MEMORIES.items():
            panel.plot(range(1, TOKENS + 1), found[memory][what], label=label)
        panel.axvline(OFTEN + 0.5, color="gray", linewidth=0.8, linestyle=":")
        panel.set(title=f"Reading {what}", xlabel="tokens written", ylim=(-0.03, 1.03))
    axes[0].set_ylabel(f"sine of the angle to its value,\nmean of {draws} draws")
    axes[0].text(OFTEN, 0.97, "fact ", ha="right", va="top", color="gray")
    axes[0].text(OFTEN + 1, 0.97, " colliding pairs", va="top", color="gray")
    axes[1].legend(fontsize=8, loc="lower right")
    keys, values = draw(0)
    importance = bayesian_filter(keys, keys, values, *gates(), BEFORE)[1]
    extent = (0.5, TOKENS + 0.5, CHANNELS + 0.5, 0.5)
    image = axes[2].imshow(importance.T, aspect="auto", extent=extent, interpolation="nearest")
    axes[2].axhline(CHANNELS - SHARED + 0.5, color="white", linewidth=0.8, linestyle=":")
    axes[2].set(title="Importance by key channel, one draw", xlabel="tokens written", ylabel="key channel")
    figure.colorbar(image, ax=axes[2], label="I (prior 1)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Draws, and prints the last errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="the picture, a PNG")
    parser.add_argument("--draws", type=int, default=100)
    options = parser.parse_args(argv)
    found = {memory: errors(memory, options.draws) for memory in MEMORIES}
    plot(found, options.draws, options.output)
    for memory, label in MEMORIES.items():
        old, new = (found[memory][what][-1].item() for what in (OLD, NEW))
        print(f"{label:28}  {OLD} {old:.2f}  {NEW} {new:.2f}")


if __name__ == "__main__":
    main()
