"""What the gateway's tests share: a small deployment, an engine that obeys, callers without HTTP."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Coroutine
from typing import Any

from headrace.adapters.engines.answer import lengths
from headrace.adapters.engines.emulated import EmulatedEngine
from headrace.adapters.engines.inprocess import InProcessEngine
from headrace.config.profiles import load_profile
from headrace.config.schema import KeySpec, ServerSpec
from headrace.gateway.app import App
from headrace.gateway.auth import KeyRing
from headrace.gateway.clock import LoopClock
from headrace.gateway.counting import Counting
from headrace.gateway.driver import Driver
from headrace.gateway.shadow import Shadow
from headrace.gateway.wire import WIRE
from headrace.model.deployment import ClassSpec, ModelSpec, PoolSpec, TenantSpec
from headrace.model.engine import Snapshot, Usage
from headrace.model.event import Event
from headrace.model.ids import (
    AttemptId,
    Incarnation,
    ModelName,
    PoolName,
    ReplicaName,
    RequestId,
    TenantId,
)
from headrace.model.meter import NO_STREAM, Meter
from headrace.model.request import Request
from headrace.model.slo import Outcome
from headrace.plane.core import Plane
from headrace.plane.journal import Record, Verified, frames, verify
from headrace.policy.batching.chunked import ChunkedPrefill
from headrace.policy.catalog import PlaneConfig, Reports
from headrace.ports.clock import Clock
from headrace.ports.engine import Ask, Call, Ending, EngineClient, Listener, Route
from headrace.replica.core import Replica
from headrace.units import NS_PER_MS, DurationNs, InstantNs, Tokens

PROFILE = load_profile("h100-8b-tp1")
MODEL = "m"
KEYS = {"free": "sk-free", "slow": "sk-slow", "single": "sk-single", "narrow": "sk-narrow"}


def deployment(
    *,
    replicas: int = 1,
    ttft_ms: float = 2_000.0,
    tenants: tuple[TenantSpec, ...] = (),
    poll_ms: float = 1_000.0,
) -> PlaneConfig:
    """Return one model on one pool, one class, and tenants with and without limits."""
    return PlaneConfig(
        models=(ModelSpec(name=MODEL), ModelSpec(name="other")),
        pools=(
            PoolSpec(name="p", model=MODEL, profile=PROFILE, replicas=replicas),
            PoolSpec(name="q", model="other", profile=PROFILE, replicas=0),
        ),
        classes=(ClassSpec(name="interactive", ttft_ms=ttft_ms), ClassSpec(name="batch")),
        tenants=tenants
        or (
            TenantSpec(name="free"),
            TenantSpec(name="slow", rpm_limit=1, classes=("interactive",)),
            TenantSpec(name="single", max_parallel_requests=1),
            TenantSpec(name="narrow", models=("other",), tpm_limit=100),
        ),
        reports=Reports(poll_ms=poll_ms),
    )


def keys() -> tuple[KeySpec, ...]:
    """Return the key of each tenant."""
    return tuple(
        KeySpec(name=tenant, tenant=tenant, hash=f"sha256:{sha256(key)}")
        for tenant, key in KEYS.items()
    )


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class Pages:
    """A journal in memory."""

    def __init__(self) -> None:
        self.segments: list[bytearray] = []

    def put(self, frame: bytes, opens: bool) -> None:
        if opens:
            self.segments.append(bytearray())
        self.segments[-1] += frame

    def close(self) -> None:
        pass

    def records(self) -> list[tuple[int, Event]]:
        """Return (now, event) of every record."""
        return [
            (frame.now, frame.event)
            for segment in self.segments
            for frame in frames(bytes(segment))
            if isinstance(frame, Record)
        ]

    def verified(self) -> bool:
        return isinstance(verify(bytes(segment) for segment in self.segments), Verified)


class ObedientEngine:
    """An engine that does what the test says, when it says so."""

    def __init__(self, clock: Clock, *, fails: bool = False) -> None:
        self.name, self.incarnation, self.pool = (
            ReplicaName("p-0"),
            Incarnation(1),
            PoolName("p"),
        )
        self.tells_first = True
        self.missing: tuple[str, ...] = ()
        self.trouble: str | None = None
        self.calls: list[Call] = []
        self.held: list[tuple[AttemptId, bool]] = []
        self.aborted: list[AttemptId] = []
        self.polls = 0
        self.closed = False
        self._clock, self.fails = clock, fails
        self.events: Callable[[], int] = lambda: 0
        self.heard: list[int] = []
        self._meters: dict[AttemptId, Meter] = {}
        self._listener: Listener | None = None

    @property
    def tell(self) -> Listener:
        assert self._listener is not None
        return self._listener

    def connect(self, listener: Listener) -> None:
        self._listener = listener
        listener.up(self)

    def submit(self, call: Call) -> None:
        self.calls.append(call)
        self.heard.append(self.events())
        attempt = call.dispatch.attempt
        self._meters[attempt] = call.meter
        if self.fails:
            self.end(attempt, Outcome.ERROR)

    def say(self, text: str, attempt: AttemptId | None = None) -> None:
        """Make `text` the next bytes of an answer, a token a word, by default the last one's."""
        attempt = self.calls[-1].dispatch.attempt if attempt is None else attempt
        words = len(text.split())
        if words:
            self._meters[attempt].note(self._clock.now(), words)
        self.tell.produced(attempt, text.encode())

    def end(
        self,
        attempt: AttemptId | None = None,
        outcome: Outcome = Outcome.SUCCESS,
        *,
        tells: bool = True,
    ) -> None:
        attempt = self.calls[-1].dispatch.attempt if attempt is None else attempt
        meter = self._meters[attempt]
        given = next(c.request for c in self.calls if c.dispatch.attempt == attempt).input_tokens
        usage = Usage(
            input_tokens=given, cached_tokens=Tokens(0), output_tokens=Tokens(meter.tokens)
        )
        done = outcome is Outcome.SUCCESS
        self.tell.ended(
            attempt,
            Ending(
                outcome=outcome,
                usage=usage if done else None,
                timing=meter.timing() if meter.tokens and tells else NO_STREAM,
            ),
        )

    def abort(self, attempt: AttemptId) -> None:
        self.aborted.append(attempt)

    def pause(self, attempt: AttemptId) -> None:
        self.held.append((attempt, True))

    def resume(self, attempt: AttemptId) -> None:
        self.held.append((attempt, False))

    def poll(self) -> None:
        self.polls += 1
        self.tell.reported(
            Snapshot(replica=self.name, incarnation=self.incarnation, observed_at=self._clock.now())
        )

    def close(self) -> None:
        self.closed = True


