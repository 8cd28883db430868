"""How long do steps take that differ only in their growing context?

Exact integers: step j of a segment, from 0, lasts alpha + beta*j ps, the first k together
T(k) = k*alpha + beta*k*(k-1)/2 (design 6).
"""

from math import isqrt


def total(alpha: int, beta: int, steps: int) -> int:
    """Return T(steps) in ps."""
    return steps * alpha + beta * (steps * (steps - 1) // 2)


def least_steps(alpha: int, beta: int, span: int) -> int:
    """Return the least k >= 1 with T(k) >= span."""
    if span <= alpha:
        return 1
    if not beta:
        return -(-span // alpha)
    # The root of beta/2*k^2 + (alpha - beta/2)*k = span, rounded down; the answer is next to it.
    twice = 2 * alpha - beta
    steps = max((isqrt(twice * twice + 8 * beta * span) - twice) // (2 * beta), 1)
    while total(alpha, beta, steps) >= span:
        steps -= 1
    while total(alpha, beta, steps) < span:
        steps += 1
    return steps
