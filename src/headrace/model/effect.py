"""What the plane wants done: every output it ever gives."""

from msgspec import Struct

from headrace.model.decision import Reason, Reject
from headrace.model.engine import Usage
from headrace.model.evidence import DecisionRecord
from headrace.model.ids import (
    AttemptId,
    ClassName,
    DecisionId,
    Incarnation,
    ModelName,
    PoolName,
    ReplicaName,
    RequestId,
    TenantId,
)
from headrace.model.ladder import Lesser
from headrace.model.meter import StreamTiming
from headrace.model.paths import Path
from headrace.model.slo import Bounds, Indicator, Indicators, Outcome
from headrace.units import DurationNs, InstantNs, Tokens, WorkNs


class Dispatch(Struct, frozen=True, kw_only=True, tag="dispatch", gc=False):
    """Send a request to a replica, with what an engine that schedules by our rules needs."""

    request: RequestId
    attempt: AttemptId
    decision: DecisionId
    replica: ReplicaName
    incarnation: Incarnation
    output_limit: Tokens
    tenant: TenantId
    slo_class: ClassName
    deadline: InstantNs
    relegated: bool
    way: Path
    """Where it stands in the share tree, with the weights there."""
    counters: tuple[int, ...]
    """The virtual counters on that way (service / weight), before it was charged for; zeros where nobody
    else waited: then they say nothing of whose turn it was."""
    gap_ns: DurationNs
    first_ns: DurationNs = DurationNs(0)
    """Prefill that stands before its first token at the replica, its own included: when nothing
    tells of a first token, it is taken to come then."""
    lesser: Lesser | None = None
    """In what lesser form it is served; None: as asked."""


class Refuse(Struct, frozen=True, kw_only=True, tag="refuse"):
    """Answer with an error; nothing of the answer was sent."""

    request: RequestId
    decision: DecisionId
    rejection: Reject


class Fail(Struct, frozen=True, kw_only=True, tag="fail", gc=False, omit_defaults=True):
    """End an admitted request that cannot go on: an error before the first byte or mid-stream."""

    request: RequestId
    decision: DecisionId
    reason: Reason
    retry_after_ns: DurationNs | None = None
    """When repeating can succeed, where that was computed; None: nobody knows."""


class Cancel(Struct, frozen=True, kw_only=True, tag="cancel", gc=False):
    """Stop an attempt at its replica; no one waits for it any more."""

    attempt: AttemptId
    replica: ReplicaName
    incarnation: Incarnation


class Migrate(Struct, frozen=True, kw_only=True, tag="migrate", gc=False):
    """Move a stream from the replica that it runs on to another, while it goes on: `Migrated` tells how that went.

    Both have it booked until then. Nothing is told if it ends meanwhile, or is lost with the old one.
    """

    attempt: AttemptId
    replica: ReplicaName
    """The one that it runs on."""
    incarnation: Incarnation
    target: ReplicaName
    target_incarnation: Incarnation


class Decided(Struct, frozen=True, tag="decided"):
    """Write this into the decision log (OBS-1)."""

    record: DecisionRecord


class AskGroup(Struct, frozen=True, kw_only=True, tag="ask_group", gc=False):
    """Ask for a group by a name that is new."""

    group: ReplicaName
    pool: PoolName
    standby: bool = False
    """It is to go to sleep when it is ready."""


class WakeGroup(Struct, frozen=True, kw_only=True, tag="wake_group", gc=False):
    """A standby group is to serve."""

    group: ReplicaName
    pool: PoolName


class DrainGroup(Struct, frozen=True, kw_only=True, tag="drain_group", gc=False):
    """A group takes nothing new, and will be stopped once nothing runs there: for whoever shows it."""

    group: ReplicaName
    pool: PoolName


class RecallGroup(Struct, frozen=True, kw_only=True, tag="recall_group", gc=False):
    """A drain was called off: the group takes requests again."""

    group: ReplicaName
    pool: PoolName


class StopGroup(Struct, frozen=True, kw_only=True, tag="stop_group", gc=False):
    """Give a group back, whatever its stage, and all that it holds.

    What still runs there has had its time: its `ReplicaDown` tells what the streams had shown. Then the
    group is told of as stopped.
    """

    group: ReplicaName
    pool: PoolName


class Entry(Struct, frozen=True, kw_only=True, gc=False):
    """Where a request stood when it entered: part of every outcome's record."""

    arrived_at: InstantNs
    input_tokens: Tokens
    predicted_output: Tokens
    """p50 at arrival."""
    work_ns: WorkNs
    """Predicted work at arrival, p50."""


class Concluded(Struct, frozen=True, kw_only=True, tag="concluded"):
    """An offered request is over: one per request, the row that every SLO figure is made of."""

    request: RequestId
    tenant: TenantId
    slo_class: ClassName
    model: ModelName
    entry: Entry
    admitted: bool
    """False: rejected at the door, or left before a decision."""
    reason: Reason | None
    """Why it was refused or ended early."""
    outcome: Outcome | None
    """None if it was never admitted."""
    bounds: Bounds
    replica: ReplicaName | None = None
    usage: Usage | None = None
    indicators: Indicators | None = None
    timing: StreamTiming | None = None
    missed: tuple[Indicator, ...] = ()
    """Per-request bounds that were missed."""
    work_ns: WorkNs = WorkNs(0)
    """Work of what was served, by the engine's usage as if nothing were cached."""
    ended_at: InstantNs = InstantNs(0)
    level: int = 0
    """Of the ladder: in what form it was served; 0: as asked."""
    deferred: bool = False
    """It was handed over, to be answered later: admitted once it was sent; what goes back is not over."""

    @property
    def met(self) -> bool:
        """Whether it counts for goodput: admitted, succeeded and inside every declared bound.

        An answer without a token kept no bound.
        """
        answered = self.outcome is Outcome.SUCCESS and self.indicators is not None
        return self.admitted and answered and not self.missed


GroupEffect = AskGroup | WakeGroup | DrainGroup | RecallGroup | StopGroup
Effect = Dispatch | Refuse | Fail | Cancel | Migrate | Decided | Concluded | GroupEffect
