"""One connection to a server: who uses it now, and is it still good?

Carries one exchange at a time. Bytes or an end while nobody uses it make it useless.
"""

import asyncio
from typing import Protocol, cast

from headrace.units import InstantNs

_JOINED_MAX = 65_536  # a body up to this is copied rather than written in a second piece


class User(Protocol):
    """Who is told what comes over a connection?"""

    def received(self, data: bytes) -> None:
        """Bytes came."""
        ...

    def eof(self) -> None:
        """The server sends no more."""
        ...

    def lost(self, error: Exception | None) -> None:
        """The connection is gone."""
        ...


class Owner(Protocol):
    """Who keeps connections?"""

    def gone(self, connection: "Connection") -> None:
        """The connection is closed, or about to be; told at least once."""
        ...


class Connection(asyncio.Protocol):
    """One connection."""

    __slots__ = ("_owner", "_transport", "idle_since", "is_good", "is_paused", "user")

    def __init__(self, owner: Owner) -> None:
        """Await the socket."""
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self.user: User | None = None
        self.idle_since = InstantNs(0)
        self.is_good = False
        """The socket is open, and nothing came over it that nobody asked for."""
        self.is_paused = False
        """We do not read."""

    def send(self, head: bytes, body: bytes) -> None:
        """Send a request."""
        assert self._transport is not None
        if len(body) < _JOINED_MAX:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    @property
    def is_sent(self) -> bool:
        """Whether all that was sent has left the process."""
        return self._transport is not None and not self._transport.get_write_buffer_size()

    def pause(self) -> None:
        """Read no more for now; the end of the connection stays unseen too."""
        if self.is_good and not self.is_paused:
            assert self._transport is not None
            self._transport.pause_reading()
            self.is_paused = True

    def resume(self) -> None:
        """Read again."""
        if self.is_good and self.is_paused:
            assert self._transport is not None
            self._transport.resume_reading()
            self.is_paused = False

    def abort(self) -> None:
        """Close at once; nobody is told of it."""
        self.user = None
        self._over()
        if self._transport is not None:
            self._transport.abort()

    def socket_option(self, level: int, name: int) -> int:
        """Return an option of the socket."""
        assert self._transport is not None
        value: int = self._transport.get_extra_info("socket").getsockopt(level, name)
        return value

    # What the loop calls ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own is no subclass
        self.is_good = True

    def data_received(self, data: bytes) -> None:
        """Pass on what came."""
        if self.user is not None:
            self.user.received(data)
        else:
            self.abort()

    def eof_received(self) -> None:
        """Pass the end on; our side closes as well."""
        if self.user is not None:
            self.user.eof()
        else:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass on that it is gone."""
        user, self.user = self.user, None
        self._over()
        if user is not None:
            user.lost(exc)

    def _over(self) -> None:
        self.is_good = False
        self._owner.gone(self)
