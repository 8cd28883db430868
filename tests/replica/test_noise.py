"""Noise is bounded, differs by stretch and by seed, and repeats."""

from headrace.replica.noise import noisy
from headrace.units import MICRO
from tests.replica.scenes import small

COSTS = small().costs


def test_noise_stays_within_its_bound_and_uses_it() -> None:
    drawn = [noisy(COSTS, 7, stretch, 50_000).decode_a for stretch in range(500)]
    low, high = min(drawn) / COSTS.decode_a, max(drawn) / COSTS.decode_a
    assert 0.95 <= low < 0.952
    assert 1.048 < high <= 1.05
    mean = sum(drawn) / len(drawn) / COSTS.decode_a
    assert abs(mean - 1) < 0.005


def test_noise_depends_on_seed_and_stretch_only() -> None:
    assert noisy(COSTS, 7, 3, 50_000) == noisy(COSTS, 7, 3, 50_000)
    assert noisy(COSTS, 7, 3, 50_000) != noisy(COSTS, 8, 3, 50_000)
    assert noisy(COSTS, 7, 3, 50_000) != noisy(COSTS, 7, 4, 50_000)
    assert noisy(COSTS, 7, 3, 0) == COSTS.scaled(MICRO)
