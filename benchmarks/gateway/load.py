"""The callers of a gateway: keep it busy, read what it used meanwhile.

One process a measurement, job in on stdin, sample out on stdout, as JSON. Requests: as many at once as there are connections.
Chunks: one stream a connection, again and again. Memory: one slow stream a connection, once.
"""

import asyncio
import re
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from http.client import HTTPConnection
from typing import Any, cast

import msgspec
import uvloop
from msgspec import Struct

from benchmarks.gateway import proc, wire
from benchmarks.gateway.engine import HOST, Stats

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_DIALS = 32
"""Connections dialled at once: fewer than the shortest queue of any peer's listening socket."""
_REDIAL_S = 0.05
_LOOK_S = 0.5
_MEMORY_PACE_MS = 2_000
_MEMORY_WAIT_S = 60.0
_SETTLE_S = 1.0


class Mode(StrEnum):
    """What is measured."""

    REQUESTS = "requests"
    CHUNKS = "chunks"
    MEMORY = "memory"


class Job(Struct, frozen=True, kw_only=True):
    """One measurement."""

    mode: Mode
    port: int
    """Of the gateway."""
    root: int
    """Process id of the gateway."""
    engine_port: int
    connections: int
    key: str | None = None
    exact: bool = True
    """Whether the gateway passes on each frame of the engine, so that they can be counted."""
    warm_s: float = 1.0
    least_s: float = 2.0
    least_cpu_s: float = 1.0
    """CPU time the gateway must burn, unless `most_s` pass."""
    most_s: float = 15.0


class Sample(Struct, frozen=True, kw_only=True):
    """What came of it. For memory only bytes, connections and errors tell anything."""

    wall_s: float = 0.0
    requests: int = 0
    chunks: int = 0
    cpu_s: float = 0.0
    """Of the gateway."""
    load_cpu_s: float = 0.0
    """Of callers and engine."""
    waited_s: float = 0.0
    """That the gateway's threads were kept from its core, by each other or by other work."""
    errors: int = 0
    reconnects: int = 0
    opened: int = 0
    """Connections that the gateway opened to the engine meanwhile."""
    memory_bytes: int = 0
    """More than before the streams."""
    said: str = ""
    """How the first wrong answer began."""


class Tally(Struct):
    """What all callers have seen."""

    done: int = 0
    frames: int = 0
    begun: int = 0
    """Streams that have shown a frame."""
    errors: int = 0
    reconnects: int = 0
    said: str = ""


class Snapshot(Struct, frozen=True, kw_only=True):
    """All counters at one moment."""

    at: float
    done: int
    frames: int
    cpu_s: float
    waited_s: float
    own_cpu_s: float
    engine: Stats


class Caller(asyncio.Protocol):
    """One connection to the gateway, with one request at a time."""

    def __init__(self, callers: "Callers") -> None:
        self._all, self._tally = callers, callers.tally
        self._busy, self._frames = False, 0
        self._head = self._end = b""
        # Bytes to come; below zero: chunks until the last; None: no head yet.
        self._left: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._gateway = cast("asyncio.WriteTransport", transport)  # uvloop's own class is neither

    def send(self) -> None:
        """Send the next request."""
        self._busy = True
        self._gateway.write(self._all.request)

    def data_received(self, data: bytes) -> None:
        """Look for the end of the answer."""
        if self._left is None:
            data = self._begin(data)
            if not data:
                return
        assert self._left is not None
        if self._left < 0:
            self._count(data)
        else:
            self._left -= len(data)
        if self._left == 0 or self._end == b"0\r\n\r\n":
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        """Dial again, and count what that says of the gateway."""
        if self._all.stopping:
            return
        if self._busy:
            self._tally.errors += 1
            self._tally.said = self._tally.said or f"closed within an answer: {exc}"
        else:
            self._tally.reconnects += 1
        asyncio.get_running_loop().call_later(_REDIAL_S, self._all.redial)

    def _begin(self, data: bytes) -> bytes:
        """Return what follows the head, once it is whole: content-length bytes or framed chunks."""
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            return b""
        if self._head[9:12] != b"200":
            self._tally.said = self._tally.said or self._head[:400].decode("latin-1")
            self._gateway.abort()  # counted as an error when it is lost
            return b""
        found = _LENGTH.search(self._head, 0, end + 2)
        self._left = int(found[1]) if found else -1
        return self._head[end + 4 :]

    def _count(self, data: bytes) -> None:
        frames = data.count(b"\n\n")
        if self._end[-1:] == b"\n" == data[:1]:  # one split over two reads
            frames += 1
        if frames and not self._frames:
            self._tally.begun += 1
        self._frames += frames
        self._tally.frames += frames
        self._end = data[-5:] if len(data) >= 5 else (self._end + data)[-5:]

    def _finish(self) -> None:
        whole = wire.CHUNKS + wire.EXTRA_FRAMES
        if self._all.exact and self._left == -1 and self._frames != whole:
            self._tally.errors += 1
            self._tally.said = self._tally.said or f"{self._frames} frames instead of {whole}"
        self._tally.done += 1
        self._reset()
        if not self._all.stopping:
            self.send()

    def _reset(self) -> None:
        self._busy, self._left = False, None
        self._head = self._end = b""
        self._frames = 0


