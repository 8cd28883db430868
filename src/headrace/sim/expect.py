"""What is expected of a fleet in which something goes wrong, and did it hold?

Few kinds, each a figure and its bounds. They look at an `Account` alone, which a simulated and a live run
leave alike.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import zip_longest
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from headrace.model.decision import Reason
from headrace.model.effect import Concluded
from headrace.model.ids import ClassName, PoolName, ReplicaName
from headrace.model.scaling import ScaleRecord, Steps
from headrace.model.slo import Outcome
from headrace.report.run import Offered
from headrace.units import InstantNs, seconds, to_seconds

_Seconds = Annotated[float, Meta(ge=0, le=86_400)]
LAST_S = 180.0
"""How long before the end GPUs are looked at that may have leaked."""


class Fleet(Struct, frozen=True, kw_only=True, gc=False):
    """All groups of pools that scale, from an instant on."""

    at: InstantNs
    ready: int
    """Groups that take requests."""
    gpus: int
    """GPUs that are held, whatever for."""
    idle: int
    """Of these, those of groups that are not ready."""


class Account(Struct, frozen=True, kw_only=True):
    """What a run leaves behind for its expectations. Instants count from its beginning."""

    offered: list[Offered]
    rows: list[Concluded]
    """One for each offered request."""
    decisions: list[ScaleRecord]
    """Of the scaler, in order."""
    fleet: list[Fleet]
    """Each change, in order; the last one holds to the end."""
    end: InstantNs
    """When the last request was over."""


class Expectation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """One figure of a run and what it may be."""

    at_least: float | None = None
    at_most: float | None = None
    from_s: _Seconds = 0.0
    to_s: _Seconds | None = None
    """Up to when, this instant left out. None: to the end of the run."""

    def __post_init__(self) -> None:
        """Refuse one that any run would meet, or that has no time."""
        if self.at_least is None and self.at_most is None:
            raise ValueError("expected at_least, at_most or both")
        if self.to_s is not None and self.to_s <= self.from_s:
            raise ValueError(f"to_s {self.to_s:g} is not after from_s {self.from_s:g}")

    def measured(self, account: Account) -> float | None:
        """Return the figure; None: there was nothing to measure."""
        raise NotImplementedError

    def says(self) -> str:
        """Return what the figure is, in words."""
        raise NotImplementedError

    def holds(self, measured: float | None) -> bool:
        """Return whether a figure is within its bounds; one that was not measured is not."""
        if measured is None:
            return False
        low = self.at_least is None or measured >= self.at_least
        return low and (self.at_most is None or measured <= self.at_most)

    def within(self, at: InstantNs) -> bool:
        """Return whether an instant is looked at."""
        return seconds(self.from_s) <= at and (self.to_s is None or at < seconds(self.to_s))

    def bound(self) -> str:
        """Return what the figure may be, in words."""
        low, high = self.at_least, self.at_most
        if low is not None and high is not None:
            return f"{low:g} to {high:g}"
        return f">= {low:g}" if low is not None else f"<= {high:g}"

    def window(self) -> str:
        """Return the time that is looked at, in words."""
        if self.to_s is not None:
            return f"{self.from_s:g} to {self.to_s:g} s"
        return f"from {self.from_s:g} s" if self.from_s else ""

    def decided(self, account: Account) -> Iterator[ScaleRecord]:
        """Yield what was decided in the time."""
        return (one for one in account.decisions if self.within(one.at))

    def during(self, account: Account) -> Iterator[Fleet]:
        """Yield how the fleet stood in the time, from what it began with."""
        for one, following in zip_longest(account.fleet, account.fleet[1:]):
            ended = following is not None and following.at <= seconds(self.from_s)
            begun = self.to_s is None or one.at < seconds(self.to_s)
            if begun and not ended:
                yield one


class AttainmentOf(Expectation, frozen=True, kw_only=True, tag="attainment"):
    """Share of a class's requests that met every bound, of those that came within the time."""

    slo_class: ClassName
    admitted: bool = False
    """Of those that were let in alone. False: of all that were offered (SLO-4)."""

    def measured(self, account: Account) -> float | None:
        """Return met over offered, or over admitted."""
        mine = [
            row
            for row in account.rows
            if row.slo_class == self.slo_class
            and self.within(row.entry.arrived_at)
            and (row.admitted or not self.admitted)
        ]
        return sum(row.met for row in mine) / len(mine) if mine else None

    def says(self) -> str:
        """Say whose."""
        return f"{self.slo_class} met over {'admitted' if self.admitted else 'offered'}"


class Ended(Expectation, frozen=True, kw_only=True, tag="ended"):
    """Requests that were refused or ended early for one reason, by when they came."""

    reason: Reason

    def measured(self, account: Account) -> float | None:
        """Count them."""
        rows = (one for one in account.rows if self.within(one.entry.arrived_at))
        return sum(row.reason == self.reason for row in rows)

    def says(self) -> str:
        """Say for what."""
        return f"requests ended by {self.reason}"


class StreamsLost(Expectation, frozen=True, kw_only=True, tag="streams_lost"):
    """Requests that ended with an error or ran out of time on a group, by when they came."""

    def measured(self, account: Account) -> float | None:
        """Count them."""
        return sum(_lost(row) and self.within(row.entry.arrived_at) for row in account.rows)

    def says(self) -> str:
        """Say what."""
        return "streams lost"


