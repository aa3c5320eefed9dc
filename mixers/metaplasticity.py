"""Every parameter that Palimpsa-M adds to a Mamba2 mixer, in one module.

    beta_t  = sigmoid(W_up W_down h_t) * f(s_head) * d_t          [B, T, H, g]
    I_prior = exp(log_prior)                                      [H]

beta is how much a token raises the importance of the synapses it writes to, I_prior the importance of a synapse that
nothing was written to. With beta = 0 and I_prior = 1 the mixer is Mamba2 again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..kernels.common.precision import compute_dtype
from ..kernels.common.scaling import scale_rows
from .geometry import GATE_FP32, GateSpec, MixerGeometry, checked_gate
from .precision import KeepFp32Mixin

# exp(+-20) is 2e-9 to 5e8: far outside what a state can use, and far inside what fp32 can hold.
LOG_PRIOR_LIMIT = 20.0


class Metaplasticity(KeepFp32Mixin, nn.Module):
    """The importance gate of one swapped layer.

    Two forms of the scale, named by the config:

    - "softplus": f(s) = log(1 + e^s), the paper's. Its gradient vanishes with beta itself: at the s that makes a
      start exact, Adam's eps eats it.
    - "abs": f(s) = |s|. It can be as small as one likes, its slope is one everywhere but at zero itself, and it is
      never negative, so that the importance I = I_prior + J stays at least I_prior whatever an optimizer does to s.

    log_prior is clamped to +-20 where it is used, so that I_prior is finite and above zero for the same reason.
    `beta_scale` and `log_prior` stay in fp32 when the model is cast to a shorter type.

    Args:
        geometry: sizes of the mixer this belongs to.
        gate: sizes and form of the gate; `UsageError` where they do not fit the mixer.
    """

    keep_fp32 = GATE_FP32

    def __init__(self, geometry: MixerGeometry, gate: GateSpec) -> None:
        super().__init__()
        self.spec, heads = checked_gate(gate, geometry), geometry.num_heads
        self.beta_down = nn.Linear(geometry.hidden_size, gate.rank, bias=False)
        self.beta_up = nn.Linear(gate.rank, heads * gate.groups, bias=False)
        self.beta_scale = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        self.log_prior = nn.Parameter(torch.zeros(heads, dtype=torch.float32), requires_grad=gate.train_prior)
        self.plasticity_enabled = True

    def scale(self) -> Tensor:
        """f(s), one number per head, [H], never negative."""
        value = self.beta_scale.to(compute_dtype(self.beta_scale))
        return value.abs() if self.spec.scale_form == "abs" else nn.functional.softplus(value)

    def prior(self) -> Tensor:
        """I_prior, one number per head, [H], finite and above zero."""
        value = self.log_prior.to(compute_dtype(self.log_prior))
        return value.clamp(-LOG_PRIOR_LIMIT, LOG_PRIOR_LIMIT).exp()

    def forward(self, hidden: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """beta and the prior for a piece of text.

        Args:
            hidden: [B, T, D], the mixer's input (after the block's norm).
            step: d_t [B, T, H] as the mixer uses it; zero on padding, which makes beta zero there too.

        Returns:
            beta [B, T, H, g] in the type of `step`, and the prior [H].
        """
        shape = (*step.shape, self.spec.groups)
        if not self.plasticity_enabled:
            return step.new_zeros(shape), step.new_ones(step.shape[-1])
        gate = self.beta_up(self.beta_down(hidden)).view(shape)
        return scale_rows(gate, self.scale() * step, step.dtype, sigmoid=True), self.prior()


@contextmanager
def metaplasticity_off(model: nn.Module) -> Iterator[nn.Module]:
    """Runs the model with beta = 0 and I_prior = 1 in every swapped layer: the source model, to rounding.

    Undone on leaving, also after an error; nested use is fine. Parameters are not touched. States that were carried
    over from a run with metaplasticity on keep their J, so start from an empty cache.
    """
    # By attribute, not by class: code loaded from a model folder brings its own copy of the class.
    gates = [module for module in model.modules() if "plasticity_enabled" in vars(module)]
    before = [gate.plasticity_enabled for gate in gates]
    try:
        for gate in gates:
            gate.plasticity_enabled = False
        yield model
    finally:
        for gate, enabled in zip(gates, before, strict=True):
            gate.plasticity_enabled = enabled
