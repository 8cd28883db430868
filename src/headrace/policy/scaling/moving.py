"""Which stream of a group that is to go is moved next?

The one that would keep the group for longest. What is about to end stays: it is over before a move would
have been worth its pause.
"""

from collections.abc import Iterable

from msgspec import Struct

from headrace.model.ids import AttemptId
from headrace.units import NS_PER_S, DurationNs, Tokens

STAY_NS = NS_PER_S
"""What is expected to end within this stays. 1 s: forty pauses of a move."""


class Running(Struct, frozen=True, kw_only=True, gc=False):
    """One stream of a group that is to go."""

    attempt: AttemptId
    made: Tokens
    predicted: Tokens
    """Of the whole answer, p50."""
    stayed: int
    """How often it was to be moved and was not."""

    @property
    def left(self) -> int:
        """Tokens that are expected yet: one that has outgrown its prediction goes on for as long again."""
        return self.predicted - self.made if self.predicted > self.made else self.made


def in_turn(running: Iterable[Running], step_ns: DurationNs) -> list[AttemptId]:
    """Return those to be moved, first those not tried in vain, of them the longest; `step_ns`: of one token."""
    worth = [one for one in running if one.left * step_ns > STAY_NS]
    return [one.attempt for one in sorted(worth, key=_turn)]


def _turn(one: Running) -> tuple[int, int, AttemptId]:
    return one.stayed, -one.left, one.attempt
