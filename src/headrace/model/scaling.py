"""What the scaler knew of a pool, and what it decided: values that are stored, compared and recomputed.

Rates are work-seconds per second in millionths (`_micro`), work is ns of GPU time, shares are millionths
(`_ppm`). None is unknown everywhere: neither zero nor full.
"""

from enum import StrEnum

from msgspec import Struct

from headrace.model.ids import DecisionId, Incarnation, PoolName, ReplicaName
from headrace.units import Blocks, DurationNs, InstantNs, WorkNs


class Standing(StrEnum):
    """How a group of a pool stands, as the scaler counts it."""

    READY = "ready"
    COMING = "coming"
    """Asked for, or woken, and to serve when it is ready."""
    STANDBY = "standby"
    """Asleep, or on its way to that: no supply."""
    DRAINING = "draining"
    """No supply, until the drain is called off."""
    STOPPING = "stopping"


class GroupFacts(Struct, frozen=True, kw_only=True):
    """One group that is there, whatever its state. Only these count: samples of others do not."""

    group: ReplicaName
    incarnation: Incarnation
    standing: Standing
    gpus: int
    """GPUs it holds."""
    envelope_micro: int | None = None
    """C: work rate that holds the SLO, of an envelope with its fingerprint; None: there is none."""
    effective_ppm: int | None = None
    """Measured part of that it can do now: a slow rank, a kernel fallback, a canary's share."""
    domain: str = ""
    """The failure domain it stands in."""
    since: InstantNs
    """When it became what it is."""
    arrival_p50_ns: DurationNs = DurationNs(0)
    """Until it is ready, if it is coming or asleep."""
    arrival_p90_ns: DurationNs = DurationNs(0)
    success_ppm: int = 1_000_000
    """Chance that it gets there."""
    progress: int = 0
    """Stages it has been through: those least far are given up first."""
    overdue: bool = False
    """It lacks ranks and its time for that is over: it is released."""
    remaining_ns: WorkNs = WorkNs(0)
    """Predicted work of what runs there."""
    prefix_ns: WorkNs = WorkNs(0)
    """Prefill that its cached prefixes are expected to save before they would have been dropped."""


class GroupSample(Struct, frozen=True, kw_only=True):
    """What an engine last said of itself; of one that never tells, what the gateway's own books say."""

    group: ReplicaName
    incarnation: Incarnation
    """Of which life: that of another one says nothing."""
    age_ns: DurationNs
    blocks_held: Blocks
    """KV blocks reserved or in use, without those of requests that give way to any other."""
    blocks_total: Blocks
    utilization_ppm: int | None = None
    """Part of the last tick in which something ran there, by the gateway's own books: shown, and a reason
    only where the pool is told to go by it."""


class DemandFacts(Struct, frozen=True, kw_only=True):
    """What is offered to the pool, counted as it comes in: what completes is capped by what is there.

    Urgent is work of classes with a first-token bound. Patient is work with a bound on its end alone;
    work of classes without any bound takes what is left over, and asks for nothing.
    """

    urgent_micro: int
    """Offered rate of urgent first tries, as the mean of a minute or so: windows remember the largest
    they saw, so noise costs groups."""
    retries_micro: int = 0
    """Of urgent repeats, apart."""
    urgent_ns: WorkNs = WorkNs(0)
    """Urgent work that waits."""
    active_ns: WorkNs = WorkNs(0)
    """What is left of what runs."""
    patient_ns: WorkNs = WorkNs(0)
    """Patient work that waits."""
    patient_left_ns: DurationNs | None = None
    """Until the bound of most of it."""
    leftover_ns: WorkNs = WorkNs(0)
    """Waiting work of classes without any bound: shown alone."""
    budget_ns: DurationNs | None = None
    """Tightest first-token bound of the urgent classes, less the prefill of a usual prompt."""
    expires: bool = True
    """Whether urgent work that cannot meet its bound is ended: then no more of it can wait than
    comes in within the bound."""
    waiting: int = 0
    """Urgent requests that wait."""
    low_slack: int = 0
    """Those of them with less than a quarter of their bound left."""
    low_slack_ns: WorkNs = WorkNs(0)
    """Their work."""
    least_slack_ns: int | None = None
    """The earliest slack of them all; negative: it is late."""
    waiting_blocks: Blocks = Blocks(0)
    """KV blocks that waiting urgent work will take."""


