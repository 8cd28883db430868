"""In what do two planes differ on the same requests? Counts by kind, a short table, one line a request.

Knows no plane and feeds none: `shadow.py` tells it what each of the two decided and did.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from headrace.adapters.journal.append import append_whole
from headrace.gateway.labels import OTHER
from headrace.model.decision import Reason
from headrace.model.ids import AttemptId, ClassName, DecisionId, ReplicaName, RequestId, TenantId
from headrace.units import DurationNs, InstantNs, to_ms

ADMIT = "admit"
"""The verdict of a request that was let in; of any other it is the reason."""
GROUPS_MAX = 10_000
"""Tenants and classes that are counted apart, by pair of verdicts; what comes later is `other`."""
_SHOWN = 10
"""Rows of each table in the report."""
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_MODE = 0o600

Verdicts = tuple[str, str]
"""(real, shadow)."""


class Side(Struct):
    """What one plane decided about a request, and did with it."""

    decision: DecisionId | None = None
    verdict: str = ""
    """`admit`, or the reason of a refusal; empty until it decided."""
    attempt: AttemptId | None = None
    """Set once it was sent."""
    replica: ReplicaName | None = None
    wait_ns: DurationNs | None = None
    """From arrival until it was sent."""
    failed: Reason | None = None
    """Why the plane ended it after it was let in."""


class Pair(Struct):
    """One request as both planes see it, for as long as the real one knows it."""

    request: RequestId
    tenant: TenantId
    slo_class: ClassName
    at: InstantNs
    real: Side
    shadow: Side
    begun: bool = False
    """Its first token is known."""

    @property
    def differs(self) -> bool:
        """Whether the two decided, sent or ended it differently; how long it waited aside."""
        one, other = self.real, self.shadow
        return (one.verdict, one.replica, one.failed) != (
            other.verdict,
            other.replica,
            other.failed,
        )


class SideLine(Struct, frozen=True, kw_only=True):
    """One side of a line of the shadow log."""

    decision_id: DecisionId | None
    decision: str
    replica: ReplicaName | None
    wait_ms: float | None
    failed: Reason | None


class DifferenceLine(Struct, frozen=True, kw_only=True):
    """One request that the two planes treat differently. Nothing of its prompt."""

    request_id: RequestId
    at_ns: InstantNs
    tenant: TenantId
    tenant_class: ClassName
    real: SideLine
    shadow: SideLine


class Differences:
    """The counts of one run."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        self.verdicts: Counter[Verdicts] = Counter()
        self.groups: Counter[tuple[str, str, str, str]] = Counter()
        """By tenant, class and the verdicts."""
        self.places: Counter[tuple[bool, bool, bool]] = Counter()
        """By (sent by the real one, sent by the shadow, to the same replica)."""
        self.failures: Counter[tuple[str, str]] = Counter()
        """Why each ended what both had let in, where either did; empty: it did not."""
        self.waits = 0
        """Requests that both sent; the sums below are over these."""
        self.real_wait_ns = self.shadow_wait_ns = 0
        self.wait_apart_ns = 0
        """The largest difference of their waits."""

    @property
    def requests(self) -> int:
        """How many both decided on."""
        return self.verdicts.total()

    @property
    def agreed(self) -> int:
        """Requests that both admit, or both refuse for the same reason."""
        return sum(count for (real, shadow), count in self.verdicts.items() if real == shadow)

    @property
    def only_real_admits(self) -> int:
        """Requests that the shadow alone would have refused."""
        return sum(n for (one, two), n in self.verdicts.items() if one == ADMIT != two)

    @property
    def only_shadow_admits(self) -> int:
        """Requests that the real plane alone refused."""
        return sum(n for (one, two), n in self.verdicts.items() if one != ADMIT == two)

    def decided(self, pair: Pair) -> None:
        """Count what both decided about a newcomer."""
        verdicts = (pair.real.verdict, pair.shadow.verdict)
        self.verdicts[verdicts] += 1
        group: tuple[str, str, str, str] = (pair.tenant, pair.slo_class, *verdicts)
        if group not in self.groups and len(self.groups) >= GROUPS_MAX:
            group = (OTHER, OTHER, *verdicts)
        self.groups[group] += 1

    def concluded(self, pair: Pair) -> None:
        """Count what became of a request that is over."""
        one, other = pair.real, pair.shadow
        sent, would = one.attempt is not None, other.attempt is not None
        if sent or would:
            self.places[sent, would, one.replica == other.replica] += 1
        failed = one.failed is not None or other.failed is not None
        if failed and one.verdict == other.verdict == ADMIT:
            self.failures[one.failed or "", other.failed or ""] += 1
        if one.wait_ns is not None and other.wait_ns is not None:
            self.waits += 1
            self.real_wait_ns += one.wait_ns
            self.shadow_wait_ns += other.wait_ns
            self.wait_apart_ns = max(self.wait_apart_ns, abs(one.wait_ns - other.wait_ns))

    def lines(self) -> Iterator[str]:
        """Yield the report: what differs, most frequent first."""
        yield (
            f"{self.requests} requests: {self.agreed} decided alike, "
            f"{self.only_real_admits} admitted by the real plane alone, "
            f"{self.only_shadow_admits} by the shadow alone"
        )
        if not self.verdicts:
            return
        yield from _table(("real", "shadow"), self.verdicts)
        places = self.places
        both = places[True, True, True] + places[True, True, False]
        yield (
            f"sent by both: {both}, to the same replica: {places[True, True, True]}; "
            f"by the real plane alone: {places[True, False, False]}, "
            f"by the shadow alone: {places[False, True, False]}"
        )
        if self.waits:
            real, shadow = self.real_wait_ns / self.waits, self.shadow_wait_ns / self.waits
            yield (
                f"wait of those before they were sent, on average: real {to_ms(round(real)):.1f} ms, "
                f"shadow {to_ms(round(shadow)):.1f} ms; "
                f"at most {to_ms(self.wait_apart_ns):.1f} ms apart"
            )
        if self.failures:
            yield "ended by a plane after both had let them in:"
            yield from _table(("real", "shadow"), self.failures)
        apart = {group: n for group, n in self.groups.items() if group[2] != group[3]}
        if apart:
            yield "decided differently, by tenant and class:"
            yield from _table(("tenant", "class", "real", "shadow"), apart)


