"""How much deferred work may run now? As much as live traffic leaves over, found by trying.

Additive increase, multiplicative decrease (Chiu and Jain 1989), as TCP finds its part of a link that it
knows nothing of: one job more while nobody is in the way, half as many as soon as somebody is. A live
request that waits is in the way the second time that it is looked: a window that is closed for the length
of a prompt says nothing of how many jobs run. Nothing is taken up meanwhile. Pure: a driver tells what it
saw, and asks again some twenty times a second.
"""

from typing import Annotated

from msgspec import Meta, Struct

from headrace.units import MICRO


class Seen(Struct, frozen=True, kw_only=True, gc=False):
    """What was seen of one model since it was asked last."""

    waiting: int
    """Requests of live callers that wait for a replica now."""
    refused: int
    """Those turned away, or ended in the queue, for want of capacity since then."""
    slack_ppm: int | None
    """The least part of a bound, in millionths, that answers to them had left; below 0: missed. None: no
    answer with a bound ended since."""
    open: int
    """Replicas that may be sent a job now and keep room for live traffic."""
    running: int
    """Jobs under way, those included that wait for a replica."""
    stuck: int
    """Of these, those that wait for a replica."""
    more: bool
    """Whether others wait to be taken up."""


class Pace(Struct, frozen=True, gc=False):
    """What is remembered from one time to the next."""

    limit: int = 1
    """Jobs that may be under way."""
    full: bool = False
    """As many were."""
    disturbed: bool = False
    """Live traffic was in the way."""
    waited: bool = False
    """A live request waited for a replica."""


class Room(Struct, frozen=True, gc=False):
    """What is to be done."""

    pace: Pace
    take: int = 0
    """Jobs to take up now."""
    withdraw: bool = False
    """Whether jobs that still wait for a replica go back to where they came from."""


class Leftover(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rule and its bounds, for each model."""

    at_once: Annotated[int, Meta(ge=1, le=10_000)] = 256
    """Most jobs under way. 256: what one replica runs at most; their bodies are held in memory."""
    slack: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Part of a bound that live answers must have left; below, jobs become fewer. 0.1: enough for a
    prompt or two more beside them."""
    reserve: Annotated[float, Meta(ge=0, le=0.9)] = 0.1
    """Part of a replica's memory and slots that jobs leave free, so that a burst finds room before any
    of them has ended. 0.1: they run for seconds, and a burst takes no more in that time."""
    burst: Annotated[int, Meta(ge=1, le=1_000)] = 4
    """Jobs taken up at a time for each open replica. 4: about what its dispatch window takes."""

    def room(self, pace: Pace, seen: Seen) -> Room:
        """Return how many jobs may run, and how many to take up now.

        The limit is halved once for each time that live traffic is in the way; until it is not, nothing is
        taken up at all. It grows only where it was reached: jobs may have ended since.
        """
        short = seen.slack_ppm is not None and seen.slack_ppm < self.slack * MICRO
        waits = seen.waiting > 0
        limit, disturbed = pace.limit, pace.disturbed
        if seen.refused or short or (waits and pace.waited):
            if not disturbed:
                limit = max(1, min(limit, seen.running) // 2)
            disturbed = True
        elif not waits:
            disturbed = False
        if waits or disturbed:
            return Room(
                Pace(limit, disturbed=disturbed, waited=waits), withdraw=waits and seen.stuck > 0
            )
        if seen.stuck or not seen.open or not seen.more:
            return Room(Pace(min(pace.limit, self.at_once)))
        limit = min(pace.limit + pace.full, self.at_once)
        take = max(0, min(limit - seen.running, self.burst * seen.open))
        return Room(Pace(limit, full=seen.running + take >= limit), take)
