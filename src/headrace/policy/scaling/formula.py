"""How much capacity do offered work and a queue take, exactly?

R = ceil((s * lambda_w + Q / T_d) / C) of SCALE-2, in integers: exact quotients do not round up (EX-8).
"""

from collections.abc import Iterable

from headrace.units import MICRO, ceil_div


def need_micro(headroom_ppm: int, rate_micro: int, queued_ns: int, drain_ns: int) -> int:
    """Return s * lambda_w + Q / T_d, a work rate in millionths, rounded up.

    Capacities are whole millionths too, so rounding this one up changes no quotient of theirs.
    """
    numerator = headroom_ppm * rate_micro * drain_ns + queued_ns * MICRO * MICRO
    return ceil_div(numerator, MICRO * drain_ns)


def groups_for(need: int, there: Iterable[int], each: int) -> int:
    """Return the fewest groups that make up a work rate, whichever of those that are there go.

    `there`: what each of them makes up, `each`: what a further one does. The weakest count first, so
    that the number holds for any choice of victims.
    """
    found = count = 0
    for one in sorted(there):
        if found >= need:
            return count
        found, count = found + one, count + 1
    return count + max(0, ceil_div(need - found, each))
