"""What was decided about a request, and why: values that are stored, compared and recomputed."""

from enum import StrEnum

from msgspec import UNSET, Struct, UnsetType

from headrace.model.ids import Incarnation, ReplicaName
from headrace.model.ladder import Lesser
from headrace.units import DurationNs, Tokens


class Gate(StrEnum):
    """The four gates of admission, in the order in which a caller may blame them (ADM-1)."""

    CONTRACT = "contract"
    BUDGET = "budget"
    MEMORY = "memory"
    DEADLINE = "deadline"


class Reason(StrEnum):
    """Why a request was turned away or ended early. Also a metric label: a closed list."""

    TENANT_UNKNOWN = "tenant_unknown"
    MODEL_UNKNOWN = "model_unknown"
    MODEL_NOT_ALLOWED = "model_not_allowed"
    CLASS_NOT_ALLOWED = "class_not_allowed"
    CONTEXT_TOO_LONG = "context_too_long"
    OUTPUT_TOO_LONG = "output_too_long"
    INPUT_EMPTY = "input_empty"
    FEATURE_UNSUPPORTED = "feature_unsupported"
    FAN_OUT_UNSUPPORTED = "fan_out_unsupported"
    REQUEST_RATE = "request_rate"
    TOKEN_RATE = "token_rate"  # noqa: S105 - a quota, not a secret
    TOKEN_LIMIT = "token_limit"  # noqa: S105 - larger than the whole quota: waiting never helps
    BUDGET_RATE = "budget_rate"
    """A budget of this minute."""
    QUOTA_SPENT = "quota_spent"
    """A longer budget, in requests or tokens."""
    BUDGET_SPENT = "budget_spent"
    """A longer budget, in work or money."""
    CONCURRENCY = "concurrency"
    SESSIONS = "sessions"
    TENANT_QUEUE_FULL = "tenant_queue_full"
    NO_READY_REPLICA = "no_ready_replica"
    KV_TOO_LARGE = "kv_too_large"
    DEADLINE_IMPOSSIBLE = "deadline_impossible"
    DEADLINE_QUEUE = "deadline_queue"
    GAP_BOUND = "gap_bound"
    TPOT_BOUND = "tpot_bound"
    LENGTH_SHARE = "length_share"
    QUEUE_PRESSURE = "queue_pressure"
    EXPIRED = "expired"
    WAITED_OUT = "waited_out"
    REPLICA_LOST = "replica_lost"
    DRAINED = "drained"
    """Its replica had to go, and its time to finish was over."""
    UPSTREAM_ERROR = "upstream_error"
    RESTARTED = "restarted"
    SHUT_DOWN = "shut_down"


HELPLESS = frozenset(
    {
        Reason.TENANT_UNKNOWN, Reason.MODEL_UNKNOWN, Reason.MODEL_NOT_ALLOWED,
        Reason.CLASS_NOT_ALLOWED, Reason.CONTEXT_TOO_LONG, Reason.OUTPUT_TOO_LONG,
        Reason.INPUT_EMPTY, Reason.FEATURE_UNSUPPORTED, Reason.FAN_OUT_UNSUPPORTED,
        Reason.REQUEST_RATE, Reason.TOKEN_RATE, Reason.TOKEN_LIMIT, Reason.BUDGET_RATE,
        Reason.QUOTA_SPENT, Reason.BUDGET_SPENT, Reason.CONCURRENCY, Reason.SESSIONS,
        Reason.KV_TOO_LARGE, Reason.DEADLINE_IMPOSSIBLE,
    }
)  # fmt: skip
"""Refusals that no number of replicas would change: for what the caller asked or has used up, or for bounds
that an idle replica would break."""


