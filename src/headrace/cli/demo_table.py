"""The demo's live table: what each tenant asked for and got, so far."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TextIO

from rich.table import Table

from headrace.gateway.driver import Driver
from headrace.load.caller import Answer
from headrace.model.ids import TenantId
from headrace.plane.accounts import Tally
from headrace.ports.clock import Clock
from headrace.units import DurationNs, to_ms, to_seconds

_COLUMNS = (
    "tenant",
    "offered",
    "admitted",
    "refused",
    "expired",
    "live",
    "done",
    "met",
    "met of offered",
    "TTFT p50",
    "TTFT p99",
    "work met",
)


class Board:
    """Counts answers as callers see them and shows them beside the plane's accounts."""

    def __init__(
        self, driver: Driver, clock: Clock, tenants: Sequence[TenantId], end: DurationNs
    ) -> None:
        """Watch a driver from now on; its last request is offered `end` later."""
        self._driver, self._clock, self._tenants, self._end = driver, clock, tenants, end
        self._began = clock.now()
        self._ttfts: defaultdict[TenantId, list[int]] = defaultdict(list)
        self._statuses: Counter[int] = Counter()
        self._lines = 0

    def answered(self, tenant: TenantId, answer: Answer) -> None:
        """Count an answer as its caller saw it."""
        self._statuses[answer.status] += 1
        if answer.ttft_ns is not None:
            self._ttfts[tenant].append(answer.ttft_ns)

    def table(self) -> Table:
        """Return the table as it stands."""
        table = Table(title=self._title(), title_justify="left", caption=self._caption())
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name == "tenant" else "right")
        for tenant in self._tenants:
            table.add_row(*self._cells(tenant))
        return table

    def line(self, out: TextIO) -> None:
        """Print one plain line now and then, for where no table can be redrawn."""
        self._lines += 1
        if self._lines % 10 == 1:
            parts = (
                " ".join((cells[0], cells[1], cells[8]))
                for cells in map(self._cells, self._tenants)
            )
            print(
                f"{self._title()}: offered, met of offered: " + "; ".join(parts),
                file=out,
                flush=True,
            )

    def _title(self) -> str:
        passed = self._clock.now() - self._began
        what = "offering" if passed < self._end else "finishing what was admitted"
        return f"{to_seconds(passed):5.1f} s, {what}"

    def _caption(self) -> str:
        codes = ", ".join(f"{code}: {count}" for code, count in sorted(self._statuses.items()))
        return f"answers by status  {codes or 'none yet'}"

    def _cells(self, tenant: TenantId) -> tuple[str, ...]:
        tallies = self._driver.plane.state.accounts.tallies.get(tenant, {}).values()
        offered = sum(t.offered for t in tallies)
        admitted = sum(t.admitted for t in tallies)
        refused = sum(sum(t.rejected.values()) for t in tallies)
        ended = sum(sum(t.outcomes.values()) for t in tallies)
        early = sum(sum(t.ended_early.values()) for t in tallies)
        met = sum(t.met for t in tallies)
        ttfts = sorted(self._ttfts[tenant])
        return (
            tenant,
            str(offered),
            str(admitted),
            str(refused),
            str(early),
            str(admitted - ended),
            str(ended - early),
            str(met),
            f"{met / offered:.0%}" if offered else "-",
            _quantile(ttfts, 50),
            _quantile(ttfts, 99),
            f"{to_seconds(_served(list(tallies))):.1f} s",
        )


def _served(tallies: Sequence[Tally]) -> int:
    return sum(tally.met_work_ns for tally in tallies)


def _quantile(ordered: Sequence[int], percent: int) -> str:
    """Return a percentile by nearest rank, in ms."""
    if not ordered:
        return "-"
    return f"{to_ms(ordered[max(0, -(-len(ordered) * percent // 100) - 1)]):,.0f} ms"
