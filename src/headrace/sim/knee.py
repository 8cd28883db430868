"""Up to which rate does something hold? By bisection, with a bound on how often is asked.

Each answer may cost a simulation, and may be noisy: what is found is a rate that held below one that did
not, with no rate below it that was tried and failed. Knows no requests; what holding means is the caller's.
"""

from collections.abc import Callable
from math import ceil, log2

WIDENINGS = 8
"""How often a guess is doubled or halved before there is taken to be no answer: 256 times off."""
_LOW, _HIGH = 0.5, 1.5
"""The first bracket, as multiples of the guess."""


class NoKneeError(ValueError):
    """Nothing that was tried held, or everything did."""


def bisect(holds: Callable[[float], bool], low: float, high: float, steps: int) -> float:
    """Return the largest value found to hold, between one that does and one that does not.

    Exact to (high - low) / 2^steps, after `steps` questions.
    """
    for _ in range(steps):
        middle = (low + high) / 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def knee(holds: Callable[[float], bool], guess: float, precision: float) -> float:
    """Return the largest rate found to hold; one at most `precision` (a share) above it does not.

    At most `WIDENINGS` + 2 questions to find a bracket around `guess`, and then as many as it has to be
    halved. Raises NoKneeError where a rate 2^`WIDENINGS` times below the guess does not hold, or one as far
    above it does.
    """
    low, high = bracket(holds, guess)
    steps = max(0, ceil(log2((high - low) / (precision * low))))
    return bisect(holds, low, high, steps)


def bracket(holds: Callable[[float], bool], guess: float) -> tuple[float, float]:
    """Return a rate near the guess that holds, and one above it that does not; raises NoKneeError."""
    low, high = guess * _LOW, guess * _HIGH
    if holds(low):
        for _ in range(WIDENINGS + 1):
            if not holds(high):
                return low, high
            low, high = high, 2 * high
        raise NoKneeError(f"even {low:.4g} a second holds")
    for _ in range(WIDENINGS):
        low, high = low / 2, low
        if holds(low):
            return low, high
    raise NoKneeError(f"not even {low:.3g} a second holds")
