"""Which request goes first, within a tenant and between tenants?

Orders return sort keys that do not change with time, so that queues stay sorted while they wait.
They know deadlines and predicted work, no replicas, and drop nothing: expiry belongs to the plane.

Two families. Orders *by share* ask the tree of counters whose turn it is, and the key only within
one queue; the others are one line for everybody, sorted by the key, and protect nobody from anybody:
they are what fair ones are compared with.
"""

from typing import Annotated, ClassVar, Protocol

from msgspec import Meta, Struct

from headrace.model.decision import ScoreTerms
from headrace.units import NS_PER_MS, NS_PER_S, DurationNs, InstantNs, WorkNs


class Place(Struct, frozen=True, gc=False):
    """What an order may know of a request that starts to wait."""

    request: int
    """Ids grow in order of arrival."""
    deadline: InstantNs
    """Of its first token."""
    latest_start: InstantNs
    """When it must be sent to meet that."""
    input_tokens: int
    work_ns: WorkNs
    """Predicted work, p50."""


class Order(Protocol):
    """Which waiting request is next?"""

    by_share: ClassVar[bool]
    """Whether turns go by the tree of counters; else by keys alone, whoever's they are."""
    relegates: ClassVar[bool]
    """Whether a request past its latest start yields to others: its tenant's, or everybody's."""
    by_start: ClassVar[bool]
    """Whether the key is the latest start itself, so that it tells who is urgent and who is late."""
    scores: ClassVar[bool]
    """Whether the heads of several queues are weighed against each other, term by term."""

    @property
    def lend_after_ns(self) -> DurationNs | None:
        """A queue whose requests can all wait longer lends its turn; None: never."""
        ...

    def key(self, place: Place) -> int:
        """Return a request's place within its queue, or in everybody's: smaller goes first."""
        ...


class _Line:
    """One line for everybody; requests are never set back."""

    by_share: ClassVar[bool] = False
    relegates: ClassVar[bool] = False
    by_start: ClassVar[bool] = False
    scores: ClassVar[bool] = False

    @property
    def lend_after_ns(self) -> DurationNs | None:
        """Never."""
        return None


class Fifo(
    _Line, Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="fifo"
):  # fmt: skip
    """Serve in order of arrival: one long prompt stands before everybody behind it."""

    def key(self, place: Place) -> int:
        """Return the order of arrival."""
        return place.request


class ShortestFirst(
    _Line, Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="sjf"
):  # fmt: skip
    """Least predicted work first: the best mean, and long requests starve under load."""

    def key(self, place: Place) -> int:
        """Return the predicted work."""
        return place.work_ns


class EarliestDeadline(
    _Line, Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="edf"
):  # fmt: skip
    """Earliest first-token deadline first: optimal below capacity, collapses above it.

    Past saturation it serves who is late already, and it rewards whoever declares tight deadlines.
    """

    def key(self, place: Place) -> int:
        """Return the deadline."""
        return place.deadline


class LeastSlack(
    _Line, Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind",
    tag="least_slack",
):  # fmt: skip
    """Least slack first: as `edf`, with what a request's own prefill takes looked at."""

    by_start: ClassVar[bool] = True

    def key(self, place: Place) -> int:
        """Return deadline - remaining work: slack, but for the passing of time."""
        return place.latest_start


class Niyama(
    _Line, Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind",
    tag="niyama",
):  # fmt: skip
    """Deadline and length in one key, hopeless work behind everybody's (Niyama, ASPLOS 2026).

    The most requests within their bounds, and no protection: a tenant that declares tight deadlines
    and sends the most gets the most.
    """

    relegates: ClassVar[bool] = True
    ms_per_token: Annotated[float, Meta(ge=0, le=1_000)] = 8.0
    """What a prompt token adds to the deadline, in ms. 8: the published setting; 0 is `edf` with
    relegation."""

    def key(self, place: Place) -> int:
        """Return deadline + a length's worth of time."""
        return place.deadline + round(self.ms_per_token * NS_PER_MS) * place.input_tokens


class _Shared:
    """Turns by the tree of counters."""

    by_share: ClassVar[bool] = True
    relegates: ClassVar[bool] = True
    by_start: ClassVar[bool] = True
    scores: ClassVar[bool] = False


