import numpy as np
import pytest
from palimpsa_surgery.base.statistics import difference, estimate


def sequences(generator, count, level, hardness, weight=50):
    """Rows (sum, weight) of sequences whose means are level + hardness + their own noise."""
    means = level + hardness + generator.normal(0, 0.02, count)
    return np.stack([means * weight, np.full(count, weight)], axis=1)


def test_a_ratio_weighs_its_samples():
    samples = np.array([[10.0, 10.0], [90.0, 30.0]])
    assert estimate(samples).value == 2.5
    assert estimate(samples, exponential=True).value == pytest.approx(np.exp(2.5))


def test_the_error_is_the_one_of_a_mean():
    values = np.random.default_rng(0).normal(3.0, 0.5, 400)
    error = estimate(np.stack([values, np.ones(400)], axis=1)).error
    assert error == pytest.approx(0.5 / 20, rel=0.1)


def test_the_error_of_a_perplexity_is_the_losses_error_times_the_perplexity():
    samples = sequences(np.random.default_rng(1), 100, 2.0, 0.0)
    loss, perplexity = estimate(samples), estimate(samples, exponential=True)
    assert perplexity.error == pytest.approx(loss.error * perplexity.value, rel=0.05)


@pytest.mark.parametrize("function", [lambda one: estimate(one).error, lambda one: difference(one, one).error])
def test_one_sample_says_nothing_about_its_error(function):
    assert function(np.array([[3.0, 2.0]])) is None


def test_a_known_difference_is_covered():
    generator = np.random.default_rng(2)
    within = 0
    for _ in range(150):
        hardness = generator.normal(0, 0.5, 24)
        found = difference(sequences(generator, 24, 2.0, hardness), sequences(generator, 24, 2.03, hardness))
        within += abs(found.value - 0.03) < 2 * found.error
    assert 0.88 < within / 150 < 0.99, "two standard errors hold about 95 of 100"


def test_pairing_removes_what_is_hard_for_both():
    generator = np.random.default_rng(3)
    hardness = generator.normal(0, 0.5, 30)
    one, other = sequences(generator, 30, 2.1, hardness), sequences(generator, 30, 2.0, hardness)
    paired, apart = difference(one, other), difference(one, other, paired=False)
    assert paired.value == apart.value
    assert paired.error < 0.1 * apart.error
    assert apart.error == pytest.approx(np.hypot(estimate(one).error, estimate(other).error), rel=0.1)


def test_the_same_samples_differ_by_nothing():
    samples = sequences(np.random.default_rng(4), 9, 1.0, 0.0)
    assert difference(samples, samples) == (0.0, 0.0)
    assert difference(samples, samples, exponential=True) == (0.0, 0.0)


def test_many_samples_are_drawn_in_pieces_and_give_the_same_figure_twice(monkeypatch):
    monkeypatch.setattr("palimpsa_surgery.base.statistics._CHUNK", 1000)
    samples = sequences(np.random.default_rng(5), 300, 1.0, 0.0)
    assert estimate(samples) == estimate(samples)
    assert estimate(samples).error == pytest.approx(0.02 / 300**0.5, rel=0.1)
