"""The finished arms of an experiment, found by variant and seed at the learning rate that was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from language_arms import CONTROL, MAIN, SOURCE, VARIANTS
from language_results import ArmResult, best_rates


@dataclass(frozen=True)
class Board:
    """All results of one experiment.

    Attributes:
        results: by name of the arm.
    """

    results: Mapping[str, ArmResult]

    @cached_property
    def best(self) -> dict[str, float]:
        return best_rates(self.results)

    @cached_property
    def first(self) -> int:
        """The seed that every arm has."""
        return min(result.seed for result in self.results.values() if result.variant == CONTROL)

    @property
    def source(self) -> ArmResult | None:
        return self.results.get(SOURCE)

    def get(self, variant: str, seed: int | None = None) -> ArmResult | None:
        """A variant at the chosen learning rate; the first seed when None."""
        lr, seed = self.best[CONTROL if variant == CONTROL else MAIN], self.first if seed is None else seed
        for result in self.results.values():
            if (result.variant, result.lr, result.seed) == (variant, lr, seed):
                return result
        return None

    @cached_property
    def operated(self) -> list[ArmResult]:
        """Every variant with surgery that was run, with the first seed, in the order of `VARIANTS`."""
        found = [self.get(variant) for variant in VARIANTS if variant != CONTROL]
        return [result for result in found if result is not None]

    @property
    def compared(self) -> list[ArmResult]:
        """Those whose control is the fine-tuned one: all of the model was trained."""
        return [result for result in self.operated if VARIANTS[result.variant].mode != "new"]

    @property
    def new_only(self) -> list[ArmResult]:
        """Those whose control is the source: nothing but what surgery added was trained."""
        return [result for result in self.operated if VARIANTS[result.variant].mode == "new"]

    @cached_property
    def pairs(self) -> list[tuple[ArmResult, ArmResult]]:
        """(main arm, control) of every seed that has both."""
        seeds = sorted({result.seed for result in self.results.values() if result.variant == CONTROL})
        found = [(self.get(MAIN, seed), self.get(CONTROL, seed)) for seed in seeds]
        return [pair for pair in found if None not in pair]

    @property
    def control(self) -> ArmResult:
        return self.get(CONTROL)

    @property
    def seq_len(self) -> int:
        return self.control.seq_len
