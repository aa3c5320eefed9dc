"""The calibration statistics against loops over tokens, and what must not change them."""

import pytest
import torch
from palimpsa_surgery.surgery.measure import calibration
from palimpsa_surgery.surgery.measure.calibration import CalibrationSums

HEADS, GROUPS, CHANNELS, KEYS = 4, 2, 3, 5


def states(length, batch=1, seed=0):
    """x, keys, step, log_decay of a batch."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, HEADS, CHANNELS, generator=generator)
    keys = torch.randn(batch, length, GROUPS, KEYS, generator=generator)
    step = torch.rand(batch, length, HEADS, generator=generator) + 0.01
    strength = torch.tensor([1e-3, 0.05, 0.5, 5.0])
    return x, keys, step, -strength * step


def brute_force(x, keys, step, log_decay):
    """K and M^2 summed over channels after every STRIDE tokens and after the last, by the recurrences; fp64."""
    x, keys, step, log_decay = (tensor[0].double() for tensor in (x, keys, step, log_decay))
    keys = keys.repeat_interleave(HEADS // GROUPS, 1)
    M, K, samples = torch.zeros(HEADS, CHANNELS, KEYS), torch.zeros(HEADS, KEYS), []
    for t in range(len(x)):
        decay = log_decay[t].exp()
        K = decay[:, None] * K + step[t][:, None] * keys[t] ** 2
        M = decay[:, None, None] * M + (step[t][:, None] * x[t])[..., None] * keys[t][:, None]
        if (t + 1) % calibration.STRIDE == 0 or t + 1 == len(x):
            samples.append((K, M.square().sum(1)))
    return (torch.stack(part, 1) for part in zip(*samples, strict=True))


def total(*batches):
    sums = CalibrationSums(HEADS)
    for batch in batches:
        sums.add_states(*batch)
    return sums.result()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_importance_is_the_mean_of_the_recurrence(length):
    batch = states(length)
    K, _ = brute_force(*batch)
    assert total(batch).importance == pytest.approx(K.mean((1, 2)).tolist(), rel=1e-5)


def test_spread_is_the_geometric_mean_in_parts_of_equal_energy():
    batch = states(300)
    K, energy = brute_force(*batch)
    found = torch.tensor(total(batch).spread, dtype=torch.float64)
    for head in range(HEADS):
        order = K[head].flatten().argsort()
        logs, weights = K[head].flatten()[order].log(), energy[head].flatten()[order]
        part = ((weights.cumsum(0) - weights / 2) / weights.sum() * calibration.PARTS).long()
        for i in range(calibration.PARTS):
            mine = part == i
            if mine.sum() > 2:
                mean = (weights * logs)[mine].sum() / weights[mine].sum()
                assert found[head, i].log().item() == pytest.approx((mean - K[head].mean().log()).item(), abs=0.35)
        assert found[head].tolist() == sorted(found[head].tolist())


def test_a_prior_fitted_from_the_parts_is_that_of_all_samples():
    batch = states(640)
    K, energy = brute_force(*batch)
    parts = torch.tensor(total(batch).spread, dtype=torch.float64)
    for strength in (0.05, 1.0, 3.0):
        growth = 1 + strength * K / K.mean((1, 2), keepdim=True)
        exact = (energy / growth**2).sum((1, 2)) / (energy / growth).sum((1, 2))
        growth = 1 + strength * parts
        torch.testing.assert_close(growth.pow(-2).mean(1) / growth.reciprocal().mean(1), exact, rtol=0.02, atol=0)


def test_batches_change_nothing():
    one, two = states(130), states(130, seed=1)
    apart = total(one, two)
    together = total([torch.cat(tensors) for tensors in zip(one, two, strict=True)])
    assert together.importance == pytest.approx(apart.importance, rel=1e-5)
    for a, b in zip(together.spread, apart.spread, strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_a_head_without_state_and_inputs_of_zero_stay_finite():
    x, keys, step, log_decay = states(70)
    x[:, :, 1] = 0
    keys[:, :, 0] = 0
    found = total((x, keys, step, log_decay))
    assert found.importance[0] == 0
    assert found.spread[1] == [1.0] * calibration.PARTS


def test_input_size_is_the_root_mean_square():
    sums = CalibrationSums(HEADS)
    sums.add_input(torch.tensor([[[3.0, 4.0]]]))
    sums.add_input(torch.tensor([[[0.0, 0.0], [0.0, 5.0]]]))
    sums.add_states(*states(5))
    assert sums.result().input_rms == pytest.approx((50 / 6) ** 0.5)
