"""Does the simulator foretell what happens live?

Both ran the same requests through the same plane. Below capacity each request should end alike. Far
above it who is refused hangs on milliseconds, so there shares are compared: of each tenant's class,
of the work that met, and the middle of the times to the first token. Runs of several seeds are judged
together: over five minutes of overload two simulations whose replicas differ by 2 % in speed differ by
three points themselves.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from headrace.model.effect import Concluded
from headrace.model.ids import ClassName, TenantId
from headrace.report import words
from headrace.report.groups import entry_result, times_of
from headrace.report.mix import Check
from headrace.report.run import RunRecord
from headrace.report.stats import nearest_rank, rounded
from headrace.report.tables import Column, Table
from headrace.units import NS_PER_MS, DurationNs, ms

AGREE_LEAST = 0.98
"""Requests that end alike, of all, while little is refused."""
REFUSED_MOST = 0.1
"""Refused by either side, of all: beyond, single requests are not compared."""
SHARE_MOST = 0.03
"""Difference of the admitted share of one tenant's class."""
GOODPUT_MOST = 0.05
"""Relative difference of work goodput."""
TTFT_MOST, TTFT_LEAST_NS = 0.1, ms(15)
"""Relative difference of the median time to the first token, or this if it is more."""

Pair = tuple[RunRecord, RunRecord]
"""(simulated, live) of one trace."""


class Beside(Struct, frozen=True, kw_only=True, gc=False):
    """One tenant's class in both."""

    tenant: TenantId
    slo_class: ClassName
    offered: int
    admitted_simulated: int
    admitted_live: int


class Parity(Struct, frozen=True, kw_only=True):
    """How far one or several pairs of runs agree."""

    requests: int
    ended_alike: int
    """Refused in both, or admitted in both and ended the same way."""
    met_alike: int
    """Met every bound in both, or in neither."""
    cells: tuple[Beside, ...]
    checks: tuple[Check, ...]

    @property
    def holds(self) -> bool:
        """Whether everything is within its bounds."""
        return all(check.agrees for check in self.checks)


def parity(pairs: Sequence[Pair]) -> Parity:
    """Judge pairs of runs together."""
    alike = met = total = refused = 0
    for simulated, live in pairs:
        assert simulated.trace_hash == live.trace_hash, "one pair, one trace"
        its = {row.request: row for row in live.rows}
        for row in simulated.rows:
            other = its[row.request]
            total += 1
            alike += _end(row) == _end(other)
            met += row.met == other.met
            refused += not (row.admitted and other.admitted)
    cells = _cells(pairs)
    checks = [_share(cell) for cell in cells]
    checks.append(_goodput(pairs))
    checks += _ttfts(pairs)
    if refused <= REFUSED_MOST * total:
        checks.insert(
            0, _check("requests that end otherwise", 1 - alike / max(1, total), 1 - AGREE_LEAST)
        )
    return Parity(
        requests=total, ended_alike=alike, met_alike=met, cells=tuple(cells), checks=tuple(checks)
    )


def _end(row: Concluded) -> tuple[str, str | None]:
    return entry_result(row), row.outcome


def _cells(pairs: Sequence[Pair]) -> list[Beside]:
    found: dict[tuple[TenantId, ClassName], list[int]] = {}
    for pair in pairs:
        for nth, run in enumerate(pair):
            for row in run.rows:
                counts = found.setdefault((row.tenant, row.slo_class), [0, 0, 0])
                counts[0] += not nth
                counts[1 + nth] += row.admitted
    return [
        Beside(
            tenant=tenant,
            slo_class=slo_class,
            offered=offered,
            admitted_simulated=simulated,
            admitted_live=live,
        )
        for (tenant, slo_class), (offered, simulated, live) in sorted(found.items())
    ]


def _share(cell: Beside) -> Check:
    difference = (cell.admitted_live - cell.admitted_simulated) / cell.offered
    return _check(f"admitted share of {cell.tenant}/{cell.slo_class}", difference, SHARE_MOST)


def _goodput(pairs: Sequence[Pair]) -> Check:
    simulated, live = (_work_goodput([pair[nth] for pair in pairs]) for nth in (0, 1))
    difference = (live - simulated) / simulated if simulated else float(live != simulated)
    return _check("work goodput, relative", difference, GOODPUT_MOST)


def _work_goodput(runs: Iterable[RunRecord]) -> float:
    """Return work that met per time served, of several runs taken together."""
    work = served = 0
    for run in runs:
        met = {row.request for row in run.rows if row.met}
        work += sum(one.work_ns for one in run.offered if one.request in met)
        served += times_of(run.span_ns, run.rows).served_ns
    return work / served if served else 0.0


def _ttfts(pairs: Sequence[Pair]) -> list[Check]:
    """Return the check of each class in which both sides have first tokens."""
    found: dict[ClassName, tuple[list[int], list[int]]] = {}
    for pair in pairs:
        for nth, run in enumerate(pair):
            for row in run.rows:
                if row.indicators is not None:
                    times = found.setdefault(row.slo_class, ([], []))
                    times[nth].append(row.indicators.ttft_ns)
    checks = []
    for slo_class, (simulated, live) in sorted(found.items()):
        if not simulated or not live:
            continue
        base = nearest_rank(sorted(simulated), 50)
        difference = nearest_rank(sorted(live), 50) - base
        limit = max(TTFT_MOST * base, TTFT_LEAST_NS)
        checks.append(
            _check(f"TTFT p50 of {slo_class}, ms", difference / NS_PER_MS, limit / NS_PER_MS)
        )
    return checks


def _check(name: str, difference: float, limit: float) -> Check:
    return Check(
        name=name,
        difference=rounded(difference),
        limit=rounded(limit),
        agrees=abs(difference) <= limit + _ROUNDING,
    )


_ROUNDING = 1e-9
"""1 - 0.98 is not 0.02 in floats."""


def parity_tables(found: Parity, title: str) -> list[Table]:
    """Return what agrees and what does not."""
    alike = words.percent(found.ended_alike / max(1, found.requests))
    met = words.percent(found.met_alike / max(1, found.requests))
    return [
        Table(
            title=title,
            columns=(Column("live less simulated", right=False), *map(Column, ("", "at most", ""))),
            rows=tuple(
                (
                    one.name,
                    words.signed(one.difference, 4),
                    f"{one.limit:,.4f}",
                    "" if one.agrees else "NO",
                )
                for one in found.checks
            ),
            note=f"{words.count(found.requests)} requests: {alike} ended alike, {met} met alike",
        ),
        Table(
            title="Admitted",
            columns=(
                *(Column(name, right=False) for name in ("tenant", "class")),
                *map(Column, ("offered", "simulated", "live")),
            ),
            rows=tuple(
                (
                    str(cell.tenant),
                    str(cell.slo_class),
                    words.count(cell.offered),
                    words.percent(cell.admitted_simulated / cell.offered),
                    words.percent(cell.admitted_live / cell.offered),
                )
                for cell in found.cells
            ),
        ),
    ]


def lag_verdict(p99_ns: DurationNs, limit_ns: DurationNs) -> str | None:
    """Return why a run is neither pass nor fail, or None."""
    if p99_ns <= limit_ns:
        return None
    return (
        f"loop lag p99 {words.duration(p99_ns)}, above {words.duration(limit_ns)}:"
        " invalid, neither pass nor fail"
    )