def emulated(clock: Clock, nth: int = 0) -> InProcessEngine:
    """Return an emulated replica without noise."""
    replica = Replica(ReplicaName(f"p-{nth}"), Incarnation(nth + 1), PROFILE, ChunkedPrefill())
    return InProcessEngine(EmulatedEngine(replica, PoolName("p"), clock, lengths(0)), clock)


def ask(*, stream: bool = True, replay_output: int | None = None) -> Ask:
    """Return what an engine is asked, beside what the plane says."""
    return Ask(
        route=Route.CHAT,
        body=b"{}",
        stream=stream,
        usage_shown=False,
        replay_output=None if replay_output is None else Tokens(replay_output),
    )


def request(
    nth: int, tenant: str = "free", *, tokens: int = 100, ttft_ms: int | None = None
) -> Request:
    return Request(
        id=RequestId(nth),
        tenant=TenantId(tenant),
        model=ModelName(MODEL),
        input_tokens=Tokens(tokens),
        ttft_ns=None if ttft_ms is None else DurationNs(ttft_ms * NS_PER_MS),
    )


def assert_books_closed(plane: Plane) -> None:
    """Assert that nobody holds anything any more."""
    state = plane.state
    assert not state.live
    assert not state.ledger.flights
    assert not state.ledger.holds
    for load in state.ledger.loads.values():
        assert (load.attempts, load.blocks, load.decodes, load.context_tokens) == (0, 0, 0, 0)
        assert load.pending_prefill_ns == 0
        assert not load.gaps
    for known in state.models.values():
        assert known.backlog.size == 0


async def reach(clock: LoopClock, when_ms: float) -> None:
    """Wait, in virtual time, until `when_ms` after the start of the loop."""
    reached = asyncio.get_running_loop().create_future()
    clock.call_at(InstantNs(round(when_ms * NS_PER_MS)), lambda: reached.set_result(None))
    await reached


