"""Everything a decider may look at, frozen: stored beside the decision, so it can be recomputed."""

from msgspec import UNSET, Struct, UnsetType

from headrace.model.budget import Per, Unit
from headrace.model.decision import Decision, Placement, ScoreTerms
from headrace.model.demand import Demand
from headrace.model.features import Feature
from headrace.model.ids import (
    ClassName,
    DecisionId,
    Incarnation,
    ReplicaName,
    RequestId,
    TenantId,
)
from headrace.model.ladder import LadderFacts, Pressure
from headrace.model.paths import Term
from headrace.model.scaling import ScaleRecord
from headrace.units import Blocks, DurationNs, InstantNs, Tokens, WorkNs


class ReplicaView(Struct, frozen=True, gc=False):
    """One candidate replica: what we dispatched (known at once) and what it last said."""

    replica: ReplicaName
    incarnation: Incarnation
    pending_prefill_ns: DurationNs
    """Predicted prefill sent without a first token yet."""
    behind_ns: DurationNs
    """The same without the prompt at the engine's front: what waits in the engine."""
    prefill_left_ns: DurationNs
    """The whole less what the first of it must have had by now, or with what that is overdue: a forecast,
    for waits alone."""
    decodes: int
    """Streams past their first token."""
    context_tokens: Tokens
    """Their total context."""
    blocks_reserved: Blocks
    blocks_total: Blocks
    """Pool size less the preemption reserve."""
    slots: int
    """Requests it may still take before its running limit."""
    cached_tokens: Tokens
    """Prefix of this request expected there."""
    believed_tokens: Tokens
    """What of it to count on, as far as such expectations have held there of late."""
    prefill_ns: DurationNs
    """This request's prefill there, believed part left out, with the decodes running."""
    prefix_credit_ns: DurationNs
    """Prefill time that the believed part saves."""
    step_ns: DurationNs
    """A mixed step there with this request decoding too."""
    decode_extra_ns: DurationNs
    """What its running decodes add to each of this request's steps."""
    tightest_gap_ns: DurationNs | None
    """The tightest gap bound among its streams."""
    window_ns: DurationNs
    """Prefill that may be in flight there (dispatch window)."""
    age_ns: DurationNs | None
    """Age of its last report; None: it never reported."""
    last_used: int
    """The fleet's dispatch count when it was last chosen: spreads ties evenly."""
    mean_step_ns: DurationNs = DurationNs(0)
    """The mean step there with this request decoding: with prefill as far as the window is full of it."""
    mean_bound_ns: DurationNs = DurationNs(0)
    """The tightest mean time per token promised there, this request's included. 0, as the step: nobody
    is promised more by it than by the bound on gaps."""