def _table(heads: tuple[str, ...], counts: Mapping[Any, int]) -> Iterator[str]:
    """Yield a table of counts, the largest first, and what it leaves out."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [(*(word or "-" for word in words), str(n)) for words, n in ordered[:_SHOWN]]
    rows = [(*heads, "requests"), *shown]
    widths = [max(len(row[nth]) for row in rows) for nth in range(len(rows[0]))]
    for row in rows:
        *words, last = (
            text.rjust(width) if nth == len(heads) else text.ljust(width)
            for nth, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(("", *words, last))
    if len(ordered) > _SHOWN:
        yield f"  and {len(ordered) - _SHOWN} more"


class DifferenceLog:
    """One JSON line for each request that the two planes treat differently."""

    def __init__(self, path: Path) -> None:
        """Open the file, or go on with it; raises OSError if that cannot be."""
        self._file = os.open(path, _FLAGS, _MODE)
        self._size = os.fstat(self._file).st_size
        self.dropped = 0
        """Lines that could not be written."""

    def put(self, pair: Pair) -> None:
        """Write one down. Never waits, never raises."""
        line = DifferenceLine(
            request_id=pair.request,
            at_ns=pair.at,
            tenant=pair.tenant,
            tenant_class=pair.slo_class,
            real=_side_line(pair.real),
            shadow=_side_line(pair.shadow),
        )
        content = msgspec.json.encode(line) + b"\n"
        if append_whole(self._file, content, self._size):
            self._size += len(content)
        else:
            self.dropped += 1

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _side_line(side: Side) -> SideLine:
    return SideLine(
        decision_id=side.decision,
        decision=side.verdict,
        replica=side.replica,
        wait_ms=None if side.wait_ns is None else to_ms(side.wait_ns),
        failed=side.failed,
    )
