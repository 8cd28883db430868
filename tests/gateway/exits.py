"""Every way in which a request can end, in every phase of its life: what the tables of exits share."""

import asyncio
import json
from enum import StrEnum
from typing import Any

import pytest
from msgspec import Struct

from headrace.model.budget import Take
from headrace.model.ids import RequestId
from headrace.model.slo import Outcome
from headrace.plane.ledger import Ledger
from headrace.ports.engine import Route
from headrace.units import InstantNs
from tests.gateway.scenes import MODEL, Caller, Gateway

_SAID: dict[Route, dict[str, Any]] = {
    Route.CHAT: {"messages": [{"role": "user", "content": "hello there"}]},
    Route.COMPLETIONS: {"prompt": "hello there"},
    Route.RESPONSES: {"input": "hello there"},
    Route.MESSAGES: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 500},
    Route.EMBEDDINGS: {"input": "hello there"},
}


class Mode(StrEnum):
    """How an answer is given."""

    WHOLE = "whole"
    EVENTS = "events"
    EARLY = "early events"
    """Its head goes out before admission."""


class Phase(StrEnum):
    """How far a request has come."""

    READING = "reading its body"
    QUEUED = "queued"
    SENT = "sent"
    HEAD = "head seen"
    FIRST = "first token"
    MID = "mid-stream"
    HELD = "held for a slow caller"
    LAST = "last frame"


SHAPES = tuple(
    (route, mode)
    for route in Route
    for mode in Mode
    if mode is Mode.WHOLE or route is not Route.EMBEDDINGS
)
"""Embeddings are never streamed."""


class Ends(Struct, frozen=True, kw_only=True):
    """How a request ends."""

    outcome: Outcome | None = None
    """None: it was never admitted."""
    reason: str | None = None
    """Of its row."""
    status: int | None = None
    """What its caller gets to whom nothing was sent before; None: nobody is there to be told."""
    code: str | None = None
    """Of the error it is told, in whatever form; None: its answer is complete."""
    aborted: bool = False
    """Whether its engine is told to stop."""
    rows: int = 1


def is_begun(phase: Phase, mode: Mode) -> bool:
    """Return whether a caller has a head by then, so that an error can only be an event."""
    if mode is Mode.EARLY:
        return phase is not Phase.READING
    return mode is Mode.EVENTS and phase not in (Phase.READING, Phase.QUEUED, Phase.SENT)


class Settlements:
    """Counts how often each reservation is settled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._settled: list[tuple[Ledger, RequestId]] = []
        settle = Ledger.settle

        def spy(ledger: Ledger, request: RequestId, used: Take, now: InstantNs) -> None:
            self._settled.append((ledger, request))
            settle(ledger, request, used, now)

        monkeypatch.setattr(Ledger, "settle", spy)

    def of(self, gateway: Gateway, request: int) -> int:
        """Return how often; a replay of the journal has a ledger of its own."""
        mine = gateway.driver.plane.state.ledger
        return sum(ledger is mine and one == request for ledger, one in self._settled)


class SlowCaller(Caller):
    """A caller that takes nothing but the head while `taking` is not set, and may send in pieces."""

    def __init__(
        self, gateway: Gateway, route: Route, mode: Mode, *, in_parts: bool = False
    ) -> None:
        body = {"model": MODEL, **_SAID[route]}
        if mode is not Mode.WHOLE:
            body["stream"] = True
        super().__init__(gateway.app, path=route, body=body)
        self.route = route
        self.taking = asyncio.Event()
        self.taking.set()
        self._rest = b""
        if in_parts:
            whole = self._incoming.get_nowait()["body"]
            self._rest = whole[9:]
            self._incoming.put_nowait(
                {"type": "http.request", "body": whole[:9], "more_body": True}
            )

    def send_rest(self) -> None:
        """Complete the body."""
        self._incoming.put_nowait({"type": "http.request", "body": self._rest, "more_body": False})

    def leave(self) -> None:
        """Close the connection; what waits to be written is written to nobody."""
        super().leave()
        self.taking.set()

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] != "http.response.start":
            await self.taking.wait()
        await super()._send(message)

    @property
    def told(self) -> str | None:
        """The code of the error that the answer is or ends with; None: it has none."""
        found = self.failure
        return None if found is None else str(found["code"])

    def check_failed(self, *, sent: bool) -> None:
        """Check that it was told of a failure, not of a refusal; `sent`: an engine had it."""
        assert self.failure is not None
        detail = self.failure["headrace"]
        assert (detail["outcome"], detail["gate"]) == ("fail", None)
        assert detail["decision_id"] > 0
        assert detail["policy_revision"] == 1
        dropped = self.headers.get("x-llm-d-request-dropped-reason", "evicted")
        assert dropped == "evicted" or not sent, "any other word says that no engine had it"

    @property
    def failure(self) -> dict[str, Any] | None:
        """The error that the answer is or ends with; None: it has none."""
        if not self.headers["content-type"].startswith("text/event-stream"):
            return None if self.status == 200 else self.error
        *_, last = self.content.removesuffix(b"\n\n").split(b"\n\n")
        if self.route in (Route.CHAT, Route.COMPLETIONS):
            *_, last = self.content.removesuffix(b"\n\ndata: [DONE]\n\n").split(b"\n\n")
        data = last.rpartition(b"data: ")[2]
        event = json.loads(data) if data.startswith(b"{") else {}
        if "error" not in event:
            return None
        error: dict[str, Any] = event["error"]
        if self.route in (Route.CHAT, Route.COMPLETIONS):
            assert self.content.endswith(b"data: [DONE]\n\n"), "clients wait for it"
        else:
            assert last.startswith(b"event: error\n")
        return error


async def turns(count: int = 8) -> None:
    """Let the loop go round; no time passes."""
    for _ in range(count):
        await asyncio.sleep(0)


def check(
    gateway: Gateway,
    settled: Settlements,
    mine: int,
    ends: Ends,
    *,
    asked: int,
    decided: bool = True,
) -> None:
    """Check the books of a request that is over: one row, one settlement, one count."""
    rows = [row for row in gateway.driver.recent if row.request == mine]
    assert len(rows) == ends.rows
    assert settled.of(gateway, mine) == (1 if ends.rows and ends.outcome is not None else 0)
    for row in rows:
        assert (row.outcome, row.reason) == (ends.outcome, ends.reason)
    counted = gateway.driver.outcomes.total() + gateway.app.refusals.total()
    if decided:
        assert counted == asked, "each request is counted once"
    assert (gateway.app._open._free, gateway.app._reading._free) == (10_000, 10_000)
