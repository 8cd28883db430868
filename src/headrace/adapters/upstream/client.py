"""One server that speaks OpenAI's or Anthropic's words: what is asked of it, by name.

engine = Upstream("http://10.0.0.7:8000", clock, key="...")
exchange = engine.ask(Route.CHAT, body, listener, hide_usage=True)
exchange.pause(); exchange.resume(); exchange.abort()
"""

import ssl
from urllib.parse import urlsplit

from headrace.adapters.upstream.exchange import (
    ANSWER_MAX,
    NO_TIMEOUTS,
    Exchange,
    Listener,
    Request,
    Timeouts,
)
from headrace.adapters.upstream.pool import DEFAULT_LIMITS, Limits, Origin, Pool
from headrace.adapters.upstream.usage import EachUsage
from headrace.model.meter import Meter
from headrace.ports.clock import Clock
from headrace.ports.engine import Route

_PORTS = {"http": 80, "https": 443}
_JSON = (b"content-type", b"application/json")
_PLAIN = (b"accept-encoding", b"identity")


def origin_of(url: str, *, key: str | None = None, tls: ssl.SSLContext | None = None) -> Origin:
    """Return the server of an address like `http://host:port`; raises ValueError.

    `tls`: how certificates are checked, if not as usual.
    """
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname or parts.username or parts.query:
        raise ValueError(f"not the address of a server: {url}")
    headers = () if key is None else ((b"authorization", b"Bearer " + key.encode("ascii")),)
    return Origin(
        host=parts.hostname,
        port=parts.port or _PORTS[parts.scheme],
        tls=(tls or ssl.create_default_context()) if parts.scheme == "https" else None,
        headers=headers,
    )


class Upstream:
    """One server. Made within the loop that runs it; `pool` tells how it fares."""

    def __init__(
        self,
        url: str,
        clock: Clock,
        *,
        key: str | None = None,
        tls: ssl.SSLContext | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """Know a server by its address; a path at its end is put before all others."""
        self._base = urlsplit(url).path.rstrip("/").removesuffix("/v1")
        self.pool = Pool(origin_of(url, key=key, tls=tls), clock, limits)

    def ask(  # noqa: PLR0913 - what all requests have, by name
        self,
        route: Route,
        body: bytes,
        listener: Listener,
        *,
        hide_usage: bool = False,
        each_usage: EachUsage = EachUsage.NOBODY,
        timeouts: Timeouts = NO_TIMEOUTS,
        meter: Meter | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> Exchange:
        """Ask something of a route; `body` is the request's JSON, answered with a stream if it says so.

        `hide_usage`: keep out of the stream what `stream_options` brought and the caller did not ask
        for; only chat and completions have it. `each_usage`: who asked for it in each frame. `meter`
        counts frames with content as they arrive, or tokens where each frame tells them.
        """
        request = Request(
            method="POST",
            path=self._base + route,
            route=route,
            headers=(_JSON, _PLAIN, *headers),
            body=body,
            hide_usage=hide_usage,
            each_usage=each_usage,
            timeouts=timeouts,
            meter=meter,
        )
        return self.pool.open(request, listener)

    def get(
        self,
        path: str,
        listener: Listener,
        timeouts: Timeouts = NO_TIMEOUTS,
        *,
        answer_limit: int = ANSWER_MAX,
    ) -> Exchange:
        """Ask for what is under a path, such as `/health` or `/metrics`, in `answer_limit` bytes."""
        request = Request(
            method="GET",
            path=self._base + path,
            headers=(_PLAIN,),
            timeouts=timeouts,
            answer_limit=answer_limit,
        )
        return self.pool.open(request, listener)

    def close(self) -> None:
        """Close every connection; nothing is told any more."""
        self.pool.close()