class Gateway:
    """Driver and application over given engines, in virtual time, with a journal in memory."""

    def __init__(
        self,
        engines: Callable[[Clock], list[Any]] = lambda clock: [emulated(clock)],
        *,
        config: PlaneConfig | None = None,
        server: ServerSpec | None = None,
        shadow: Shadow | None = None,
        counting: Counting | None = None,
    ) -> None:
        self.config = config or deployment()
        self.clock = LoopClock(asyncio.get_running_loop())
        self.engines: list[EngineClient] = engines(self.clock)
        self.pages = Pages()
        self.driver = Driver(self.clock, self.engines, journal=self.pages, shadow=shadow)
        self.app = App(
            self.driver,
            KeyRing(keys()),
            self.clock,
            models=self.config.models,
            server=server,
            below=lambda bound: bound - 1,
            observed=None if shadow is None else shadow.verdict,
            counting=counting,
        )
        self.driver.start(self.config)

    def ask(self, **fields: Any) -> "Caller":
        """Send a chat request; see `Caller`."""
        return Caller(self.app, **fields)

    def finish(self) -> None:
        """Stop, and check what must hold at the end of every run."""
        self.driver.stop()
        assert_books_closed(self.driver.plane)
        assert self.driver.live == 0
        assert self.pages.verified()
        shadow = self.driver.shadow
        if shadow is not None and shadow.broken is None:
            assert_books_closed(shadow.plane)
            assert shadow.known == 0


class Caller:
    """One caller of the application, without a socket."""

    def __init__(  # noqa: PLR0913 - whatever a request can be made of
        self,
        app: Callable[..., Coroutine[Any, Any, None]],
        *,
        body: Any = None,
        path: str = "/v1/chat/completions",
        method: str = "POST",
        key: str | None = KEYS["free"],
        headers: dict[str, str] | None = None,
        client: str = "127.0.0.1",
        **fields: Any,
    ) -> None:
        """Send a request at once; `fields` are added to a small chat body.

        A list of bytes is sent in parts, and more is to come if it ends with nothing.
        """
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}]}
        parts = body if isinstance(body, list) else [body]
        if not isinstance(parts[0], bytes):
            parts = [json.dumps(body or {**chat, **fields}).encode()]
        told = {"content-length": str(sum(map(len, parts))), **(headers or {})}
        if key is not None:
            told["authorization"] = f"Bearer {key}"
        scope = {
            "type": "http",
            "method": method,
            "path": path.partition("?")[0],
            "query_string": path.partition("?")[2].encode(),
            "client": (client, 50_000),
            "headers": [(name.encode(), value.encode()) for name, value in told.items()],
            "extensions": {WIRE: self},
        }
        self.is_cut = self.is_gone = False
        self.on_gone: Callable[[], None] | None = None
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for left, part in zip(reversed(range(len(parts))), parts, strict=True):
            more = left > 0 or (not part and len(parts) > 1)
            self._incoming.put_nowait({"type": "http.request", "body": part, "more_body": more})
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.content = b""
        self._moved = asyncio.Event()
        self.task: asyncio.Task[None] = asyncio.get_running_loop().create_task(
            app(scope, self._receive, self._send)
        )

    # What a `Wire` does

    @property
    def has_all(self) -> bool:
        return False

    def answer(self, *_: object) -> bool:
        return False  # over ASGI, as the rest

    def write(self, _: bytes) -> bool:
        return False

    def cut(self) -> None:
        self.is_cut = True
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def _receive(self) -> dict[str, Any]:
        message = await self._incoming.get()
        if message["type"] == "http.disconnect":  # as servers do: whoever asks is told
            self._incoming.put_nowait(message)
        return message

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.content += message["body"]
        self._moved.set()

    def leave(self) -> None:
        """Close the connection."""
        self.is_gone = True
        self._incoming.put_nowait({"type": "http.disconnect"})
        told, self.on_gone = self.on_gone, None
        if told is not None:
            told()

    async def moved(self) -> None:
        """Wait for the next thing that is sent."""
        self._moved.clear()
        await self._moved.wait()

    async def done(self) -> "Caller":
        """Wait for the end of the answer."""
        await self.task
        return self

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The events of a stream, the last one as text."""
        lines = self.content.decode().split("\n\n")
        assert lines[-1] == ""
        data = [line.removeprefix("data: ") for line in lines[:-1]]
        return [*map(json.loads, data[:-1]), data[-1]]
