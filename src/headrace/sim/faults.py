"""What goes wrong, and when: plain data, drawn beforehand, so that a run is its seed.

The plane is told of nothing here but a drain; it sees lost, late and repeated events as it would live.
"""

from random import Random
from typing import Annotated

from msgspec import Meta, Struct

from headrace.units import NS_PER_S, DurationNs

_Seconds = Annotated[float, Meta(ge=0, le=86_400)]
_Share = Annotated[float, Meta(ge=0, le=1)]


class Crash(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="crash"
):
    """A replica dies with all it holds and may come back as another incarnation."""

    replica: Annotated[int, Meta(ge=0)]
    at_s: _Seconds
    noticed_after_s: _Seconds = 0.2
    """Until the driver tells the plane that the replica is down."""
    streams_break: bool = True
    """Whether each stream's end is seen too, before the replica is known to be down."""
    back_after_s: _Seconds | None = None
    """None: it stays away."""


class Drain(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="drain"
):
    """A replica is to go: it takes nothing new, and has its time for what it holds."""

    replica: Annotated[int, Meta(ge=0)]
    at_s: _Seconds
    time_s: _Seconds = 30.0
    """From then until it is stopped, with what still runs there."""
    back_after_s: _Seconds | None = None
    """None: it stays away."""


class Slow(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="slow"
):
    """A replica takes longer for every step than its profile says, from the start."""

    replica: Annotated[int, Meta(ge=0)]
    factor: Annotated[float, Meta(ge=1, le=20)] = 2.0


class Reports(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="reports"
):
    """Snapshots get lost, arrive late or twice."""

    lost: _Share = 0.0
    twice: _Share = 0.0
    delay_s: _Seconds = 0.0
    """Longest delay; each is drawn evenly up to it."""


class Leavers(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="leavers"
):
    """Callers leave, in whatever phase their request then is."""

    share: _Share = 0.1
    within_s: Annotated[float, Meta(gt=0, le=86_400)] = 5.0


class Restart(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="restart"
):
    """The driver dies and comes back from its last checkpoint; every stream is cut."""

    at_s: _Seconds
    checkpoint_age_s: _Seconds = 0.5


class Repeaters(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="repeaters"
):
    """Callers who were refused, and for whom repeating can help, ask again as the public clients do."""

    times: Annotated[int, Meta(ge=1, le=10)] = 2

    def delay_ns(self, nth: int, told: DurationNs | None, rng: Random) -> DurationNs:
        """Return how long a caller waits after its nth refusal: as it was told, else half a second.

        That doubles each time, to eight seconds at most; up to a quarter comes on top of either.
        """
        base = told if told is not None else min(8, 2 ** (nth - 1) / 2) * NS_PER_S
        return DurationNs(int(base * (1 + rng.random() / 4)))


class Starts(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="starts"
):
    """Groups that are asked for do not come as they should; each share is of all starts."""

    refused: _Share = 0.0
    """Nothing of them is placed, and that is said."""
    never: _Share = 0.0
    """Nothing of them is placed, and nothing is said."""
    partial: _Share = 0.0
    """Half of their ranks are placed, and no more."""
    lost: _Share = 0.0
    """They go in one of their stages, and are started again."""
    slow: _Share = 0.0
    """One of their stages takes `factor` times as long."""
    factor: Annotated[float, Meta(ge=1, le=100)] = 10.0

    def __post_init__(self) -> None:
        """Refuse shares of more than all."""
        if self.refused + self.never + self.partial + self.lost + self.slow > 1:
            raise ValueError("the shares of starts that go wrong come to more than 1")


Fault = Crash | Drain | Slow | Reports | Leavers | Repeaters | Restart | Starts
