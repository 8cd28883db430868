"""What happens to the plane: every input it ever sees, plain enough to be stored and replayed."""

from msgspec import Struct

from headrace.model.engine import Snapshot, Usage
from headrace.model.group import Ail, GroupStep, Place
from headrace.model.ids import AttemptId, Incarnation, PoolName, ReplicaName, RequestId
from headrace.model.meter import NO_STREAM, StreamTiming
from headrace.model.request import Request
from headrace.model.slo import Outcome


class ConfigChanged(Struct, frozen=True, kw_only=True, tag="config", omit_defaults=True):
    """The resolved configuration in canonical bytes: the first event of every journal."""

    revision: int
    config: bytes
    source: bytes = b""
    """Digest of what the configuration file said then, of which policy may have been changed since."""


class RequestArrived(Struct, frozen=True, tag="arrived"):
    """A request was read and its key accepted."""

    request: Request


class RequestDeferred(Struct, frozen=True, tag="deferred"):
    """A request was put aside, to be answered later: when its turn comes it arrives, as `deferred`."""

    request: Request


class CallerLeft(Struct, frozen=True, tag="left", gc=False):
    """The caller is gone: queued, before the first byte or mid-stream."""

    request: RequestId
    timing: StreamTiming = NO_STREAM
    """What its stream had shown by then: a slow stream does not look better for being left."""


class ShutDown(Struct, frozen=True, tag="shut_down", gc=False):
    """The gateway ends, and this request with it: its time to finish is over."""

    request: RequestId
    timing: StreamTiming = NO_STREAM
    """What its stream had shown by then."""


class FirstToken(Struct, frozen=True, tag="first", gc=False):
    """An attempt's first content-bearing token was seen."""

    attempt: AttemptId


class ProgressTick(Struct, frozen=True, tag="tick"):
    """Tokens made so far by every stream that moved since the last tick (every 100 ms)."""

    moved: tuple[tuple[AttemptId, int], ...]


class Ended(Struct, frozen=True, kw_only=True, tag="ended"):
    """An attempt ended, whatever way; sent from `finally`, exactly once if nothing is lost."""

    attempt: AttemptId
    outcome: Outcome
    usage: Usage | None
    """None: the engine gave no final count; tokens seen are settled instead."""
    timing: StreamTiming


class ReplicaUp(Struct, frozen=True, kw_only=True, tag="up", gc=False):
    """A replica is ready to serve; a known name with a new incarnation is another replica."""

    replica: ReplicaName
    incarnation: Incarnation
    pool: PoolName


class ReplicaDown(Struct, frozen=True, kw_only=True, tag="down", gc=False):
    """A replica is gone, and with it every attempt it held."""

    replica: ReplicaName
    incarnation: Incarnation
    timings: tuple[tuple[AttemptId, StreamTiming], ...] = ()
    """What the streams it held had shown by then, as far as the driver knows."""


class ReplicaDraining(Struct, frozen=True, kw_only=True, tag="draining", gc=False):
    """A replica is to take nothing new; what it has goes on, and its `ReplicaDown` follows."""

    replica: ReplicaName
    incarnation: Incarnation


class ReplicaReported(Struct, frozen=True, tag="report", gc=False):
    """A scrape succeeded, perhaps late, perhaps twice."""

    snapshot: Snapshot


class ReplicaForgot(Struct, frozen=True, kw_only=True, tag="forgot", gc=False):
    """A replica's cache was cleared, or what became of it was not heard: believe nothing of it."""

    replica: ReplicaName
    incarnation: Incarnation


class GroupTold(Struct, frozen=True, kw_only=True, tag="group", omit_defaults=True, gc=False):
    """Something was heard of a group of a pool that scales, known or not.

    That it serves is told by `ReplicaUp` and `ReplicaDown`, as of any replica: the group's name is its.
    """

    group: ReplicaName
    pool: PoolName
    step: GroupStep
    gpus: int
    """GPUs it holds now: fewer than it needs serve nothing."""
    stage: str | None = None
    """Of a start, which it is in: as in `model.stages`. None: it is in none, or nobody knows."""
    places: tuple[Place, ...] = ()
    """Where its ranks are, each place once; empty: nobody knows."""
    ails: tuple[Ail, ...] | None = None
    """What is amiss with it; empty: it is well. None: nobody tells, and what was told stays."""
    does_ppm: int | None = None
    """The part of its envelope that it does, in millionths, where `ails` are told; None: nobody knows."""


class GroupsListed(Struct, frozen=True, kw_only=True, tag="groups"):
    """All groups that there are, of all pools that scale: what a driver tells after it came back.

    A group that is not among them is over.
    """

    groups: tuple[GroupTold, ...]


class ScaleFrozen(Struct, frozen=True, tag="scale_frozen", gc=False):
    """An operator froze the number of groups of all pools, or let it go again."""

    frozen: bool


class WallTold(Struct, frozen=True, tag="wall", gc=False):
    """What the time of day is now: schedules go by it. Until it is told, the run began on a Monday at 0:00."""

    wall_s: int
    """Seconds since 1970 (UTC)."""


class TimerDue(Struct, frozen=True, tag="timer", gc=False):
    """`handle_timer` was called; journals keep it, so that replay sees the same calls."""


class Restarted(Struct, frozen=True, tag="restarted", gc=False):
    """The driver restarted from a checkpoint: no stream survived, budgets and counters did."""

    epoch: int
    """Counts the restarts; attempts of another epoch can never be mistaken for ours."""


Event = (
    ConfigChanged
    | RequestArrived
    | RequestDeferred
    | CallerLeft
    | ShutDown
    | FirstToken
    | ProgressTick
    | Ended
    | ReplicaUp
    | ReplicaDown
    | ReplicaDraining
    | ReplicaReported
    | ReplicaForgot
    | GroupTold
    | GroupsListed
    | ScaleFrozen
    | WallTold
    | TimerDue
    | Restarted
)