class TokensLost(Expectation, frozen=True, kw_only=True, tag="tokens_lost"):
    """Tokens that answers were to have and did not get, their callers left aside who went away."""

    def measured(self, account: Account) -> float | None:
        """Count what is missing of admitted requests that came within the time."""
        owed = {one.request: one.output_tokens for one in account.offered}
        return sum(
            max(0, owed[row.request] - _given(row))
            for row in account.rows
            if (_lost(row) or row.outcome is Outcome.SUCCESS) and self.within(row.entry.arrived_at)
        )

    def says(self) -> str:
        """Say what."""
        return "tokens lost"


class GroupsReady(Expectation, frozen=True, kw_only=True, tag="groups"):
    """The fewest groups that were ready at any moment of the time."""

    def measured(self, account: Account) -> float | None:
        """Return the fewest."""
        return min((one.ready for one in self.during(account)), default=None)

    def says(self) -> str:
        """Say what."""
        return "fewest groups ready"


class GroupsAtEnd(Expectation, frozen=True, kw_only=True, tag="groups_at_end"):
    """Groups that are ready when the last request is over."""

    def measured(self, account: Account) -> float | None:
        """Return how many."""
        return account.fleet[-1].ready if account.fleet else None

    def says(self) -> str:
        """Say what."""
        return "groups ready at the end"


class Gpus(Expectation, frozen=True, kw_only=True, tag="gpus"):
    """The most GPUs that were held at any moment of the time."""

    def measured(self, account: Account) -> float | None:
        """Return the most."""
        return max((one.gpus for one in self.during(account)), default=None)

    def says(self) -> str:
        """Say what."""
        return "most GPUs held"


class Leaked(Expectation, frozen=True, kw_only=True, tag="leaked"):
    """GPUs that groups held without being ready all through the last three minutes: longer than a start or a drain."""

    def measured(self, account: Account) -> float | None:
        """Return how many, at the least."""
        last = replace(self, from_s=max(0.0, to_seconds(account.end) - LAST_S), to_s=None)
        return min((one.idle for one in last.during(account)), default=None)

    def says(self) -> str:
        """Say what."""
        return "GPUs held for nothing at the end"


class Desired(Expectation, frozen=True, kw_only=True, tag="desired"):
    """The most groups that the scaler wanted at any decision of the time."""

    def measured(self, account: Account) -> float | None:
        """Return the most."""
        return max((one.decision.desired for one in self.decided(account)), default=None)

    def says(self) -> str:
        """Say what."""
        return "most groups desired"


class DesiredLowered(Expectation, frozen=True, kw_only=True, tag="desired_lowered"):
    """Decisions of the time that wanted fewer groups than the one before of the same pool."""

    def measured(self, account: Account) -> float | None:
        """Count them; None: nothing was decided."""
        found: int | None = None
        last: dict[PoolName, int] = {}
        for one in account.decisions:
            pool, desired = one.evidence.pool, one.decision.desired
            if self.within(one.at):
                found = (found or 0) + (desired < last.get(pool, 0))
            last[pool] = desired
        return found

    def says(self) -> str:
        """Say what."""
        return "times fewer groups were desired"


class Step(StrEnum):
    """What the scaler does with groups."""

    ASK = "ask"
    WAKE = "wake"
    RECALL = "recall"
    CANCEL = "cancel"
    RELEASE = "release"
    DRAIN = "drain"


class StepsTaken(Expectation, frozen=True, kw_only=True, tag="steps"):
    """Groups with which the scaler did one thing."""

    step: Step

    def measured(self, account: Account) -> float | None:
        """Count them; None: nothing was decided."""
        found = [_count(one.decision.steps, self.step) for one in self.decided(account)]
        return sum(found) if found else None

    def says(self) -> str:
        """Say which thing."""
        return f"groups: {self.step}"


Expected = (
    AttainmentOf
    | Ended
    | StreamsLost
    | TokensLost
    | GroupsReady
    | GroupsAtEnd
    | Gpus
    | Leaked
    | Desired
    | DesiredLowered
    | StepsTaken
)

OF_GROUPS = (GroupsReady, GroupsAtEnd, Gpus, Leaked, Desired, DesiredLowered, StepsTaken)
"""Those that look at groups and at what the scaler decided."""


class Verdict(Struct, frozen=True, kw_only=True):
    """One expectation and what came of it."""

    what: str
    bound: str
    """Such as `>= 0.99`."""
    window: str
    """Such as `300 to 900 s`; empty: the whole run."""
    measured: float | None
    """None: there was nothing to measure, which is no success."""
    holds: bool


def judge(expected: Iterable[Expected], account: Account) -> tuple[Verdict, ...]:
    """Return what came of each expectation, in order."""
    found = []
    for one in expected:
        measured = one.measured(account)
        verdict = Verdict(
            what=one.says(),
            bound=one.bound(),
            window=one.window(),
            measured=measured,
            holds=one.holds(measured),
        )
        found.append(verdict)
    return tuple(found)


def _lost(row: Concluded) -> bool:
    """Return whether an answer broke off; one that never was sent to a group was none."""
    return row.replica is not None and row.outcome in (Outcome.ERROR, Outcome.TIMEOUT)


def _given(row: Concluded) -> int:
    """Return the output tokens that a caller had."""
    if row.usage is not None:
        return row.usage.output_tokens
    return 0 if row.timing is None else row.timing.tokens


def _count(steps: Steps, step: Step) -> int:
    taken: int | tuple[ReplicaName, ...] = getattr(steps, step)
    return taken if isinstance(taken, int) else len(taken)