class Verdict(Struct, frozen=True, kw_only=True, gc=False):
    """One gate's answer with its numbers, in the gate's own unit (ns, tokens, blocks).

    Those of a budget are in its own: requests, tokens, ns of work, millionths of a dollar.
    """

    gate: Gate
    reason: Reason | None
    """None: the gate lets the request pass."""
    measured: int = 0
    threshold: int = 0
    limit: str | UnsetType = UNSET
    """Which of a tenant's budgets, such as `tokens/day`, or of what a model may do, such as `tools`."""

    @property
    def margin(self) -> int:
        """How far inside (positive) or outside (negative) of the threshold."""
        return self.threshold - self.measured


class LetIn(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """It is served, in whatever form: what is true of every request that was let in."""

    slack_ns: int
    """Time left beyond what the forecast and its uncertainty need (ADM-3)."""
    wait_ns: DurationNs
    """The wait the fair queue is predicted to give."""
    verdicts: tuple[Verdict, ...]
    over_soft: tuple[str, ...] = ()
    """Budgets whose soft limit it goes beyond, such as `tokens/day`."""

    @property
    def charged(self) -> bool:
        """Whether it takes of its tenant's limits: not if they would have refused it."""
        return all(one.reason is None for one in self.verdicts if one.gate is Gate.BUDGET)


class Admit(LetIn, frozen=True, kw_only=True, tag="admit"):
    """Take it as asked."""


class Degrade(LetIn, frozen=True, kw_only=True, tag="degrade"):
    """Take it in a lesser form, to which class, tenant and caller agreed (DEG-1, DEG-2)."""

    lesser: Lesser
    input_tokens: Tokens
    """What is left of the prompt."""
    max_output: Tokens | None
    """The limit of its answer; None: as asked, which was none."""
    reason: Reason | None = None
    """Why it could not have more: the refusal of the step before. None: it could have been served as
    asked, but its class is at this level, so that those who come later can be served too."""

    @property
    def why(self) -> str:
        """The reason in one word, for headers and labels."""
        return OVERLOAD if self.reason is None else self.reason.value


OVERLOAD = "overload"
"""Why a request is degraded that would have been let in as asked."""


class Reject(Struct, frozen=True, kw_only=True, tag="reject"):
    """Refuse before any byte of the answer is sent (ADM-5)."""

    reason: Reason
    gate: Gate | None
    slack_ns: int
    retry_after_ns: DurationNs | None
    """When repeating can succeed; None: repeating does not help."""
    verdicts: tuple[Verdict, ...]
    defer: bool = False
    """Whether class, tenant and caller agreed that it is answered later instead, where there is a durable
    queue: every step of the ladder was tried."""

    @property
    def is_ours(self) -> bool:
        """Whether it is for lack of our capacity, and not for anything the caller did."""
        return self.gate in (Gate.MEMORY, Gate.DEADLINE)


Decision = Admit | Degrade | Reject
"""The answer at the door."""


class RouteTerms(Struct, frozen=True, kw_only=True, gc=False):
    """The cost of one replica for one request, every term in ns (ROUTE-1)."""

    queue_ns: int
    interference_ns: int
    kv_ns: int
    prefix_credit_ns: int
    staleness_ns: int

    @property
    def total_ns(self) -> int:
        """The sum by which replicas compare."""
        return (
            self.queue_ns
            + self.interference_ns
            + self.kv_ns
            + self.staleness_ns
            - self.prefix_credit_ns
        )


class ScoreTerms(Struct, frozen=True, kw_only=True, gc=False):
    """What makes up a request's score, each in seconds of GPU time; the greatest sum goes first."""

    urgency: float
    aging: float
    service: float
    """How far its tenant is over the one furthest under its share."""
    interference: float
    """What its prefill takes from running decodes."""

    @property
    def total(self) -> float:
        """The score."""
        return self.urgency + self.aging - self.service - self.interference


class Placement(Struct, frozen=True, kw_only=True):
    """Where a request goes, with the winner's terms."""

    replica: ReplicaName
    incarnation: Incarnation
    terms: RouteTerms
    cached_tokens: int
    """Prefix expected there."""
