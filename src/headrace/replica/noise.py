"""How far off is the engine's speed during one stretch of steps?

An integer hash of (seed, stretch), so that a step's speed depends on nothing but its number: not on
how many steps were taken at once, nor on what other replicas drew.
"""

from headrace.model.profile import StepCosts
from headrace.units import MICRO

STRETCH_STEPS = 256
"""Steps of one speed: a jump ends with them, so a few would make jumps short."""
_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """Return splitmix64's output for a state (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def noisy(costs: StepCosts, seed: int, stretch: int, ppm: int) -> StepCosts:
    """Return the costs in one stretch: each coefficient times 1 +- at most `ppm` millionths."""
    drawn = _mix(_mix(seed & _MASK) ^ stretch)
    return costs.scaled(MICRO - ppm + drawn % (2 * ppm + 1))