class VtcOrder(
    _Shared, Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind",
    tag="vtc",
):  # fmt: skip
    """The least counter's turn, its requests in order of arrival: the published method, no deadlines."""

    relegates: ClassVar[bool] = False
    by_start: ClassVar[bool] = False

    @property
    def lend_after_ns(self) -> DurationNs | None:
        """Never."""
        return None

    def key(self, place: Place) -> int:
        """Return the order of arrival."""
        return place.request


class TenantFirst(
    _Shared, Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind",
    tag="tenant_first",
):  # fmt: skip
    """Feasible, then the tenant furthest under its share, then its earliest deadline (FAIR-5).

    Of requests that all can still make it, the long gain nothing by going first for their length, and
    beside a hog one in ten of all that are met is lost by it (`benchmarks/fairness.py`). What a prompt
    takes does decide who is hopeless.

    Requests that can no longer make it are relegated within their own tenant, so that nobody else
    pays for them. *Turn lending*: a tenant whose requests can all wait long, or are hopeless, yields
    its turn to urgent feasible work; its counter stays.
    """

    by_start: ClassVar[bool] = False
    lend_after_ms: Annotated[float, Meta(gt=0, le=86_400_000)] | None = 10_000.0
    """Slack beyond which a tenant lends its turn. 10,000: several interactive bounds long. None: turns
    are never lent for patience."""

    @property
    def lend_after_ns(self) -> DurationNs | None:
        """Return the slack beyond which a turn is lent."""
        lend = self.lend_after_ms
        return None if lend is None else DurationNs(round(lend * NS_PER_MS))

    def key(self, place: Place) -> int:
        """Return the deadline."""
        return place.deadline


class Score(
    _Shared, Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind",
    tag="score",
):  # fmt: skip
    """Urgency + aging - service over share - interference (FAIR-5): the heads of the lowest tenants.

    Everything at once, by weights; no bound on unfairness is claimed, but `candidates` limits who is
    looked at to those furthest under their shares.
    """

    scores: ClassVar[bool] = True
    candidates: Annotated[int, Meta(ge=1, le=64)] = 8
    """Queues looked at, those with the least counters. 8: cheap, and enough to find an urgent one."""
    urgency: Annotated[float, Meta(ge=0, le=1_000)] = 2.0
    """Worth of no slack at all, in seconds; half of it at `halving_ms` of slack. 2: the default
    first-token bound."""
    halving_ms: Annotated[float, Meta(gt=0, le=3_600_000)] = 1_000.0
    """Slack at which urgency is halved."""
    aging: Annotated[float, Meta(ge=0, le=100)] = 0.1
    """Worth of a second of waiting, in seconds."""
    service: Annotated[float, Meta(ge=0, le=100)] = 1.0
    """Worth of a second of GPU time that its tenant has had more than the lowest."""
    interference: Annotated[float, Meta(ge=0, le=100)] = 1.0
    """Worth of a second that running decodes are slowed."""

    @property
    def lend_after_ns(self) -> DurationNs | None:
        """Never: who can wait scores low."""
        return None

    def key(self, place: Place) -> int:
        """Return deadline - remaining work."""
        return place.latest_start

    def terms(self, slack_ns: int, age_ns: int, over_ns: int, interference_ns: int) -> ScoreTerms:
        """Return the terms of one candidate.

        `over_ns`: GPU time that its queue has had more than the lowest candidate, for its weight.
        """
        slack = max(0, slack_ns) / NS_PER_MS
        return ScoreTerms(
            urgency=self.urgency * self.halving_ms / (self.halving_ms + slack),
            aging=self.aging * age_ns / NS_PER_S,
            service=self.service * over_ns / NS_PER_S,
            interference=self.interference * interference_ns / NS_PER_S,
        )


Ordering = (
    Fifo | ShortestFirst | EarliestDeadline | LeastSlack | Niyama | VtcOrder | TenantFirst | Score
)

FAR = DurationNs(365 * 24 * 3_600 * NS_PER_S)
"""The deadline of work that has none: one year, so that keys stay comparable."""
