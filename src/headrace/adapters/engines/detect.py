"""Which kind of engine is there? Asked once, where the configuration does not say.

By what only one kind has: names of metrics, then paths. Never by a version.
"""

from collections.abc import Callable

import msgspec
from msgspec import Raw

from headrace.adapters.engines.exposition import kind_of
from headrace.adapters.engines.fetch import Answer, Fetch, look
from headrace.adapters.engines.kinds import KINDS
from headrace.adapters.upstream.client import Upstream
from headrace.adapters.upstream.usage import UNREADABLE
from headrace.model.engine import EngineKind
from headrace.ports.clock import Clock

EMULATED_MARK = "headrace_engine_"
"""How a metric begins that only the emulated engine has: the rest it shares with vLLM."""
_BROKEN, _UNKNOWN = 500, 501
_BUSY = frozenset({408, 425, 429})

_PREFIXES = {EngineKind.EMULATED: (EMULATED_MARK,)} | {
    kind: traits.prefixes for kind, traits in KINDS.items() if kind is not EngineKind.EMULATED
}
_FIELDS = msgspec.json.Decoder(dict[str, Raw])


def _by_metrics(body: bytes) -> EngineKind | None:
    return kind_of(body, _PREFIXES)


def _by_props(body: bytes) -> EngineKind | None:
    return EngineKind.LLAMACPP if _has(body, "default_generation_settings") else None


def _by_server_info(body: bytes) -> EngineKind | None:
    return EngineKind.SGLANG if _has(body, "tp_size") else None


_LOOKS: tuple[tuple[str, Callable[[bytes], EngineKind | None]], ...] = (
    ("/metrics", _by_metrics),
    ("/props", _by_props),
    ("/get_server_info", _by_server_info),
    ("/prometheus/metrics", _by_metrics),
)
"""Where to look, in order, and what to make of it."""


class Detection:
    """A search under way."""

    def __init__(
        self, upstream: Upstream, clock: Clock, found: Callable[[EngineKind | None], None]
    ) -> None:
        """Begin; `found` is told the kind, later and once: `OPENAI` if all that tells one is absent.

        None: something failed that might have told, so ask again.
        """
        self._upstream, self._clock, self._found = upstream, clock, found
        self._next, self._failed = 0, False
        self._fetch: Fetch | None = None
        self._look()

    def abort(self) -> None:
        """Search no more."""
        if self._fetch is not None:
            self._fetch.abort()

    def _look(self) -> None:
        path = _LOOKS[self._next][0]
        self._fetch = look(self._upstream, self._clock, path, self._looked)

    def _looked(self, answer: Answer) -> None:
        kind = _LOOKS[self._next][1](answer.body) if answer.good else None
        self._failed |= _failed(answer)
        self._next += 1
        if kind is None and self._next < len(_LOOKS):
            self._look()
        else:
            self._found(kind or (None if self._failed else EngineKind.OPENAI))


def _failed(answer: Answer) -> bool:
    """Return whether an answer leaves open what is there: 501 and most of 4xx say that nothing is."""
    if answer.error is not None or answer.status in _BUSY:
        return True
    return answer.status >= _BROKEN and answer.status != _UNKNOWN


def _has(body: bytes, field: str) -> bool:
    """Return whether a body is an object with a field."""
    try:
        return field in _FIELDS.decode(body)
    except UNREADABLE:
        return False
