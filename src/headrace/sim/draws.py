"""What a fault that has no instant of its own comes to, each time anew: drawn alike simulated and live."""

from collections.abc import Iterable
from enum import Enum, auto
from random import Random

from headrace.sim.faults import Fault, Reports, Starts
from headrace.trace.streams import stream
from headrace.units import InstantNs, seconds

Plan = tuple[tuple[str, int], ...]
"""(stage, ns) of a start, in order."""


class Fate(Enum):
    """How one start goes."""

    WELL = auto()
    REFUSED = auto()
    NEVER = auto()
    PARTIAL = auto()
    LOST = auto()
    SLOW = auto()
    WRONG = auto()
    """It never makes the token that it has to make."""


def begun(faults: Iterable[Fault], rng: Random, plan: Plan) -> tuple[Fate, Plan]:
    """Return how a start goes that is planned like this, and how long its stages then take."""
    chance = rng.random()
    for fault in faults:
        if isinstance(fault, Starts):
            for share, fate in (
                (fault.refused, Fate.REFUSED), (fault.never, Fate.NEVER),
                (fault.partial, Fate.PARTIAL), (fault.lost, Fate.LOST), (fault.slow, Fate.SLOW),
            ):  # fmt: skip
                if chance < share:
                    return fate, _slowed(plan, fault.factor, rng) if fate is Fate.SLOW else plan
                chance -= share
    return Fate.WELL, plan


def _slowed(plan: Plan, factor: float, rng: Random) -> Plan:
    nth = rng.randrange(len(plan))
    stage, took = plan[nth]
    return (*plan[:nth], (stage, round(took * factor)), *plan[nth + 1 :])


def doomed(name: str, stages: int) -> int:
    """Return the stage, of so many, in which a group that will be lost is: by its name, so that all come to be."""
    return 1 + sum(name.encode()) % (stages - 1)


def deliveries(faults: Iterable[Fault], seed: int, replica: int, now: InstantNs) -> tuple[int, ...]:
    """Return after how long a replica's snapshot of now arrives: not at all, once or twice."""
    for fault in faults:
        if isinstance(fault, Reports) and fault.holds(now):
            rng = stream(seed, "report", replica, now)
            lost, twice, late = rng.random(), rng.random(), rng.random()
            delay = seconds(late * fault.delay_s)
            if lost < fault.lost:
                return ()
            return (delay, 2 * delay) if twice < fault.twice else (delay,)
    return (0,)
