"""How does an engine say it fares? Its load path is read once a period, and what it lacks is told.

Absent is unknown, never zero: a signal that is not there leaves its field empty and raises an alarm
(`headrace_replica_signals_missing`, one line of log), for it was renamed, or the path is closed.
"""

import logging
import zlib
from collections.abc import Callable

from headrace.adapters.engines.exposition import Load, load_of, load_of_slots
from headrace.adapters.engines.fetch import Answer, Fetch, look
from headrace.adapters.engines.kinds import Traits
from headrace.adapters.upstream.client import Upstream
from headrace.adapters.upstream.usage import UNREADABLE
from headrace.ports.clock import Clock, Timer
from headrace.ports.upstream import PoolFullError
from headrace.units import NS_PER_MS, DurationNs, InstantNs, later

_log = logging.getLogger(__name__)
SPREAD_NS = 200 * NS_PER_MS
"""Engines are asked at instants spread over this, each at its own: pages of hundreds of engines, read
in one turn of the loop, would hold up every stream. 200 ms: a fifth of the usual period."""
FAILURES = 3
"""Scrapes in a row without an answer before that is told: one may be lost to a busy machine."""
PATH, UNREAD, SILENT = "path", "unreadable", "silent"
"""What may be missing beside single signals: the path, a page that can be read, any answer."""


class Scrape:
    """The load of one engine, asked for again and again."""

    def __init__(
        self,
        name: str,
        upstream: Upstream,
        clock: Clock,
        told: Callable[[Load, InstantNs], None],
    ) -> None:
        """Ask nothing yet; `told` is given what an engine says, and when it was asked."""
        self._name, self._upstream, self._clock, self._told = name, upstream, clock, told
        self._offset = DurationNs(zlib.crc32(name.encode()) % SPREAD_NS)
        self._timer: Timer | None = None
        self._fetch: Fetch | None = None
        self._by_slots = False
        self._failures = 0
        self.missing: tuple[str, ...] = ()
        """What it should tell and does not: signals, or why there are none."""

    def ask(self, traits: Traits) -> None:
        """Ask for a report soon, unless one is under way."""
        if self._timer is None and self._fetch is None and traits.metrics_path is not None:
            due = later(self._clock.now(), self._offset)
            self._timer = self._clock.call_at(due, lambda: self._start(traits))

    def stop(self) -> None:
        """Ask no more for now, and forget what was missing: that was another life."""
        if self._timer is not None:
            self._timer.cancel()
        if self._fetch is not None:
            self._fetch.abort()
        self._timer = self._fetch = None
        self._by_slots, self._failures, self.missing = False, 0, ()

    def _start(self, traits: Traits) -> None:
        self._timer = None
        asked_at = self._clock.now()
        path = traits.slots_path if self._by_slots else traits.metrics_path
        assert path is not None, "it tells its load nowhere"
        self._fetch = look(
            self._upstream,
            self._clock,
            path,
            lambda answer: self._answered(traits, answer, asked_at),
        )

    def _answered(self, traits: Traits, answer: Answer, asked_at: InstantNs) -> None:
        self._fetch = None
        if isinstance(answer.error, PoolFullError):
            return  # all connections are at work
        if answer.error is not None:
            self._failures += 1
            if self._failures >= FAILURES:
                self._lack((SILENT,))
            return
        self._failures = 0
        if not answer.good:
            self._lack((PATH,))
            # Another life may have the metrics; until then the slots, turn by turn.
            self._by_slots = traits.slots_path is not None and not self._by_slots
            return
        try:
            load = load_of_slots(answer.body) if self._by_slots else load_of(traits, answer.body)
        except UNREADABLE:
            self._lack((UNREAD,))
            return
        self._lack(tuple(load.missing))
        self._told(load, asked_at)

    def _lack(self, missing: tuple[str, ...]) -> None:
        """Note what is missing, and tell it once."""
        if missing == self.missing:
            return
        self.missing = missing
        if missing:
            what = ", ".join(missing)
            _log.warning(
                "engine %s does not tell its load: %s; see docs/engines.md", self._name, what
            )
        else:
            _log.warning("engine %s tells its load again", self._name)
