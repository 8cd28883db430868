"""What the fuzzers share: a whole gateway on a socket, an engine that says what it is told, a budget."""

import asyncio
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import h11
import uvloop
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import HypothesisWarning
from hypothesis.strategies import SearchStrategy

from headrace.config.schema import ServerSpec, Settings, UpstreamSpec
from headrace.gateway.clock import MonotonicClock
from headrace.gateway.server import Gateway, listen
from tests.gateway.scenes import assert_books_closed, deployment, keys

BUDGET_S = float(os.environ.get("HEADRACE_FUZZ_S", "2"))
"""Seconds for each target."""
LEAST = 25
"""Examples for each target at the least, on however busy a machine."""
PATIENCE_S = 0.15
"""What a caller gets to send a head, or a body, that never comes."""
AT_ONCE_S = 2.0
"""What it gets where it sends all at once: this machine may be busy for longer than `PATIENCE_S`."""
HANG_S = 5.0
"""After which a connection that is neither answered nor closed hangs."""
SERVED = "engine-model"
HELLO = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
T = TypeVar("T")


def explore(strategy: SearchStrategy[T], holds: Callable[[T], None]) -> int:
    """Try examples until the budget is spent; return how many. The same ones first on every run."""
    end = time.monotonic() + BUDGET_S
    tried = nth = 0
    failed = False

    def one(example: T) -> None:
        nonlocal tried, failed
        if not failed and tried >= LEAST and time.monotonic() > end:
            return  # one that failed is made small, however long that takes
        tried += 1
        try:
            holds(example)
        except BaseException:
            failed = True
            raise

    while tried < LEAST or time.monotonic() < end:
        bounded = settings(
            max_examples=100,
            deadline=None,
            database=None,
            derandomize=False,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HypothesisWarning)  # of examples that are long
            seed(nth)(bounded(given(strategy)(one)))()
        nth += 1
    return tried


class Saying(NamedTuple):
    """What an engine answers: pieces, each a write of its own, and then the end of the connection."""

    pieces: Sequence[bytes]
    closes: bool = False


def whole(content: bytes, kind: bytes = b"application/json") -> Saying:
    """Return an answer in one piece."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
    return Saying((head % (kind, len(content)) + content,))


class Engine:
    """An engine that is always well, and answers every request with `says`."""

    def __init__(self) -> None:
        self.says = whole(b"{}")
        self.asked: list[tuple[str, Any]] = []
        """(path, JSON) of every request but probes."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii").split("\r\n")
        method, path, _ = head[0].split(" ")
        fields = [line.split(": ", 1) for line in head[1:] if line]
        lengths = [int(value) for name, value in fields if name == "content-length"]
        assert len(lengths) == (method == "POST"), head
        if method == "GET":
            writer.write(HELLO)
            return True
        body = await reader.readexactly(lengths[0])
        if body == b"{}":  # whether it takes the key: it does
            writer.write(HELLO.replace(b"200", b"400"))
            return True
        self.asked.append((path, json.loads(body)))
        says = self.says
        for piece in says.pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        return not says.closes


class Answer(NamedTuple):
    """What a caller got."""

    status: int
    kind: str
    """The content type."""
    body: bytes
    complete: bool
    """It ended as its head had promised."""


def read_answer(content: bytes) -> Answer:
    """Read the one answer to a POST, by a reader that is not ours."""
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    reader.send(h11.EndOfMessage())
    reader.receive_data(content)
    reader.receive_data(b"")
    head = reader.next_event()
    assert isinstance(head, h11.Response), content[:500]
    kind = dict(head.headers).get(b"content-type", b"").decode()
    body = b""
    try:
        while isinstance(event := reader.next_event(), h11.Data):
            body += event.data
    except h11.RemoteProtocolError:
        return Answer(head.status_code, kind, body, complete=False)
    return Answer(head.status_code, kind, body, complete=isinstance(event, h11.EndOfMessage))


class Front:
    """A gateway before an engine, on a loop that stands still between examples."""

    def __init__(self, runner: asyncio.Runner, gateway: Gateway, engine: Engine, port: int) -> None:
        self._runner, self.gateway, self.engine, self.port = runner, gateway, engine, port

    def run(self, doing: Coroutine[Any, Any, T]) -> T:
        """Do something on the loop; it must be over in time."""
        return self._runner.run(asyncio.wait_for(doing, HANG_S))

    async def exchange(self, pieces: Sequence[bytes], *, ends: bool = False) -> bytes:
        """Send pieces over a connection of its own; return all that comes until it is closed."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if ends:
                writer.write_eof()
            return await reader.read()
        except OSError:  # closed already
            return b""
        finally:
            writer.transport.abort()

    async def settled(self) -> None:
        """Wait until nobody is served, and check that nobody holds anything."""
        driver = self.gateway.driver
        while driver.live and driver.broken is None:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.001)
        assert driver.broken is None, driver.broken
        assert_books_closed(self.gateway.driver.plane)


class _Complaints(logging.Handler):
    """Whatever is logged as an error, or with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self.found.append(self.format(record))


async def _started(
    engine: Engine, server: ServerSpec
) -> tuple[Gateway, asyncio.Task[bool], asyncio.Server, int]:
    serving = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    port = serving.sockets[0].getsockname()[1]
    given = Settings(
        deployment=deployment(replicas=0),
        keys=keys(),
        server=server,
        upstreams=(UpstreamSpec(url=f"http://127.0.0.1:{port}", pool="p", model=SERVED),),
    )
    gateway = Gateway(given, MonotonicClock(asyncio.get_running_loop()))
    gateway.server.config.timeout_keep_alive = PATIENCE_S  # type: ignore[assignment] # not seconds
    sock = listen("127.0.0.1", 0)
    running = asyncio.create_task(gateway.serve(sock))
    while not gateway.driver.ready_replicas:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.001)
    return gateway, running, serving, sock.getsockname()[1]


@contextmanager
def fronted(engine: Engine | None = None, *, patience_s: float = AT_ONCE_S) -> Iterator[Front]:
    """Serve; at the end all must be well, with not one error logged or left to the loop."""
    spec = ServerSpec(port=0, drain_s=0, header_timeout_s=patience_s)
    engine = engine or Engine()
    complaints = _Complaints()
    lost: list[dict[str, Any]] = []
    logging.getLogger().addHandler(complaints)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            loop = runner.get_loop()
            loop.set_exception_handler(lambda _, context: lost.append(context))
            gateway, running, serving, port = runner.run(_started(engine, spec))
            try:
                yield Front(runner, gateway, engine, port)
            finally:
                gateway.stop()
                assert runner.run(asyncio.wait_for(_ended(running), 2 * HANG_S))
                serving.close()
            assert_books_closed(gateway.driver.plane)
    finally:
        logging.getLogger().removeHandler(complaints)
    assert not complaints.found, complaints.found[0]
    assert not lost, lost[0]


async def _ended(running: asyncio.Task[bool]) -> bool:
    return await running
