"""profile.json: how fast every layer and head of a checkpoint forgets, and the statistics of the calibrated start.

A profile holds figures, not choices: any rule of `strategies.py` can be applied to it later, by hand or by `plan`.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from ...base.console import counted
from ...base.errors import SchemaError
from ...base.files import dump_json, write_text
from ...base.schemas import StrictModel, StrictPart, read_model

if TYPE_CHECKING:
    from ..checkpoint.checkpoint import Checkpoint

SIGNIFICANT_DIGITS = 8
_ROUNDING = 1e-6  # of a mean against that of rounded numbers, and room for whoever rounds further
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class LayerCalibration(StrictPart):
    """What the calibrated start needs to know of a layer's input and of its heads (see `calibration.py`).

    Attributes:
        input_rms: root mean square of the layer's input (after the block norm), over tokens and channels.
        importance: [H] mean over tokens and keys of K_t = a_t K_{t-1} + d_t k_t^2, the importance of a scale of one.
        spread: [H][16] K / mean K in each sixteenth of the state's energy M^2, in ascending order.
    """

    input_rms: Positive
    importance: list[NotNegative]
    spread: list[list[NotNegative]]

    @model_validator(mode="after")
    def _same_heads(self) -> LayerCalibration:
        if len(self.importance) != len(self.spread):
            raise ValueError(f"importance has {counted(len(self.importance), 'head')}, spread {len(self.spread)}")
        parts = sorted({len(part) for part in self.spread})
        if parts[:1] == [0] or len(parts) > 1:
            raise ValueError(
                f"spread has lists of {' and '.join(map(str, parts))} numbers, expected one length above 0"
            )
        return self


class LayerProfile(StrictPart):
    """One layer: rate in nats per token and window in tokens, per head and as the mean over heads."""

    layer: Annotated[int, Field(ge=0)]
    swapped: bool = False
    rate: Positive
    window: Positive
    head_rate: Annotated[list[Positive], Field(min_length=1)]
    head_window: Annotated[list[Positive], Field(min_length=1)]
    calibration: LayerCalibration | None = None

    @model_validator(mode="after")
    def _same_heads(self) -> LayerProfile:
        if len(self.head_rate) != len(self.head_window):
            heads = counted(len(self.head_rate), "head")
            raise ValueError(f"head_rate has {heads}, head_window {len(self.head_window)}")
        if self.calibration and len(self.calibration.importance) != len(self.head_rate):
            heads = counted(len(self.calibration.importance), "head")
            raise ValueError(f"calibration has {heads}, not {len(self.head_rate)}")
        return self

    @model_validator(mode="after")
    def _means(self) -> LayerProfile:
        for key, value, heads in (("rate", self.rate, self.head_rate), ("window", self.window, self.head_window)):
            mean = sum(heads) / len(heads)
            if not math.isclose(value, mean, rel_tol=_ROUNDING):
                raise ValueError(f"{key} is {value:.8g}, expected the mean of head_{key}, {mean:.8g}")
        return self


class Profile(StrictModel):
    """The file profile.json.

    Attributes:
        method: `measured` on text, or `static` (from A_log and dt_bias alone: `data` is then empty, `tokens` is 0).
        source: Hub id, or name of the folder, of the checkpoint measured.
        fingerprint: of that checkpoint; a plan or a conversion of another one refuses the profile.
        data: name of the text, never a path.
        tokens: real tokens measured.
        seq_len: length of the windows of text; the figures depend on it.
        seed: chose the windows.
        layers: those with a mixer that can be swapped, by their numbers in the model; a hybrid has others, too.
    """

    method: Literal["measured", "static"]
    source: str
    fingerprint: str
    data: str = ""
    tokens: Annotated[int, Field(ge=0)] = 0
    seq_len: Annotated[int, Field(ge=0)] = 0
    seed: int = 0
    layers: Annotated[list[LayerProfile], Field(min_length=1)]

    @model_validator(mode="after")
    def _numbered(self) -> Profile:
        numbers = [layer.layer for layer in self.layers]
        if numbers != sorted(set(numbers)):
            raise ValueError(f"layers must be in the order of their numbers, each once, not {numbers}")
        return self

    @model_validator(mode="after")
    def _of_some_text(self) -> Profile:
        if self.method == "measured" and not (self.tokens and self.seq_len):
            raise ValueError(
                f"tokens is {self.tokens} and seq_len is {self.seq_len}, expected both above 0 where method is measured"
            )
        return self

    @property
    def swapped(self) -> tuple[int, ...]:
        """Layers that were swapped already when the checkpoint was measured."""
        return tuple(layer.layer for layer in self.layers if layer.swapped)

    def of(self, layer: int) -> LayerProfile:
        """The figures of a layer, by its number in the model: those without a mixer to swap have none."""
        return next(figures for figures in self.layers if figures.layer == layer)

    def describe(self) -> str:
        """One line for people: which text, how much of it, in sequences of what length."""
        if self.method == "static":
            return "static estimate from A_log and dt_bias (no text)"
        return f"{self.tokens:,} tokens of {self.data} in sequences of {self.seq_len:,} (seed {self.seed})"

    def check_source(self, checkpoint: Checkpoint) -> None:
        """Raises `SchemaError` unless the profile is of this checkpoint, with its layers and heads as they are."""
        if not checkpoint.matches(self.fingerprint):
            raise SchemaError(
                f"profile.json:fingerprint: the profile was measured on {self.source} ({self.fingerprint[:12]}), not "
                f"on {checkpoint.source_id} ({checkpoint.fingerprint[:12]}); measure this checkpoint again"
            )
        numbers, mixers = {layer.layer for layer in self.layers}, set(checkpoint.sites)
        if numbers != mixers:
            odd = min(numbers ^ mixers)
            raise SchemaError(
                f"profile.json:layers: lists {counted(len(numbers), 'layer')}, {checkpoint.source_id} has "
                f"{len(mixers)} with a mixer to swap (layer {odd} is in one alone); measure this checkpoint again"
            )
        for layer in self.layers:
            heads = checkpoint.sites[layer.layer].geometry.num_heads
            if len(layer.head_rate) != heads:
                raise SchemaError(
                    f"profile.json:layers.{layer.layer}.head_rate: lists {counted(len(layer.head_rate), 'head')}, "
                    f"{checkpoint.source_id} has {heads}; measure this checkpoint again"
                )
            swapped, family = layer.layer in checkpoint.palimpsa_layers, checkpoint.family
            kind = family.swapped if swapped else f"plain {family.plain}"
            if layer.swapped != swapped:
                raise SchemaError(
                    f"profile.json:layers.{layer.layer}.swapped: is {str(layer.swapped).lower()}, but that layer of "
                    f"{checkpoint.source_id} is {kind}; correct it, or measure this checkpoint again"
                )


def rounded(values: list[float]) -> list[float]:
    """Eight significant digits: far below any use of the figures, half the size of the file."""
    return [float(f"{value:.{SIGNIFICANT_DIGITS}g}") for value in values]


def write_profile(profile: Profile, path: str | Path) -> None:
    """Writes strict JSON with each list of numbers on a line of its own, so that people can read it."""
    text = dump_json(profile.model_dump(mode="json"))
    write_text(path, re.sub(r"\[\s+[^\[\]{}]*\s+\]", lambda match: " ".join(match.group().split()), text))


def read_profile(path: str | Path) -> Profile:
    """Reads profile.json; `SchemaError` names file and key of a mistake."""
    return read_model(Profile, path)
