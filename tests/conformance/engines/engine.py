"""An engine that is held against its row of the table, whoever started it.

To add one: yield an `EngineUnderTest` from a function in `STARTERS` (started.py). One that runs
already is tested by its address: HEADRACE_ENGINE_URL, with HEADRACE_ENGINE_KIND and _MODEL, and _SLOTS,
_CONTEXT and _QUEUE_BOUND where they differ from what is said below.
"""

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from msgspec import Struct

from headrace.adapters.engines.exposition import Load, load_of
from headrace.adapters.engines.kinds import KINDS, Traits
from headrace.model.engine import EngineKind

URL = "HEADRACE_ENGINE_URL"
PATIENCE_S = 120.0
"""Only an engine that fails is waited for so long; real ones start on busy machines."""


class EngineUnderTest(Struct, frozen=True, kw_only=True):
    """One engine that listens."""

    name: str
    base: str
    """Its address, without `/v1`."""
    kind: EngineKind
    model: str
    slots: int = 2
    """Requests that it runs at once; more of them wait."""
    context: int = 4_096
    """Tokens of prompt and output together."""
    queue_bound: int | None = None
    """Requests inside, running and waiting, beyond which it refuses. None: it has no bound."""
    stop: Callable[[], None] = lambda: None

    @property
    def traits(self) -> Traits:
        """What its kind is said to be able to do."""
        return KINDS[self.kind]

    @asynccontextmanager
    async def client(self) -> AsyncIterator["Client"]:
        """Speak to it; whatever is still open is closed at the end."""
        limits = httpx2.Limits(max_connections=200, max_keepalive_connections=0)
        async with httpx2.AsyncClient(
            base_url=self.base, timeout=PATIENCE_S, limits=limits, trust_env=False
        ) as http:
            yield Client(self, http)


def outside() -> EngineUnderTest | None:
    """Return the engine that the environment names."""
    told = os.environ
    if not told.get(URL):
        return None
    bound = told.get("HEADRACE_ENGINE_QUEUE_BOUND")
    return EngineUnderTest(
        name="outside",
        base=told[URL].rstrip("/").removesuffix("/v1"),
        kind=EngineKind(told.get("HEADRACE_ENGINE_KIND", "openai")),
        model=told["HEADRACE_ENGINE_MODEL"],
        slots=int(told.get("HEADRACE_ENGINE_SLOTS", "2")),
        context=int(told.get("HEADRACE_ENGINE_CONTEXT", "4096")),
        queue_bound=None if bound is None else int(bound),
    )


class Client:
    """What the checks ask of an engine."""

    def __init__(self, engine: EngineUnderTest, http: httpx2.AsyncClient) -> None:
        self.engine, self.http = engine, http

    def body(self, **fields: Any) -> dict[str, Any]:
        """Return a small completion, to which fields may be added."""
        return {"model": self.engine.model, "prompt": "Once upon a time", **fields}

    async def post(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        """Return an answer to a POST."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        told = {"content-type": "application/json", **headers}
        return await self.http.post(path, content=content, headers=told)

    async def complete(self, **fields: Any) -> httpx2.Response:
        """Return the answer to a completion in one piece."""
        return await self.post("/v1/completions", self.body(**fields))

    @asynccontextmanager
    async def stream(self, *, tag: str = "", **fields: Any) -> AsyncIterator["Events"]:
        """Open a streamed completion; `tag` is its `X-Request-Id`. Leaving it closes its connection."""
        headers = {"content-type": "application/json"} | ({"x-request-id": tag} if tag else {})
        content = json.dumps(self.body(stream=True, **fields)).encode()
        async with self.http.stream(
            "POST", "/v1/completions", content=content, headers=headers
        ) as response:
            events = Events(response)  # held: with it goes its reader, and the connection
            yield events

    def endless(self, **fields: Any) -> Any:
        """Return a streamed completion that goes on for as long as the context allows."""
        room = self.engine.context // 2
        return self.stream(ignore_eos=True, max_tokens=room, **fields)

    async def page(self) -> bytes:
        """Return the page of metrics; nothing if there is none."""
        path = self.engine.traits.metrics_path
        if path is None:
            return b""
        reply = await self.http.get(path)
        return reply.content if reply.status_code == 200 else b""

    async def load(self) -> Load:
        """Return the load it tells, read as the gateway reads it."""
        return load_of(self.engine.traits, await self.page())


class Events:
    """The events of one stream, one after the other."""

    def __init__(self, response: httpx2.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()
        self.done = False

    async def next(self) -> dict[str, Any] | None:
        """Return the next event; None after the last."""
        async for line in self._lines:
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                self.done = True
                return None
            event: dict[str, Any] = json.loads(data)
            return event
        return None

    async def first(self) -> dict[str, Any]:
        """Return the first event with text."""
        while (event := await self.next()) is not None:
            if any(choice.get("text") for choice in event.get("choices", [])):
                return event
        raise AssertionError("it ended without a token")

    async def rest(self) -> list[dict[str, Any]]:
        """Return all that are left."""
        events = []
        while (event := await self.next()) is not None:
            events.append(event)
        return events