class GoodputFacts(Struct, frozen=True, kw_only=True):
    """Urgent requests that were over in the last window, refused ones included."""

    offered: int
    met: int
    """Those that kept every bound."""
    target_ppm: int
    """Share that the objective asks for."""
    window_ns: DurationNs
    """How far it reaches back."""


class ForecastFacts(Struct, frozen=True, kw_only=True):
    """What the forecast of urgent offered work says of when a group asked for now would be ready."""

    level_micro: int
    """What it takes to be offered now: it follows within some intervals."""
    at_landing_micro: int
    error_ppm: int | None
    """Mean part by which it was off lately, at this distance; None: too few were checked."""
    checked: int = 0


class RuleFacts(Struct, frozen=True, kw_only=True):
    """What another rule than ours goes by; it knows no classes, no bounds and no work."""

    waiting: int
    """Requests that wait to be computed: here, or behind others in engines."""
    backlog_tokens: int
    """Their prompts."""
    reserved_tokens: int
    """Of KV, by all that was sent and has not ended."""
    input_tokens: int
    """Prompts that came in since the last tick, let in or not."""
    output_tokens: int
    """Their answers, as predicted."""
    span_ns: DurationNs
    """How long since then."""


class ScaleMemory(Struct, frozen=True, kw_only=True):
    """What earlier decisions leave behind."""

    since: InstantNs | None = None
    """From when on decisions were remembered."""
    keeps: tuple[tuple[InstantNs, int], ...] = ()
    """(when, groups that were needed), newest last, each smaller than those before it: the largest within
    a window is the first that is young enough."""
    out_at: InstantNs | None = None
    """When a group was last added."""


class ScaleEvidence(Struct, frozen=True, kw_only=True):
    """What the scaler knew of one pool at a tick."""

    now: InstantNs
    pool: PoolName
    minute: int
    """Of the week in UTC, from Monday 0:00."""
    gpus: int
    """GPUs of a whole group."""
    envelope_micro: int | None = None
    """C of a group asked for now, of an envelope with its fingerprint."""
    lowest_micro: int | None = None
    """The lowest envelope of this kind of group: what one without a matching fingerprint counts."""
    declared_micro: int
    """C that the operator declared: where nothing of the kind was ever measured."""
    blocks: Blocks
    """KV pool of a group, less its reserve."""
    ready_p50_ns: DurationNs
    ready_p90_ns: DurationNs
    """Of a group asked for now."""
    demand: DemandFacts
    goodput: GoodputFacts | None = None
    forecast: ForecastFacts | None = None
    rule: RuleFacts | None = None
    """Where the pool goes by another rule."""
    groups: tuple[GroupFacts, ...] = ()
    samples: tuple[GroupSample, ...] = ()
    domains: tuple[str, ...] = ()
    """Failure domains that groups may be placed in, those that are down left out."""
    refused: bool = False
    """Groups were refused so lately that none is to be asked for yet."""
    frozen: bool = False
    """An operator froze the scale of the fleet."""
    memory: ScaleMemory = ScaleMemory()


class Signal(StrEnum):
    """What asks for capacity. Also a metric label: a closed list."""

    WORK = "work"
    """Offered work and the queue: the formula of SCALE-2."""
    QUEUE_WAIT = "queue_wait"
    SLACK = "slack"
    FORECAST = "forecast"
    KV = "kv"
    GOODPUT = "goodput"
    IMBALANCE = "imbalance"
    """Prefill against decode: of pools with roles."""
    LOST_CAPACITY = "lost_capacity"
    UTILIZATION = "utilization"
    """This and the following instead of all others, where a pool goes by another rule."""
    QUEUE = "queue"
    TOKENS = "tokens"


