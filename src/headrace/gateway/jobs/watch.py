"""What do live callers of a model have left, and what stands open? Read off plane and driver."""

from msgspec import Struct

from headrace.gateway.driver import Driver
from headrace.model.decision import Reason
from headrace.model.effect import Concluded
from headrace.model.ids import ModelName, RequestId
from headrace.model.slo import Bounds, Indicators
from headrace.plane.state import Phase
from headrace.policy.fairness.leftover import Seen
from headrace.units import MICRO

_SHORT = frozenset(
    {
        Reason.NO_READY_REPLICA,
        Reason.DEADLINE_QUEUE,
        Reason.GAP_BOUND,
        Reason.TPOT_BOUND,
        Reason.QUEUE_PRESSURE,
        Reason.EXPIRED,
        Reason.WAITED_OUT,
    }
)
"""Ends for want of capacity."""


class _Since(Struct):
    """What ended since the last look."""

    refused: int = 0
    slack_ppm: int | None = None

    def add(self, row: Concluded, bounds: Bounds | None) -> None:
        self.refused += row.reason in _SHORT
        if bounds is None or row.indicators is None:
            return
        for left in _left(row.indicators, bounds):
            if self.slack_ppm is None or left < self.slack_ppm:
                self.slack_ppm = left


def _left(seen: Indicators, bounds: Bounds) -> list[int]:
    """Return which parts of its bounds, in millionths, an answer had left.

    One that came in one piece says nothing of its first token, nor of gaps.
    """
    tpot = seen.tpot_ns()
    if tpot is not None and not seen.gaps_ns:
        return []
    pairs = ((seen.ttft_ns, bounds.ttft_ns), (tpot, bounds.tpot_ns))
    return [
        round((bound - value) * MICRO / bound)
        for value, bound in pairs
        if bound and value is not None
    ]


class Watch:
    """Looks at live traffic now and then."""

    def __init__(self, driver: Driver, reserve: float) -> None:
        """Look at what `driver` does; a replica stands open with `reserve` of it to spare."""
        self._driver, self._keep = driver, 1 - reserve
        self._last: Concluded | None = None
        self._since: dict[ModelName, _Since] = {}
        self.own: set[RequestId] = set()
        """Requests that are jobs, until their ends were seen."""

    def look(self) -> None:
        """Note what ended since the last look; bounds are the classes' own, no caller's tighter ones."""
        settings, rows = self._driver.plane.settings, []
        for row in reversed(self._driver.recent):
            if row is self._last:
                break
            rows.append(row)
        if rows:
            self._last = rows[0]
        for row in rows:
            if row.request in self.own:
                self.own.discard(row.request)
            else:
                since = self._since.setdefault(row.model, _Since())
                since.add(row, settings.bounds.get(row.slo_class))

    def seen(self, model: ModelName, jobs: list[RequestId | None], *, more: bool) -> Seen:
        """Return what was seen of a model since this was asked last.

        `jobs` are those under way; `more`: others wait to be taken up.
        """
        plane = self._driver.plane
        known, since = plane.state.models.get(model), self._since.pop(model, _Since())
        stuck = sum(self.is_stuck(one) for one in jobs if one is not None)
        return Seen(
            waiting=0 if known is None else known.backlog.size - stuck,
            refused=since.refused,
            slack_ppm=since.slack_ppm,
            open=self._open(model),
            running=len(jobs),
            stuck=stuck,
            more=more,
        )

    def is_stuck(self, request: RequestId) -> bool:
        """Return whether a request waits for a replica."""
        live = self._driver.plane.state.live.get(request)
        return live is not None and live.phase is Phase.QUEUED

    def _open(self, model: ModelName) -> int:
        plane = self._driver.plane
        known = plane.state.models.get(model)
        found = 0
        for replica in () if known is None else known.fleet.cheapest():
            facts = plane.settings.pools[replica.pool]
            load, window = plane.state.ledger.loads[replica.incarnation], facts.window_ns
            found += (
                load.attempts < facts.spec.profile.max_running * self._keep
                and load.blocks < facts.blocks_total * self._keep
                and load.behind_ns(window) < window
            )
        return found
