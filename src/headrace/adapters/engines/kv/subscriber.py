"""Hears what one engine publishes, over ZeroMQ: a SUB socket, and a DEALER to ask for what was missed.

Needs the library `pyzmq`, an extra. Connections are made and remade by ZeroMQ itself: an engine that is
not there yet is no error. Whatever arrives is bounded, and what is too much is a gap like any other.
"""

import asyncio
import contextlib
import logging
from typing import Any

from msgspec import Struct

from headrace.adapters.engines.kv.follower import Follower

_log = logging.getLogger(__name__)
NUMBER_BYTES = 8
_END = b"\xff" * NUMBER_BYTES
"""In place of a number: all that was asked for has come."""
_FRAMES = 3  # topic, number, payload
_ANSWER_FRAMES = 2  # of answers the last ones: what is before them differs by version
_QUEUE = 16_384
"""Messages that wait unread at most; a little more than vLLM keeps to be asked for."""
_MESSAGE_MAX = 16_777_216
"""Bytes of a message; beyond, ZeroMQ closes the connection. 16 MiB: three million tokens in one step."""
_HEARTBEAT_MS, _SILENT_MS = 10_000, 30_000
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 1_000
PATIENCE_S = 5.0
"""Seconds between two messages that were asked for; beyond, no more of them come."""


class Source(Struct, frozen=True, kw_only=True):
    """Where an engine publishes."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


class Subscriber:
    """Follows one source from `start` to `close`."""

    follower: Follower

    def __init__(self, source: Source) -> None:
        """Connect nowhere yet; raises ImportError without the library."""
        import zmq.asyncio  # noqa: PLC0415 - an extra, needed where it is configured

        self._zmq, self._source = zmq, source
        self._socket: Any = None
        self._monitor: Any = None
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, follower: Follower) -> None:
        """Hand over what comes to a follower, from now on; to be called within the loop."""
        self.follower = follower
        zmq = self._zmq
        self._socket = self._connected(zmq.SUB, self._source.endpoint)
        self._socket.subscribe(self._source.topic)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._run("watch", self._watch())
        self._run("listen", self._listen())

    def ask(self, start: int) -> None:
        """Ask for what was published from a number on, and wait no more for what was asked before."""
        assert self._source.replay_endpoint is not None
        self._run("replay", self._replay(self._source.replay_endpoint, start))

    def close(self) -> None:
        """Hear nothing any more."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            task.cancel()
        if self._socket is not None:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()
            self._socket = None

    def _run(self, name: str, what: Any) -> None:
        before = self._tasks.get(name)
        if before is not None:
            before.cancel()
        self._tasks[name] = task = asyncio.get_running_loop().create_task(what)
        task.add_done_callback(_tell)

    def _connected(self, kind: int, endpoint: str) -> Any:
        zmq = self._zmq
        socket = zmq.asyncio.Context.instance().socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, _QUEUE),
            (zmq.MAXMSGSIZE, _MESSAGE_MAX),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _SILENT_MS),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS),
            (zmq.IPV6, 1),
        ):
            socket.setsockopt(option, value)
        socket.connect(endpoint)
        return socket

    async def _watch(self) -> None:
        monitor = self._monitor
        while True:
            await monitor.recv_multipart()
            self.follower.interrupted()

    async def _listen(self) -> None:
        socket = self._socket
        while True:
            frames = await socket.recv_multipart()
            if len(frames) == _FRAMES and len(frames[1]) == NUMBER_BYTES:
                self.follower.heard(int.from_bytes(frames[1], "big"), frames[2])
            else:
                self.follower.counts.malformed += 1
            await _breathe()

    async def _replay(self, endpoint: str, start: int) -> None:
        socket = self._connected(self._zmq.DEALER, endpoint)
        try:
            await socket.send_multipart([b"", start.to_bytes(NUMBER_BYTES, "big")])
            with contextlib.suppress(TimeoutError):
                while await self._answer(socket):
                    await _breathe()
        finally:
            socket.close()
        self.follower.replay_over()

    async def _answer(self, socket: Any) -> bool:
        """Take one message that was asked for; return whether more are to come."""
        async with asyncio.timeout(PATIENCE_S):
            frames = await socket.recv_multipart()
        number, payload = frames[-_ANSWER_FRAMES:] if len(frames) > 1 else (b"", b"")
        if number == _END:
            return False
        if len(number) == NUMBER_BYTES:
            self.follower.replayed(int.from_bytes(number, "big"), payload)
        else:
            self.follower.counts.malformed += 1
        return True


def _tell(task: asyncio.Task[None]) -> None:
    """Tell of a bug of ours: the engine serves, and its cache is heard no more."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("KV events are heard no more", exc_info=error)


async def _breathe() -> None:
    """Let others have a turn: what has come already is received without one."""
    await asyncio.sleep(0)  # noqa: TID251 - waits for nothing
