"""Statistics of the importance I of the synapses, taken while a model runs: is memory really consolidating?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

LOW, HIGH = 0.05, 0.95


@dataclass(frozen=True)
class LayerImportance:
    """Importance of one swapped layer at the ends of the sequences seen, averaged over heads and sequences.

    Attributes:
        layer: index of the layer.
        mean: mean of I.
        low: 5th percentile of I over the synapses of a head.
        high: 95th percentile.
        ratio: the metaplasticity ratio, high / low of each head, then averaged. 1 when nothing is consolidated.
        head_spread: mean I of the head with the most over that of the head with the least. The gated norm hides a
            scale that all heads of a group share, so that a head that drowns in importance shows only here.
        sequences: how many sequences went in.
        head_ratio: the metaplasticity ratio of each head.
        head_mean: mean I of each head.
    """

    layer: int
    mean: float
    low: float
    high: float
    ratio: float
    head_spread: float
    sequences: int
    head_ratio: tuple[float, ...]
    head_mean: tuple[float, ...]


class ImportanceRecorder:
    """Sums of statistics on the device; nothing waits for the device until `layers` is asked."""

    def __init__(self) -> None:
        self._sums: dict[int, list] = {}

    def observe(self, layer: int, J: Tensor, prior: Tensor) -> None:
        """Takes the final state J [sequences, H, g, N], or [sequences, H, N], and the prior [H] of a layer."""
        importance = (prior.to(J.dtype).view(-1, *[1] * (J.dim() - 2)) + J).flatten(2)
        synapses = importance.shape[-1]
        low, high = (importance.kthvalue(1 + round(q * (synapses - 1)), dim=-1).values for q in (LOW, HIGH))
        figures = [importance.mean(), low.mean(), high.mean(), (high / low).mean(0), importance.mean((0, 2))]
        count = J.shape[0]
        before = self._sums.setdefault(layer, [0, 0.0, 0.0, 0.0, 0.0, 0.0])
        self._sums[layer] = [before[0] + count, *(b + f * count for b, f in zip(before[1:], figures, strict=True))]

    def layers(self) -> dict[int, LayerImportance]:
        """The averages by layer index, in order; empty when nothing was seen."""
        result = {}
        for layer, (count, *sums) in sorted(self._sums.items()):
            mean, low, high = (float(value / count) for value in sums[:3])
            ratios, means = ((value / count).tolist() for value in sums[3:])
            result[layer] = LayerImportance(
                layer,
                mean,
                low,
                high,
                ratio=sum(ratios) / len(ratios),
                head_spread=max(means) / min(means),
                sequences=count,
                head_ratio=tuple(ratios),
                head_mean=tuple(means),
            )
        return result


@contextmanager
def record_importance(model: nn.Module) -> Iterator[ImportanceRecorder]:
    """Records every swapped layer's importance at the end of each sequence (or packed document) that runs inside.

    Outputs and gradients are unchanged, and the hooks are gone on leaving, also after an error. Decoding with a cache
    is not recorded; under gradient checkpointing a sequence counts twice, which leaves averages alone.
    """
    recorder = ImportanceRecorder()
    # By attribute, not by class: code loaded from a model folder brings its own copy of the class.
    mixers = [module for module in model.modules() if "importance_observer" in vars(module)]
    before = [mixer.importance_observer for mixer in mixers]
    try:
        for mixer in mixers:
            mixer.importance_observer = recorder.observe
        yield recorder
    finally:
        for mixer, observer in zip(mixers, before, strict=True):
            mixer.importance_observer = observer
