"""What is counted as it happens, because nothing in the plane's state would tell it afterwards.

Fed with each decision and each request that is over: distributions by class, what gates in audit
mode would have refused, and the rates of the last seconds. A few microseconds each, no labels looked
up, nothing kept of a request but how long its first token was allowed to take.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from operator import add

from msgspec import Struct

from headrace.gateway.labels import OTHER
from headrace.gateway.scale import ScaleFeed
from headrace.model.decision import Degrade, Gate, LetIn, Reason
from headrace.model.effect import Concluded
from headrace.model.evidence import DecisionRecord, EntryRecord
from headrace.model.ids import ClassName, ReplicaName, RequestId, TenantId
from headrace.model.meter import GAP_EDGES_NS
from headrace.model.price import PriceSpec
from headrace.model.scaling import ScaleRecord
from headrace.policy.catalog import PlaneConfig
from headrace.units import NS_PER_MS, NS_PER_S, InstantNs, ms, to_seconds

_TTFT_MS = (
    10, 25, 50, 100, 200, 300, 500, 750, 1_000, 1_500, 2_000, 3_000, 5_000, 7_500, 10_000, 15_000,
    30_000, 60_000, 300_000,
)  # fmt: skip
_QUEUE_MS = (
    1, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000, 1_800_000,
)  # fmt: skip
_E2E_MS = (
    100, 250, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 60_000, 120_000, 300_000, 600_000,
    1_800_000, 3_600_000,
)  # fmt: skip
_SLACK_MS = (
    -30_000, -10_000, -5_000, -2_000, -1_000, -500, -250, -100, -50, 0, 50, 100, 250, 500, 1_000,
    2_000, 5_000, 10_000, 30_000, 60_000, 600_000,
)  # fmt: skip
WINDOW_S = 10
"""Whole seconds that rates are taken over."""


class Distribution(Struct):
    """Values counted by bucket; an edge belongs to the bucket below it."""

    edges: tuple[int, ...]
    counts: list[int]
    sum: int = 0

    @classmethod
    def over(cls, edges: tuple[int, ...]) -> "Distribution":
        """Return an empty one."""
        return cls(edges, [0] * (len(edges) + 1))

    def note(self, value: int) -> None:
        """Count a value."""
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value

    def pour(self, counts: Iterable[int], total: int) -> None:
        """Count many values at once, given by the same buckets, and their sum."""
        self.counts = list(map(add, self.counts, counts))
        self.sum += total


class Slot(Struct):
    """What happened in one second."""

    second: int = -1
    offered: int = 0
    admitted: int = 0
    rejected: int = 0
    met: int = 0
    output_tokens: int = 0
    met_work_ns: int = 0


class Rates(Struct, frozen=True, kw_only=True):
    """What happens in a second, on the mean of the last whole `WINDOW_S`."""

    offered: float
    admitted: float
    rejected: float
    met: float
    """Goodput in requests."""
    output_tokens: float
    met_work: float
    """Goodput in GPU seconds."""


class Window:
    """The last seconds, one slot each."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._slots = [Slot() for _ in range(WINDOW_S + 1)]

    def at(self, now: InstantNs) -> Slot:
        """Return the slot of an instant, emptied if it held a second long past."""
        second = now // NS_PER_S
        nth = second % (WINDOW_S + 1)
        slot = self._slots[nth]
        if slot.second != second:
            slot = self._slots[nth] = Slot(second)
        return slot

    def rates(self, now: InstantNs) -> Rates:
        """Return the means over the last whole seconds."""
        ended = now // NS_PER_S
        slots = [slot for slot in self._slots if ended - WINDOW_S <= slot.second < ended]
        return Rates(
            offered=sum(slot.offered for slot in slots) / WINDOW_S,
            admitted=sum(slot.admitted for slot in slots) / WINDOW_S,
            rejected=sum(slot.rejected for slot in slots) / WINDOW_S,
            met=sum(slot.met for slot in slots) / WINDOW_S,
            output_tokens=sum(slot.output_tokens for slot in slots) / WINDOW_S,
            met_work=to_seconds(sum(slot.met_work_ns for slot in slots)) / WINDOW_S,
        )


class ClassFeed:
    """The distributions and rates of one class."""

    def __init__(self, ttft_edges: tuple[int, ...], e2e_edges: tuple[int, ...]) -> None:
        """Start empty."""
        self.ttft = Distribution.over(ttft_edges)
        self.itl = Distribution.over(GAP_EDGES_NS)
        self.stall = Distribution.over(GAP_EDGES_NS)
        self.e2e = Distribution.over(e2e_edges)
        self.queue = Distribution.over(_edges(_QUEUE_MS))
        self.slack = Distribution.over(_edges(_SLACK_MS))
        self.error = Distribution.over(_edges(_SLACK_MS))
        self.window = Window()

    def distributions(self) -> dict[str, Distribution]:
        """Return the distributions by the family they are shown as."""
        return {
            "ttft_seconds": self.ttft,
            "itl_seconds": self.itl,
            "max_stall_seconds": self.stall,
            "e2e_seconds": self.e2e,
            "queue_seconds": self.queue,
            "predicted_slack_seconds": self.slack,
            "slack_error_seconds": self.error,
        }


