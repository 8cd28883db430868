"""What goes wrong, and when: plain data, drawn beforehand, so that a run is its seed.

The plane is told of nothing here but a drain; it sees lost, late and repeated events as it would live.
"""

from random import Random
from typing import Annotated

from msgspec import Meta, Struct

from headrace.model.group import Domain
from headrace.units import NS_PER_S, DurationNs, InstantNs, seconds

_Seconds = Annotated[float, Meta(ge=0, le=86_400)]
_Share = Annotated[float, Meta(ge=0, le=1)]


def _check_span(at_s: float, until_s: float | None) -> None:
    if until_s is not None and until_s <= at_s:
        raise ValueError(f"until_s {until_s:g} is not after at_s {at_s:g}")


def _within(at_s: float, until_s: float | None, now: InstantNs) -> bool:
    return seconds(at_s) <= now and (until_s is None or now < seconds(until_s))


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
    """A replica takes longer for every step than its profile says: its collectives, its kernels, its clock."""

    replica: Annotated[int, Meta(ge=0)] | None = None
    """None: all of them do."""
    factor: Annotated[float, Meta(ge=1, le=20)] = 2.0
    at_s: _Seconds = 0.0
    until_s: _Seconds | None = None
    """None: to the end."""

    def __post_init__(self) -> None:
        """Refuse one without a time."""
        _check_span(self.at_s, self.until_s)

    def holds(self, replica: int, now: InstantNs) -> bool:
        """Return whether a replica is slow now."""
        return self.replica in (None, replica) and _within(self.at_s, self.until_s, now)


class Reports(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="reports"
):
    """Snapshots get lost, arrive late or twice."""

    lost: _Share = 0.0
    twice: _Share = 0.0
    delay_s: _Seconds = 0.0
    """Longest delay; each is drawn evenly up to it."""
    at_s: _Seconds = 0.0
    until_s: _Seconds | None = None
    """None: to the end."""

    def __post_init__(self) -> None:
        """Refuse one without a time."""
        _check_span(self.at_s, self.until_s)

    def holds(self, now: InstantNs) -> bool:
        """Return whether snapshots of now are concerned."""
        return _within(self.at_s, self.until_s, now)


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


class DomainLoss(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="domain_loss",
):
    """All that stands in one failure domain is gone at once, and nothing is placed there meanwhile."""

    of: Domain
    """Which kind of domain."""
    name: str | None = None
    """As `scaling.domains` has it. None: the one that has the most groups then."""
    at_s: _Seconds
    noticed_after_s: _Seconds = 0.2
    streams_break: bool = True
    back_after_s: _Seconds | None = None
    """From when on groups may be placed there again. None: never."""


class RankLoss(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="rank"
):
    """One rank of a group is gone: none of the others serves anything without it, and they are held."""

    group: Annotated[int, Meta(ge=0)] = 0
    """Which of those that serve then."""
    at_s: _Seconds
    held: bool = False
    """Whether its GPU, which is broken, is held like the others until somebody gives the group back."""
    noticed_after_s: _Seconds = 0.2
    streams_break: bool = True
    back_after_s: _Seconds | None = None
    """When it has a place again, and the group starts anew. None: never."""


class ColdCache(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="cold_cache",
):
    """All replicas drop the prefixes that nothing runs on."""

    at_s: _Seconds
    told: bool = False
    """Whether anybody tells the plane."""


class Update(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="update"
):
    """All groups that serve are restarted where they are, one after the other, each once the last is back."""

    at_s: _Seconds
    time_s: _Seconds = 60.0
    """How long each may take for what runs there."""
    recompiles: bool = True
    """Whether every start from then on compiles anew, whatever was cached."""


class Canary(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="canary"
):
    """Somebody starts one group of a new revision in the first pool that scales."""

    at_s: _Seconds
    factor: Annotated[float, Meta(ge=1, le=20)] = 1.0
    """Each of its steps takes so many times as long."""
    correct: bool = True
    """Whether it ever makes the token that it has to make before it serves."""


OfGroups = DomainLoss | RankLoss | Update | Canary
"""What befalls groups of pools that scale, and no others."""
Fault = (
    Crash | Drain | Slow | Reports | Leavers | Repeaters | Restart | Starts | ColdCache | OfGroups
)