class Reading(Struct, frozen=True, kw_only=True):
    """What one signal says, and why."""

    signal: Signal
    desired: int | None
    """Groups it asks for; None: it says nothing."""
    keep: int | None = None
    """Groups below which it would not go: as many as it would ask for at the lower threshold."""
    why: str
    """For people: why it asks, or why it does not."""
    numbers: tuple[tuple[str, int], ...] = ()
    """What it went by, in the units of their names."""


class Brake(StrEnum):
    """What kept the scaler from doing what the signals asked for. Also a metric label: a closed list."""

    OFF = "off"
    """The scaler is switched off."""
    ADVICE = "advice"
    """It is configured to advise only."""
    FROZEN = "frozen"
    STALE = "stale"
    """An engine has not told of itself for too long: nothing is taken away."""
    WINDOW = "window"
    """More was needed within the stabilization window."""
    RATE = "rate"
    """More than may change at once, or be asked for so soon after a refusal."""
    YOUNG = "young"
    """What could go has not lived long enough."""
    MAXIMUM = "maximum"
    GPUS = "gpus"
    """The pool's budget of GPUs."""
    RESERVE = "reserve"
    """No number of groups survives the loss of a domain: there are too few domains."""


class SupplyFacts(Struct, frozen=True, kw_only=True):
    """What there is, and what will be."""

    ready: int
    coming: int
    """Groups on their way, those included that are likely to fail."""
    counted: int
    """Of these, how many are counted on: expected failures and late ones left out."""
    standby: int
    draining: int
    now_micro: int
    """Work rate of what is ready."""
    landing_micro: int
    """The same when a group asked for now would be ready."""
    gpus_held: int
    utilization_ppm: int | None
    """Mean of ready groups that told of it: shown."""
    drain_ns: DurationNs | None
    """How long all that waits and runs, work without any bound left out, would take what is ready; None:
    nothing is (DEM-5)."""
    left_micro: int
    """What would be left of the present supply after the largest loss of domains that the reserve is for."""


class Steps(Struct, frozen=True, kw_only=True):
    """What is to be done for a pool now."""

    recall: tuple[ReplicaName, ...] = ()
    """Drains to call off."""
    wake: tuple[ReplicaName, ...] = ()
    """Standby groups to wake."""
    ask: int = 0
    """Groups to ask for."""
    standby: int = 0
    """Standby groups to ask for."""
    cancel: tuple[ReplicaName, ...] = ()
    """Groups on their way, and standby groups, to give up."""
    release: tuple[ReplicaName, ...] = ()
    """Partial groups whose time is over: they are given back, and asked for anew as far as needed."""
    drain: tuple[ReplicaName, ...] = ()

    @property
    def grows(self) -> bool:
        """Whether more is to serve."""
        return bool(self.recall or self.wake or self.ask)

    @property
    def shrinks(self) -> bool:
        """Whether less is."""
        return bool(self.cancel or self.drain)


class ScaleDecision(Struct, frozen=True, kw_only=True):
    """How many groups a pool is to have, why, and what is to be done for it now."""

    pool: PoolName
    readings: tuple[Reading, ...]
    winner: Signal | None
    """Whose number it is; None: a floor's."""
    need: int
    """The largest number of all signals."""
    keep: int
    """The same at the lower threshold, its reserve included: what the windows remember."""
    reserve: int
    """Groups beyond the need, for the loss of a domain."""
    floor: int
    ceiling: int
    desired: int
    """Groups that are to serve, once all is done: between floor and ceiling, always."""
    ordered: int
    """Groups that serve or are on their way, before this decision."""
    supply: SupplyFacts
    brakes: tuple[Brake, ...] = ()
    steps: Steps = Steps()


class ScaleRecord(Struct, frozen=True, kw_only=True, tag="scale"):
    """One decision of the scaler with its evidence: one is recomputed from the other."""

    decision_id: DecisionId
    at: InstantNs
    policy_revision: int
    evidence: ScaleEvidence
    decision: ScaleDecision
