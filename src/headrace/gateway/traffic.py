"""The server that callers' connections come to, and how it ends."""

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import uvicorn

from headrace.config.schema import ServerSpec
from headrace.gateway.connection import Connection
from headrace.gateway.driver import Driver

Rest = Callable[[Callable[[], bool]], Awaitable[None]]
"""Waits for what is worked on without a connection, or until there is a reason to hurry."""


class Server(uvicorn.Server):
    """A server that drains its driver before its connections, and takes signals without re-raising.

    The second Ctrl-C does not wait for anybody.
    """

    def __init__(
        self, config: uvicorn.Config, driver: Driver, spec: ServerSpec, rest: Rest
    ) -> None:
        """Serve for `driver`, whose streams get the time to finish that `spec` tells.

        `rest` waits for what is worked on without a connection, or for a reason to hurry.
        """
        super().__init__(config)
        self._rest = rest
        self._driver, self._drain_s = driver, spec.drain_s
        self._handshake_s = spec.header_timeout_s
        self.on_accepting: Callable[[], None] | None = None
        self.succeeded = False
        """Whether another process has the listener: nobody need be refused."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Let callers in. The base knows no limit for the handshake of TLS, so it gets no sockets."""
        assert sockets is not None, "it does not listen itself"
        await super().startup([])
        loop, config = asyncio.get_running_loop(), self.config
        for sock in sockets:
            server = await loop.create_server(
                self._connection,
                sock=sock,
                ssl=config.ssl,
                backlog=config.backlog,
                ssl_handshake_timeout=None if config.ssl is None else self._handshake_s,
            )
            self.servers.append(server)
        told, self.on_accepting = self.on_accepting, None
        if told is not None:
            told()

    def _connection(self) -> asyncio.Protocol:
        kind = self.config.http_protocol_class
        assert issubclass(kind, Connection), "as configured"
        return kind(self.config, self.server_state, self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse newcomers, let streams finish, end those that do not.

        After a hand-over each connection may ask once more: its caller cannot know of it.
        """
        if self.succeeded:
            for connection in self.server_state.connections:
                assert isinstance(connection, Connection)
                connection.retire()
        else:
            self._driver.refuse_newcomers()
        loop = asyncio.get_running_loop()
        ending = loop.call_later(self._drain_s, self._driver.end_all)
        try:
            await super().shutdown(sockets)
            await self._rest(lambda: self.force_exit)
        finally:
            ending.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM while serving."""
        loop = asyncio.get_running_loop()
        taken = (signal.SIGINT, signal.SIGTERM)
        for one in taken:
            loop.add_signal_handler(one, self.handle_exit, one, None)
        try:
            yield
        finally:
            for one in taken:
                loop.remove_signal_handler(one)
