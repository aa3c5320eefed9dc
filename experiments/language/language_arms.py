"""Arms and presets of the experiment on language: what is compared, and at which size."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from palimpsa_surgery.base.errors import UsageError

SOURCE, CONTROL, MAIN = "source", "control", "window"
"""The model as it was pretrained; fine-tuned without surgery; the paper's rule with the identity start."""

EARLY = ("window-new-only", "window-new-only-fast", "window-paper", "strongest")
"""What is compared next after control and main arm, when time is short."""


@dataclass(frozen=True)
class Variant:
    """A way to operate on the source.

    Attributes:
        rule: of `surgery.strategies.RULES`; None leaves all layers as they are.
        init: of `surgery.initialization.STARTS`.
        per_channel: one importance gate per channel, the paper's, whatever the preset says.
        mode: of the recipe; `new` trains what surgery added alone, so that its control is the untrained source.
        lr_new_times: the preset's `lr_new` times this.
    """

    rule: str | None = None
    init: str = "identity"
    per_channel: bool = False
    mode: str = "full"
    lr_new_times: float = 1.0


VARIANTS: dict[str, Variant] = {
    CONTROL: Variant(),
    MAIN: Variant("window"),
    "window-new-only": Variant("window", mode="new"),
    "window-new-only-fast": Variant("window", mode="new", lr_new_times=10.0),
    "window-paper": Variant("window", "paper"),
    "window-calibrated": Variant("window", "calibrated"),
    "window-per-channel": Variant("window", per_channel=True),
    "rate": Variant("rate"),
    "strongest": Variant("strongest"),
    "random": Variant("random"),
    "all": Variant("all"),
}


@dataclass(frozen=True)
class Arm:
    """One fine-tuning run: a key of `VARIANTS`, the learning rate of what the source had, and the seed.

    The seed decides the order of the text (the same for every arm of that seed) and all random draws of the surgery.
    """

    variant: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant}-lr{self.lr:g}-s{self.seed}"


@dataclass(frozen=True)
class Preset:
    """How large everything is.

    Attributes:
        note: for whom it is, in a sentence.
        recipe: shipped recipe whose remaining keys are kept.
        layers: how many are swapped.
        tokens: read by every arm; None for the whole training file once.
        pieces: how many pieces of how many characters, each from another document, are the training text; None for the
            whole documents. Few steps over whole documents would see a dozen of them, one after the other.
        seq_len, batch_size, micro_batch_size: of training.
        lrs: candidates, tried alike for control and main arm with the first seed.
        lr_new: of what surgery added, times the variant's `lr_new_times`.
        beta_groups: importance gates per head; None for one per channel.
        seeds: of control and main arm; the other arms take the first.
        eval_length, eval_tokens: windows of held-out text for the losses by position, and how much of it.
        dev_windows: of `seq_len` tokens, which choose the learning rate.
        probe_lengths, probe_pairs, probe_trials: of recall and needle.
        probed: variants that recall and needle are measured of, beside the source; none, and not the source either.
        ablated: variants whose loss is also measured with metaplasticity switched off after training, first seed.
        measure_tokens: for windows and calibration.
        device: cpu or cuda.
        changes: further keys of the recipe.
    """

    note: str
    recipe: str
    layers: int
    tokens: int | None
    seq_len: int
    batch_size: int
    micro_batch_size: int
    lrs: tuple[float, ...]
    lr_new: float
    beta_groups: int | None
    seeds: tuple[int, ...]
    eval_length: int
    eval_tokens: int
    dev_windows: int
    probe_lengths: tuple[int, ...]
    probe_pairs: tuple[int, ...]
    probe_trials: int
    probed: tuple[str, ...] = tuple(VARIANTS)
    ablated: tuple[str, ...] = (MAIN, "window-paper", "all")
    measure_tokens: int = 16384
    device: str = "cpu"
    pieces: tuple[int, int] | None = None
    changes: dict[str, Any] = field(default_factory=dict)

    def steps(self, text_tokens: int) -> int:
        """Optimizer steps: as many whole batches as `tokens` (or the training text of `text_tokens`) fill."""
        return max(1, (self.tokens or text_tokens) // (self.seq_len * self.batch_size))


PRESETS: dict[str, Preset] = {
    "gpu": Preset(
        note="mamba2-docs-25m on one data-center GPU, 8 layers swapped, one importance per channel",
        recipe="docs_25m",
        layers=8,
        tokens=None,
        seq_len=8192,
        batch_size=8,
        micro_batch_size=2,
        lrs=(1e-4, 3e-4),
        lr_new=1e-2,
        beta_groups=None,
        seeds=(0, 1, 2),
        eval_length=32768,
        eval_tokens=393216,
        dev_windows=16,
        probe_lengths=(2048, 8192, 32768),
        probe_pairs=(4, 16),
        probe_trials=16,
        measure_tokens=65536,
        device="cuda",
        changes={"data.packing": "stream", "require_kernels": True},
    ),
    "cpu": Preset(
        note="mamba2-docs-1m on one CPU core in about an hour, 3 layers swapped, one importance per head and key",
        recipe="tiny_cpu",
        layers=3,
        tokens=65536,
        seq_len=1024,
        batch_size=1,
        micro_batch_size=1,
        lrs=(5e-5, 2e-4),
        lr_new=3e-3,
        beta_groups=1,
        seeds=(0, 1, 2),
        eval_length=4096,
        eval_tokens=65536,
        dev_windows=8,
        probe_lengths=(512, 2048),
        probe_pairs=(4, 16),
        probe_trials=4,
        probed=(CONTROL, MAIN),
        ablated=(MAIN, "window-paper"),
        pieces=(600, 3200),
        changes={"data.packing": "stream"},
    ),
}
PRESETS["gpu-short"] = replace(
    PRESETS["gpu"],
    note="the same in some minutes: 64 steps, no probes",
    tokens=64 * 65536,
    micro_batch_size=4,
    probed=(),
    ablated=(MAIN,),
)


def lr_new_of(preset: Preset, arm: Arm) -> float:
    """The learning rate of what surgery added; 0 where nothing was."""
    variant = VARIANTS.get(arm.variant, Variant())
    return 0.0 if variant.rule is None else preset.lr_new * variant.lr_new_times


def find_preset(name: str) -> Preset:
    """The preset of that name; `UsageError` lists them."""
    if name not in PRESETS:
        raise UsageError(f"--preset {name}: there is no such preset; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def sweep(preset: Preset) -> list[Arm]:
    """Every learning rate for control and main arm, with the first seed."""
    return [Arm(variant, lr, preset.seeds[0]) for variant in (CONTROL, MAIN) for lr in preset.lrs]


def chosen_arms(preset: Preset, best: dict[str, float]) -> list[Arm]:
    """All other arms, the most telling first, so that a run that is cut short still says something.

    Args:
        preset: sizes and seeds.
        best: the learning rate that won the sweep, of control and main arm; other variants take the main arm's.
    """
    first, *others = preset.seeds
    pairs = [Arm(variant, best[variant], seed) for seed in others for variant in (CONTROL, MAIN)]
    early = [Arm(variant, best[MAIN], first) for variant in EARLY]
    late = [Arm(variant, best[MAIN], first) for variant in VARIANTS if variant not in (CONTROL, MAIN, *EARLY)]
    return [*pairs[:2], *early, *pairs[2:], *late]
