"""All state of a plane: plain data, so that it can be frozen, thawed and compared."""

from enum import StrEnum

from msgspec import Struct, field

from headrace.model.demand import Demand
from headrace.model.effect import Entry
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
from headrace.model.paths import Path
from headrace.model.request import Request
from headrace.model.slo import Bounds
from headrace.plane.accounts import Accounts
from headrace.plane.fleet import Fleet
from headrace.plane.ledger import Ledger
from headrace.plane.lengths import Lengths
from headrace.plane.levels import Inflow, Standing
from headrace.plane.pace import Pace
from headrace.plane.rate import Rate
from headrace.plane.scale_state import PoolScale
from headrace.policy.fairness.backlog import Backlog
from headrace.policy.predict.windows import Windows
from headrace.units import DurationNs, InstantNs, Tokens, later

EPOCH_BITS = 40
"""Attempts are counted below them and restarts above, so that no id comes twice."""


class Phase(StrEnum):
    """Where an admitted request stands. It leaves the plane when it ends."""

    QUEUED = "queued"
    DISPATCHED = "dispatched"
    STREAMING = "streaming"
    ENDED = "ended"


MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.QUEUED: frozenset({Phase.DISPATCHED, Phase.ENDED}),
    Phase.DISPATCHED: frozenset({Phase.STREAMING, Phase.ENDED}),
    Phase.STREAMING: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}
"""The legal moves. A queued request may end (expired, evicted, left); a sent one cannot go back."""


class Live(Struct):
    """One admitted request that has not ended."""

    request: Request
    model: ModelName
    """Canonical."""
    slo_class: ClassName
    demand: Demand
    bounds: Bounds
    entry: Entry
    decision: DecisionId
    revision: int
    """The policy revision it began with and ends under (ADM-6)."""
    deadline: InstantNs
    """Absolute first-token deadline."""
    latest_start: InstantNs
    """When it must be sent to meet that, as the engines stood on its arrival."""
    key: int
    """Its place within its queue."""
    way: Path
    """Where in the share tree that is."""
    first_ns: DurationNs
    """Predicted first decode step."""
    lesser: Lesser | None = None
    """In what form it is served, which `request` is in too; None: as asked."""
    phase: Phase = Phase.QUEUED
    late: bool = False
    """Relegated within its tenant."""
    attempt: AttemptId | None = None
    replica: ReplicaName | None = None
    dispatched_at: InstantNs = InstantNs(0)
    made: int = 0
    """Tokens it is known to have made, once its attempt is closed."""
    output_cap: Tokens | None = None
    """Most output tokens it is given, beside what caller, model and pool allow; as on its arrival (ADM-6)."""

    @property
    def wait_until(self) -> InstantNs | None:
        """When its caller's own bound on the wait ends it, if it gave one."""
        ttl = self.request.ttl_ns
        return None if ttl is None else later(self.entry.arrived_at, ttl)

    def advance(self, phase: Phase) -> None:
        """Move on; an illegal move is a bug and changes nothing."""
        assert phase in MOVES[self.phase], f"{self.request.id}: {self.phase} to {phase}"
        self.phase = phase


class ModelState(Struct):
    """What belongs to one model."""

    backlog: Backlog = field(default_factory=Backlog)
    fleet: Fleet = field(default_factory=Fleet)
    rates: dict[PoolName, Rate] = {}
    """At what rate queued work drains, by pool."""
    pace: Pace = field(default_factory=Pace)
    """Work that cannot wait, as it comes in."""
    lengths: dict[str, Lengths] = {}
    """What is let in of each tenant in each class, by length; the one longest without a request first."""
    inflow: Inflow = field(default_factory=Inflow)
    """What comes in, as it would be at each level of the ladders."""
    standings: dict[ClassName, Standing] = {}
    """At which level each class is that has a ladder, from its first request that agreed to one."""
    held: bool = False
    """A long prompt that can wait was held back for its sake."""
    stuck: dict[ClassName, tuple[int, int, bool]] = {}
    """By class, (request, fleet version, patient) of the last turn that found no open replica."""


class PlaneState(Struct):
    """Everything a plane knows."""

    config: bytes = b""
    source: bytes = b""
    """Digest of the configuration file that this one came from."""
    revision: int = 0
    now: InstantNs = InstantNs(0)
    attempts: int = 0
    decisions: int = 0
    live: dict[RequestId, Live] = {}
    models: dict[ModelName, ModelState] = {}
    ledger: Ledger = field(default_factory=Ledger)
    outputs: Windows = field(default_factory=Windows)
    """Lengths of answers."""
    inputs: Windows = field(default_factory=Windows)
    """Tokens that bytes of prompts came to."""
    accounts: Accounts = field(default_factory=Accounts)
    gone: dict[ReplicaName, Incarnation] = {}
    """The last incarnation of replicas that have left, the longest gone first."""
    pools: dict[PoolName, PoolScale] = {}
    """Pools that scale, and those whose groups are not all gone yet."""
    leaving: dict[ReplicaName, PoolName] = {}
    """Groups that drain, with their pools."""
    asked: int = 0
    """Groups asked for in this epoch, of whatever pool."""
    scale_frozen: bool = False
    """An operator froze the number of groups."""
    week_ahead_ns: int = 0
    """By how much the time since Monday 0:00 UTC is ahead of the plane's own."""
    ignored: dict[str, int] = {}
    """Late, duplicate and unknown events by kind: expected, counted, without effect."""


__all__ = ["EPOCH_BITS", "MOVES", "Live", "ModelState", "Phase", "PlaneState", "TenantId"]
