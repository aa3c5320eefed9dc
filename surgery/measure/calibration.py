"""Calibration statistics: how the importance of a head would be spread over the energy of its state.

With the importance gate at one half everywhere, the importance of a head grows in proportion to
    K_t[k] = a_t K_{t-1}[k] + d_t k_t[k]^2
whatever its scale. What division by I_prior + J does to the head's state M then depends on the ratio of K to its mean,
weighted by M^2. A histogram of K holds that for any growth; sixteen conditional means of it go into the profile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .profile import LayerCalibration, rounded

STRIDE = 64
PARTS = 16
"""Parts of equal energy; with geometric means the fitted prior is within 2 % of the histogram's up to a growth of 3."""

_LOG_LOW, _LOG_HIGH, _BINS = -40.0, 24.0, 1024


class CalibrationSums:
    """Sums over the sampled states of one layer, in fp64; the order of the samples does not matter.

    Args:
        heads: H of the layer.
    """

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.input_square, self.input_count = 0.0, 0
        self.importance, self.samples = torch.zeros(heads, dtype=torch.float64), 0
        self.energy = torch.zeros(heads * _BINS, dtype=torch.float64)
        self.moment = torch.zeros(heads * _BINS, dtype=torch.float64)

    def add_input(self, hidden: Tensor) -> None:
        """Adds the layer's inputs, [B, T, D]."""
        self.input_square += hidden.double().square().sum().item()
        self.input_count += hidden.numel()

    def add_states(self, x: Tensor, keys: Tensor, step: Tensor, log_decay: Tensor) -> None:
        """Runs both recurrences over a batch and adds the state after every `STRIDE` tokens, and after the last.

        Args:
            x: [B, T, H, P] values before the step size.
            keys: [B, T, G, N].
            step: [B, T, H] d_t.
            log_decay: [B, T, H] -A d_t.
        """
        batch, length, heads, _ = x.shape
        step, log_decay = step.float(), log_decay.float()
        M = x.new_zeros(batch, heads, x.shape[3], keys.shape[3], dtype=torch.float32)
        K = M.new_zeros(batch, heads, keys.shape[3])
        for start in range(0, length, STRIDE):
            part = slice(start, start + STRIDE)
            decay = log_decay[:, part].cumsum(1)
            weight = torch.exp(decay[:, -1:] - decay) * step[:, part]
            carry = torch.exp(decay[:, -1])[..., None]
            key = keys[:, part].float().repeat_interleave(heads // keys.shape[2], dim=2)
            K = carry * K + torch.einsum("bth,bthn->bhn", weight, key.square())
            M = carry[..., None] * M + torch.einsum("bth,bthp,bthn->bhpn", weight, x[:, part].float(), key)
            self._add_sample(K, M.square().sum(2))

    def _add_sample(self, importance: Tensor, energy: Tensor) -> None:
        """Adds samples of K and of M^2 summed over channels, both [B, H, N]."""
        importance, energy = importance.double().cpu(), energy.double().cpu()
        self.importance += importance.mean(2).sum(0)
        self.samples += importance.shape[0]
        logs = importance.clamp_min(1e-17).log()
        position = (logs - _LOG_LOW) * (_BINS / (_LOG_HIGH - _LOG_LOW))
        head = torch.arange(self.heads)[None, :, None] * _BINS
        index = (position.long().clamp(0, _BINS - 1) + head).flatten()
        self.energy += torch.bincount(index, energy.flatten(), self.heads * _BINS)
        self.moment += torch.bincount(index, (energy * logs).flatten(), self.heads * _BINS)

    def result(self) -> LayerCalibration:
        """The statistics as the profile stores them."""
        mean = self.importance / max(self.samples, 1)
        energy, moment = self.energy.view(self.heads, _BINS), self.moment.view(self.heads, _BINS)
        spread = [
            rounded(_parts(energy[head], moment[head], mean[head].clamp_min(1e-17).log())) for head in range(self.heads)
        ]
        rms = (self.input_square / max(self.input_count, 1)) ** 0.5
        return LayerCalibration(input_rms=max(rms, 1e-12), importance=rounded(mean.tolist()), spread=spread)


def _parts(energy: Tensor, log_moment: Tensor, log_mean: Tensor) -> list[float]:
    """K / mean K in each of `PARTS` equal parts of the energy, as geometric means, in ascending order.

    Args:
        energy: [bins] of a histogram over K in ascending order.
        log_moment: [bins] sums of energy times log K.
        log_mean: log of the mean of K.
    """
    total = energy.sum()
    if total <= 0:
        return [1.0] * PARTS
    edges = torch.cat([energy.new_zeros(1), energy.cumsum(0)]) * (PARTS / total)
    lower = torch.arange(PARTS, dtype=energy.dtype)[:, None]
    overlap = (torch.minimum(edges[1:], lower + 1) - torch.maximum(edges[:-1], lower)).clamp_min(0)
    logs = torch.where(energy > 0, log_moment / energy.clamp_min(1e-300), 0)
    return ((overlap @ logs) - log_mean).exp().tolist()