class Callers:
    """All connections of one measurement."""

    def __init__(self, job: Job, request: bytes) -> None:
        self.request, self.exact, self.tally = request, job.exact, Tally()
        self.stopping = False
        self._port, self._dialling = job.port, asyncio.Semaphore(_DIALS)
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, connections: int, over_s: float) -> None:
        """Dial all, then let them send one after the other, spread over `over_s` seconds."""
        callers = await asyncio.gather(*(self._dial() for _ in range(connections)))
        for one in callers:
            one.send()
            if over_s:
                await asyncio.sleep(over_s / connections)

    def redial(self) -> None:
        """Replace one connection."""
        if not self.stopping:
            task = asyncio.get_running_loop().create_task(self._again())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _again(self) -> None:
        try:
            (await self._dial()).send()
        except OSError as error:
            self.tally.errors += 1
            self.tally.said = self.tally.said or str(error)
            await asyncio.sleep(_REDIAL_S)
            self.redial()

    async def _dial(self) -> Caller:
        async with self._dialling:
            loop = asyncio.get_running_loop()
            return (await loop.create_connection(lambda: Caller(self), HOST, self._port))[1]


async def busy(job: Job) -> Sample:
    """Measure requests or chunks."""
    streaming = job.mode is Mode.CHUNKS
    callers = Callers(job, wire.request(stream=streaming, key=job.key))
    spread = wire.CHUNKS * wire.PACE_MS / 1_000 if streaming else 0.0
    await callers.open(job.connections, spread)
    await asyncio.sleep(job.warm_s)
    if not streaming:  # the slowest need longer
        await _until(lambda: callers.tally.done >= 2 * job.connections)
    before = _snapshot(job, callers.tally)
    while True:
        await asyncio.sleep(_LOOK_S)
        passed = time.perf_counter() - before.at
        burnt = proc.cpu_seconds(job.root) - before.cpu_s
        if passed >= job.most_s or (passed >= job.least_s and burnt >= job.least_cpu_s):
            break
    after = _snapshot(job, callers.tally)
    callers.stopping = True
    done = after.done - before.done
    extra = wire.EXTRA_FRAMES * done if streaming else 0
    return Sample(
        wall_s=after.at - before.at,
        requests=done,
        chunks=after.frames - before.frames - extra,
        cpu_s=after.cpu_s - before.cpu_s,
        waited_s=after.waited_s - before.waited_s,
        load_cpu_s=after.own_cpu_s - before.own_cpu_s + after.engine.cpu_s - before.engine.cpu_s,
        errors=callers.tally.errors,
        reconnects=callers.tally.reconnects,
        opened=after.engine.accepted - before.engine.accepted - 1,  # our own look
        said=callers.tally.said,
    )


async def memory(job: Job) -> Sample:
    """Measure what streams add to a gateway that has answered a few requests before."""
    for stream in (False, True):
        await _once(job, wire.request(stream=stream, key=job.key, pace_ms=1))
    before = proc.memory_bytes(job.root)
    callers = Callers(job, wire.request(stream=True, key=job.key, pace_ms=_MEMORY_PACE_MS))
    opened = engine_stats(job.engine_port).accepted
    await callers.open(job.connections, 0.0)
    await _until(lambda: callers.tally.begun >= job.connections)
    await asyncio.sleep(_SETTLE_S)
    after = proc.memory_bytes(job.root)
    callers.stopping = True
    errors = callers.tally.errors  # before its streams are cut short
    said = callers.tally.said
    # Not every gateway lets go of streams whose callers left; they would be work in what follows.
    get(job.engine_port, "/finish")
    await _until(lambda: callers.tally.done >= callers.tally.begun)
    short = job.connections - callers.tally.begun
    return Sample(
        requests=callers.tally.begun,
        errors=errors + short,
        reconnects=callers.tally.reconnects,
        opened=engine_stats(job.engine_port).accepted - opened - 1,
        memory_bytes=after - before,
        said=said or (f"{short} streams never began" if short else ""),
    )


async def _once(job: Job, request: bytes) -> None:
    callers = Callers(job, request)
    await callers.open(1, 0.0)
    await _until(lambda: callers.tally.done or callers.tally.errors)
    callers.stopping = True


async def _until(reached: Callable[[], object]) -> None:
    """Wait for something, but not for ever."""
    began = time.perf_counter()
    while not reached() and time.perf_counter() - began < _MEMORY_WAIT_S:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def engine_stats(port: int) -> Stats:
    """Ask the engine what it has seen."""
    return msgspec.json.decode(get(port, "/stats"), type=Stats)


def get(port: int, path: str) -> bytes:
    """Return what a server on this machine answers; OSError if it does not."""
    connection = HTTPConnection(HOST, port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()


def _snapshot(job: Job, tally: Tally) -> Snapshot:
    return Snapshot(
        at=time.perf_counter(),
        done=tally.done,
        frames=tally.frames,
        cpu_s=proc.cpu_seconds(job.root),
        waited_s=proc.waited_seconds(job.root),
        own_cpu_s=time.process_time(),
        engine=engine_stats(job.engine_port),
    )


def main() -> None:
    """Do one job."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    measure: Any = memory if job.mode is Mode.MEMORY else busy
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(measure(job))))
