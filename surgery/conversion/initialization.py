"""Initial values of the new parameters of a swapped layer. A new start is one function and its line in `STARTS`.

What the other stages know of it is its line in `planning/inits.py`.

The importance gate is beta_t = sigmoid(W_up W_down h_t) f(s) d_t and the prior exp(log_prior).
A start gives W_down [R, D], W_up [H g, R], s [H] and log_prior [H], all fp32, from the seed and the layer's number
alone: neither the order nor the number of swapped layers changes a layer's start.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...base.errors import UsageError
from ...mixers.geometry import GateSpec, MixerGeometry
from ...mixers.start import start_projections, start_scale
from ..measure.profile import LayerCalibration

IDENTITY_SCALE = 1e-7
"""f(s) of the identity start. Long windows sum J to a few hundred times that, so the logits move by about 1e-5. With
the form `abs` the gradient of s does not depend on s: the first step of Adam takes it to the learning rate."""

_GATE_MEAN = 0.5
"""Mean of the sigmoid at a start with zero-mean projections: what the calibrated scale counts on."""

_GATE_INPUT = 0.25


@dataclass(frozen=True)
class StartContext:
    """What a start may use.

    Attributes:
        layer: number of the layer.
        geometry: sizes of the mixer.
        gate: sizes and form of the importance gate.
        seed: of the plan.
        strength: mean importance growth E[J] / I_prior, for the calibrated start.
        calibration: the layer's statistics from the profile, for the calibrated start.
        load_in_proj: gives the input projection [rows, D] of the source.
    """

    layer: int
    geometry: MixerGeometry
    gate: GateSpec
    seed: int
    strength: float | None = None
    calibration: LayerCalibration | None = None
    load_in_proj: Callable[[], Tensor] | None = None

    def generator(self) -> torch.Generator:
        """A generator of its own for each seed and layer."""
        digest = hashlib.sha256(f"palimpsa start {self.seed} {self.layer}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


class Start(NamedTuple):
    """The new parameters of one layer, fp32: down [R, D], up [H g, R], scale [H] (s, not f(s)), log_prior [H].

    In the order of `GateSpec.TENSORS`, their names.
    """

    down: Tensor
    up: Tensor
    scale: Tensor
    log_prior: Tensor


def scale_parameter(value: Tensor, form: str) -> Tensor:
    """The s with f(s) = `value` > 0, for the form `abs` or `softplus`; computed in fp64, given in fp32."""
    value = value.double()
    if form == "softplus":
        value = value + torch.log(-torch.expm1(-value))
    return value.float()


def paper(context: StartContext) -> Start:
    """The authors' start, see `mixers.start`.

    s is what softplus is applied to, so f(s) lies between 0.74 and 1.31; another form gets the s of the same f(s).
    """
    generator = context.generator()
    down, up = _random_gate(context, generator)
    scale = torch.empty(context.geometry.num_heads)
    start_scale(scale, generator=generator)
    value = torch.nn.functional.softplus(scale)
    return Start(down, up, scale_parameter(value, context.gate.scale_form), torch.zeros_like(scale))


def identity(context: StartContext) -> Start:
    """The source's function to rounding: the paper's gate with a scale of `IDENTITY_SCALE`, I_prior = 1.

    Raises:
        UsageError: a scale form other than `abs`; softplus has no gradient left at a scale this small.
    """
    if context.gate.scale_form != "abs":
        raise UsageError("beta_scale_form: the identity start needs abs; a softplus that small cannot leave it")
    down, up = _random_gate(context, context.generator())
    heads = context.geometry.num_heads
    return Start(down, up, torch.full((heads,), IDENTITY_SCALE), torch.zeros(heads))


def calibrated(context: StartContext) -> Start:
    """Metaplasticity from the first token at the same output scale.

    Per head, with u = J / I_prior of mean `strength` distributed as in the calibration statistics, the prior that makes
    M / (I_prior (1 + u)) the least-squares fit of M is E[(1 + u)^-2] / E[(1 + u)^-1], expectations weighted by M^2.
    The scale follows from the mean importance. W_down holds the leading right singular directions of the input
    projection, the ones Mamba2 itself reads, scaled to a standard deviation of `_GATE_INPUT` on an isotropic input:
    gates start near one half, which the scale counts on, and have their full slope.

    Raises:
        UsageError: no calibration statistics.
    """
    calibration, strength = context.calibration, context.strength
    if calibration is None or strength is None or context.load_in_proj is None:
        raise UsageError(
            f"init calibrated: layer {context.layer} has no calibration statistics; measure the source on text "
            f"(not --static) and give that profile"
        )
    spread = torch.tensor(calibration.spread, dtype=torch.float64)
    importance = torch.tensor(calibration.importance, dtype=torch.float64)
    growth = 1 + strength * spread
    prior = growth.pow(-2).mean(1) / growth.reciprocal().mean(1)
    value = strength * prior / (_GATE_MEAN * importance.clamp_min(1e-6))
    _, up = _random_gate(context, context.generator())
    down = _leading_directions(context.load_in_proj(), context.gate.rank) * (_GATE_INPUT / calibration.input_rms)
    return Start(down, up, scale_parameter(value, context.gate.scale_form), prior.log().float())


STARTS: dict[str, Callable[[StartContext], Start]] = {
    "identity": identity,
    "calibrated": calibrated,
    "paper": paper,
}


def _random_gate(context: StartContext, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """W_down [R, D] and W_up [H g, R] of the start of the paper."""
    shapes = context.gate.shapes(context.geometry.hidden_size, context.geometry.num_heads)
    down, up = (torch.empty(shapes[name]) for name in GateSpec.TENSORS[:2])
    start_projections(down, up, generator=generator)
    return down, up


def _leading_directions(weight: Tensor, rank: int) -> Tensor:
    """The first `rank` right singular vectors of `weight` [rows, D], as rows, fp32.

    From the eigenvectors of the D x D Gram matrix; the largest entry of each is made positive, so that the result
    does not depend on the sign that a linear algebra library happens to choose.
    """
    weight = weight.float()
    _, vectors = torch.linalg.eigh(weight.T @ weight)
    rows = vectors.flip(1)[:, :rank].T
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    return (rows * largest.sign()).contiguous()