class Feed:
    """Everything that is fed, by class; `other` takes the classes the configuration lacks."""

    def __init__(
        self, config: PlaneConfig, prices: Mapping[ReplicaName, PriceSpec] | None = None
    ) -> None:
        """Know the classes of a configuration; their bounds become edges, so that shares are exact."""
        ttft = [one.ttft_ms for one in config.classes if one.ttft_ms is not None]
        e2e = [one.completion_ms for one in config.classes if one.completion_ms is not None]
        self._ttft_edges, self._e2e_edges = _edges(_TTFT_MS, ttft), _edges(_E2E_MS, e2e)
        self.classes: dict[str, ClassFeed] = {}
        self._other = self._made()
        self._allowed: dict[RequestId, int] = {}
        self.decisions: Counter[str] = Counter()
        self.audited: Counter[tuple[str, Gate, Reason]] = Counter()
        """Requests let in that a gate in audit mode would have refused, by class, gate and reason."""
        self.over_soft: Counter[tuple[TenantId, str]] = Counter()
        """Requests let in beyond a soft limit, by tenant and budget."""
        self.left_out: Counter[tuple[TenantId, ClassName]] = Counter()
        """Optional parts left out of requests let in, by tenant and class."""
        self.scale = ScaleFeed()
        """What the scaler decided."""
        self.met = 0
        """Requests that met every bound."""
        self._prices = prices or {}
        self.spend: Counter[tuple[str, str]] = Counter()
        """Micro-dollars paid to hosted engines, by tenant and model."""
        self.configure(config)

    def configure(self, config: PlaneConfig) -> None:
        """Follow a change of the configuration: known classes go on, new ones start."""
        known = self.classes
        self.classes = {
            name: known.get(name) or self._made() for name in (one.name for one in config.classes)
        }
        self.classes.setdefault(OTHER, self._other)

    def decided(self, record: DecisionRecord) -> None:
        """Count a decision; keep how long the first token of one let in may take."""
        if isinstance(record, ScaleRecord):
            self.decisions["scale"] += 1
            self.scale.decided(record)
            return
        if not isinstance(record, EntryRecord):
            self.decisions["route"] += 1
            return
        mine = self.classes.get(record.tenant_class, self._other)
        slot = mine.window.at(record.at)
        slot.offered += 1
        decision, bound = record.decision, record.evidence.ttft_ns
        if bound is not None:
            mine.slack.note(decision.slack_ns)
        if not isinstance(decision, LetIn):
            self.decisions["reject"] += 1
            slot.rejected += 1
            return
        self.decisions["admit"] += 1
        slot.admitted += 1
        if bound is not None:
            self._allowed[record.request_id] = bound - decision.slack_ns
        if isinstance(decision, Degrade) and record.ladder is not None:
            optional, kept = len(record.ladder.facts.optional), decision.lesser.kept
            left_out = 0 if kept is None else optional - kept
            if left_out > 0:
                self.left_out[record.tenant, record.tenant_class] += left_out
        self._warned(record, decision)

    def _warned(self, record: EntryRecord, decision: LetIn) -> None:
        """Count the soft limits that one went beyond, and the gates in audit mode that minded."""
        for budget in decision.over_soft:
            self.over_soft[record.tenant, budget] += 1
        named = record.tenant_class if record.tenant_class in self.classes else OTHER
        for verdict in decision.verdicts:
            if verdict.reason is not None:
                self.audited[named, verdict.gate, verdict.reason] += 1

    def concluded(self, row: Concluded) -> None:
        """Count how an admitted request went."""
        allowed = self._allowed.pop(row.request, None)
        if not row.admitted:
            return
        mine = self.classes.get(row.slo_class, self._other)
        slot = mine.window.at(row.ended_at)
        if row.usage is not None:
            slot.output_tokens += row.usage.output_tokens
            price = self._prices.get(row.replica) if row.replica else None
            if price is not None:
                self.spend[row.tenant, row.model] += price.micro_usd(row.usage)
        if row.met:
            slot.met += 1
            self.met += 1
            slot.met_work_ns += row.work_ns
        seen = row.indicators
        if seen is None:
            return
        mine.ttft.note(seen.ttft_ns)
        mine.queue.note(seen.queue_ns)
        mine.stall.note(seen.max_stall_ns)
        mine.e2e.note(seen.e2e_ns)
        if allowed is not None:
            mine.error.note(allowed - seen.ttft_ns)
        if row.timing is not None and row.timing.gap_counts:
            mine.itl.pour(row.timing.gap_counts, seen.gaps_ns)

    def _made(self) -> ClassFeed:
        return ClassFeed(self._ttft_edges, self._e2e_edges)


def _edges(base: Iterable[int], more: Iterable[float] = ()) -> tuple[int, ...]:
    """Return edges in ns, given in ms."""
    return tuple(sorted({*(edge * NS_PER_MS for edge in base), *map(ms, more)}))