class ContractFacts(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """What the contract gate compares (ADM-1)."""

    tenant_known: bool
    model_known: bool
    model_allowed: bool
    class_allowed: bool
    context_limit: Tokens
    output_limit: Tokens
    fan_out_limit: int
    served: bool = True
    """Whether there is a pool of the model for the class: without one, nobody can be let in."""
    lacking: Feature | None = None
    """What is asked for and the model does not do; the first of several."""


class WindowFacts(Struct, frozen=True, kw_only=True, gc=False):
    """One of a tenant's budgets before this request, in the books' whole units."""

    unit: Unit
    per: Per
    need: int
    """What this request is expected to take."""
    taken: int
    """Used in this window, and held by live requests."""
    hard: int | None
    soft: int | None
    wait_ns: DurationNs
    """Until the next window begins."""

    @property
    def name(self) -> str:
        """As errors, metrics and logs call it: `tokens/day`."""
        return f"{self.unit}/{self.per}"

    @property
    def spent(self) -> bool:
        """Whether this request would go beyond the hard limit."""
        return self.hard is not None and self.taken + self.need > self.hard

    @property
    def warned(self) -> bool:
        """Whether this request would go beyond the soft limit."""
        return self.soft is not None and self.taken + self.need > self.soft


class BudgetFacts(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """The tenant's balances before this request; None: no such limit."""

    tokens_needed: Tokens
    """Input plus the output the caller allows or p90: reserved now, settled on usage."""
    tokens_left: int | None
    tokens_limit: int | None
    tokens_wait_ns: DurationNs
    """Until the bucket holds what is needed."""
    requests_left: int | None
    requests_wait_ns: DurationNs
    parallel_left: int | None
    parallel_limit: int | None = None
    branches: int = 1
    """Answers asked for at once: as many in parallel."""
    sessions_left: int | None = None
    """None as well where its session has live requests already."""
    ends_wait_ns: DurationNs = DurationNs(0)
    """Where it has too many at once: until so many of its own are expected to have ended."""
    windows: tuple[WindowFacts, ...] = ()


class WaitFacts(Struct, frozen=True, kw_only=True, gc=False):
    """Work ahead, for the wait of a fair queue (design: own share, not the whole backlog)."""

    backlog_ns: WorkNs
    """Queued work of all classes that share a pool with this one."""
    own_ahead_ns: WorkNs
    """This tenant's part of it with an earlier key."""
    debt_ns: WorkNs
    """Work that others get before this tenant's counter is the least again."""
    weights: int
    """Of everybody that competes for turns: own_weight / weights of all that is served is its due."""
    own_weight: int
    rate_micro: int
    """Work-seconds per second of the ready replicas of its pools, in millionths; 0: none ready."""


class LengthFacts(Struct, frozen=True, kw_only=True, gc=False):
    """What was offered to the deadline gate and let in of this tenant, in millionths, lately."""

    offered: int
    admitted: int
    long_offered: int
    """The longest tenth of them."""
    long_admitted: int
    is_long: bool
    """Whether this request is one of these."""
    long_prefill_ns: DurationNs
    """Prefill of a prompt of their mean length, as the nearest replica is."""
    long_alone_ns: DurationNs
    """The same in an engine that does nothing else."""


class ArrivalFacts(Struct, frozen=True, kw_only=True, gc=False):
    """The next group that is expected to serve a class: how soon, and how sure."""

    p50_ns: DurationNs
    p90_ns: DurationNs
    success_ppm: int
    """Chance that it comes at all, in millionths."""
    rate_micro: int
    """Work-seconds per second that it will do, in millionths."""


class EntryEvidence(Struct, frozen=True, kw_only=True):
    """What admission knew when the request came."""

    demand: Demand
    max_output: Tokens | None
    fan_out: int
    contract: ContractFacts
    budget: BudgetFacts
    wait: WaitFacts
    ttft_ns: DurationNs | None
    """First-token bound; for completion classes what the answer's decode leaves of it."""
    gap_ns: DurationNs
    route_ns: DurationNs
    first_ns: DurationNs
    """Predicted first decode step."""
    input_margin_ns: DurationNs
    """Prefill time of the tokens the count may be short of."""
    tenant_counter: int
    """Where its queue's counter stands, among those of its siblings."""
    least_counter: int
    """The least of those that wait; its own if nobody does."""
    cost: str
    """Revision of what counters count, which is their unit; empty: none was looked at."""
    own_queued: int
    own_queue_bound: int
    ready: int
    """Ready replicas that may serve this class."""
    blocks_largest: Blocks
    """Pool of the largest of them, less the preemption reserve."""
    replicas: tuple[ReplicaView, ...]
    """The cheapest and the prefix holders."""
    rest_bound_ns: int | None
    """No other replica's queue is below this; None: there is no other."""
    lengths: LengthFacts | None = None
    """None: nobody asks, or none of this tenant was refused lately."""
    arrival: ArrivalFacts | UnsetType = UNSET
    """Capacity on its way. Absent: none is expected, no pool of the class scales, or some replica is ready
    and nobody waits."""
    mean_ns: DurationNs = DurationNs(0)
    """Bound on its mean time per token, where that is tighter than on its gaps; else 0."""


class RouteEvidence(Struct, frozen=True, kw_only=True):
    """What routing knew when a request's turn had come."""

    blocks: Blocks
    output_p50: Tokens
    gap_ns: DurationNs
    turn: tuple[Term, ...]
    """Why it was its turn, from the root of the share tree down; empty if nobody waited, or where an order
    knows no shares."""
    key: int
    """Its place in line as its order has it: arrivals, ns of work, or an instant; smaller goes first."""
    score: ScoreTerms | None
    """What made it score highest, where turns go by scores."""
    cost: str
    """Revision of what counters count, which is their unit."""
    lent: bool
    """The turn was lent by a tenant that can wait."""
    patient: bool
    """It can wait itself, or is hopeless: nobody competes for this turn."""
    replicas: tuple[ReplicaView, ...]
    rest_bound_ns: int | None


class Tried(Struct, frozen=True, kw_only=True):
    """One form in which a request was looked at, and what the gates said of it."""

    level: int
    evidence: EntryEvidence
    decision: Decision


class LadderRecord(Struct, frozen=True, kw_only=True):
    """How the form of one request was found."""

    facts: LadderFacts
    pressure: Pressure
    base: int
    """The level at which its class was: the first step below what was asked for."""
    tried: tuple[Tried, ...]
    """Every form that was looked at, in order; as asked first."""


class EntryRecord(Struct, frozen=True, kw_only=True, tag="entry"):
    """One admission decision with its evidence; `decisions verify` recomputes one from the other."""

    request_id: RequestId
    decision_id: DecisionId
    at: InstantNs
    tenant: TenantId
    tenant_class: ClassName
    policy_revision: int
    evidence: EntryEvidence
    """Of the form that was decided on."""
    decision: Decision
    ladder: LadderRecord | None = None
    """None: nothing less was agreed to."""


class RouteRecord(Struct, frozen=True, kw_only=True, tag="route"):
    """One dispatch with its evidence."""

    request_id: RequestId
    decision_id: DecisionId
    at: InstantNs
    tenant: TenantId
    tenant_class: ClassName
    policy_revision: int
    slack_ns: int
    demand: Demand
    ttft_ns: DurationNs | None
    evidence: RouteEvidence
    placement: Placement


RequestRecord = EntryRecord | RouteRecord
"""What was decided about one request."""
DecisionRecord = RequestRecord | ScaleRecord
