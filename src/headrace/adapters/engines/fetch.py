"""One small question to an engine, and its whole answer or why there is none."""

from collections.abc import Callable

from msgspec import Struct

from headrace.adapters.upstream.client import Upstream
from headrace.adapters.upstream.exchange import Exchange, Listener, Result, Timeouts
from headrace.adapters.upstream.response import Headers
from headrace.ports.clock import Clock
from headrace.ports.upstream import UpstreamError
from headrace.units import NS_PER_S, DurationNs, later

PAGE_MAX = 4_194_304
"""Bytes of a page that is looked at. 4 MiB: a hundred times a usual page of metrics."""
_WAIT_NS = DurationNs(2 * NS_PER_S)
_OK = 200


class Answer(Struct, frozen=True, kw_only=True):
    """What came of it."""

    status: int
    body: bytes
    error: UpstreamError | None

    @property
    def good(self) -> bool:
        """Whether all of it came, with status 200."""
        return self.error is None and self.status == _OK


class Fetch:
    """A question under way; it and its exchange know each other until then, and no longer."""

    __slots__ = ("_body", "_exchange", "_then")

    def __init__(self, ask: Callable[[Listener], Exchange], then: Callable[[Answer], None]) -> None:
        """Ask; `then` is given the answer, later, unless it is aborted."""
        self._then, self._body = then, b""
        self._exchange: Exchange | None = ask(self)

    def abort(self) -> None:
        """Ask no more."""
        if self._exchange is not None:
            self._exchange.abort()
            self._exchange = None

    # What the exchange tells --------------------------------------------------------------------

    def on_head(self, status: int, headers: Headers) -> None:
        """Wait for the rest."""

    def on_frames(self, data: bytes, frames: int) -> None:  # noqa: ARG002 - a stream is none to us
        """Keep the answer, which comes in one piece."""
        self._body = data

    def on_end(self, result: Result) -> None:
        """Hand it over."""
        self._exchange = None
        self._then(Answer(status=result.status, body=self._body, error=result.error))


def brief(clock: Clock) -> Timeouts:
    """Return how long a question may take that is asked now and again: 2 s to its answer, 4 s in all."""
    return Timeouts(first_byte_ns=_WAIT_NS, deadline=later(clock.now(), DurationNs(2 * _WAIT_NS)))


def look(upstream: Upstream, clock: Clock, path: str, then: Callable[[Answer], None]) -> Fetch:
    """Ask for a page."""
    waits = brief(clock)
    return Fetch(lambda listener: upstream.get(path, listener, waits, answer_limit=PAGE_MAX), then)
