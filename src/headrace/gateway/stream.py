"""One caller's answer on its way: the driver fills it, one HTTP handler drains it.

Bounded: over `HIGH` bytes the engine is held back until the handler has taken them.
"""

import asyncio
from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from headrace.gateway.errors import Edge, Fault, edge, failed, refused
from headrace.model.decision import Decision, Degrade
from headrace.model.deployment import ModelSpec
from headrace.model.effect import Dispatch, Fail, Refuse
from headrace.model.ids import AttemptId, DecisionId
from headrace.model.ladder import Lesser
from headrace.model.request import Request
from headrace.ports.engine import Ask, Refusal
from headrace.units import DurationNs, InstantNs, Tokens

HIGH = 65_536
"""Bytes that wait for a slow caller, over which its engine is held back. With what the engine's pool
holds then, the read at hand and the socket's buffer, well under 1 MiB a stream."""

_WANT_OF_CAPACITY = 503


class Done(Struct, frozen=True):
    """The answer is complete."""


class Cut(Struct, frozen=True):
    """The answer broke inside a frame: nothing can follow it, so its connection is closed."""


class Left(Struct, frozen=True):
    """The caller is gone; nobody reads what follows."""


End = Done | Cut | Fault | Refusal | Left


class Chunk(Struct, frozen=True):
    """Everything that came since the last chunk."""

    data: bytes
    end: End | None
    """Set in the last one."""


class Stream:
    """The answer to one request."""

    def __init__(
        self, request: Request, ask: Ask, arrived_at: InstantNs, *, revision: int = 0
    ) -> None:
        """Wait for a decision under policy `revision`."""
        self.request, self.arrived_at = request, arrived_at
        self.streamed = ask.stream
        self._ask: Ask | None = ask
        self.revision = revision
        """The policy revision it was asked under: the one it is decided on and ends under (ADM-6)."""
        self.decision: DecisionId | None = None
        """The admission decision, once it was sent to a replica."""
        self.queue_ns = DurationNs(0)
        self.took_ns = DurationNs(0)
        """From arrival to the first token of a stream, or to the end of a whole answer."""
        self.lesser: Lesser | None = None
        """In what lesser form it is served; None: as asked."""
        self.why = b""
        """Why it is not served as asked, in a word."""
        self.deferrable = False
        """It was refused, and may be answered later instead (DEG-1)."""
        self.optional = len(ask.optional)
        """How many parts of its prompt may be left out."""
        self.model_revision: bytes | None = None
        """Of the model that answers, if that can be told in a header."""
        self.attempt: AttemptId | None = None
        self.output_limit: Tokens | None = None
        """Most tokens the answer may have, where it is not served as asked, or its caller asked for another
        limit, or for none."""
        self.on_held: Callable[[bool], None] | None = None
        """Told True when too much waits here, False when it was taken."""
        self.sink: Callable[[bytes], bool] | None = None
        """Takes a piece at once while the handler waits for one, or says that it cannot: half the cost
        of waking the handler for each."""
        self._pieces: list[bytes] = []
        self._size = 0
        self._held = False
        self._end: End | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether the end is known; chunks before it may still be unread."""
        return self._end is not None

    @property
    def held(self) -> bool:
        """Whether its engine is held back."""
        return self._held

    def fault(self, cause: Edge) -> Fault:
        """Return how a failure of ours looks to its caller: of one that was sent, no refusal."""
        return edge(cause, decision=self.decision, revision=self.revision)

    def _left_ns(self, now: InstantNs) -> DurationNs | None:
        """Return what is left of the time its caller gave it, to wait or to a first token; None: any."""
        given = [one for one in (self.request.ttl_ns, self.request.ttft_ns) if one is not None]
        return DurationNs(max(0, min(given) - (now - self.arrived_at))) if given else None

    # The driver's side ------------------------------------------------------------------------

    def asked(self) -> Ask:
        """Hand what is asked over to its engine; it is large, and a long stream need not keep it."""
        ask, self._ask = self._ask, None
        assert ask is not None, "it was sent before"
        return ask

    def refuse(self, effect: Refuse, now: InstantNs) -> None:
        """It was not let in."""
        own, left = self.request.ttft_ns, self._left_ns(now)
        fault = refused(effect.decision, effect.rejection, self.revision, own, left)
        passing = fault.face.status == _WANT_OF_CAPACITY and fault.retry_after_ns is not None
        self.deferrable = effect.rejection.defer and passing
        self.finish(fault)

    def fail(self, effect: Fail, now: InstantNs) -> None:
        """It was let in, and there is no answer to it, or no more of it."""
        sent, left = self.attempt is not None, self._left_ns(now)
        fault = failed(effect.decision, effect.reason, self.revision, sent=sent, left_ns=left)
        if effect.retry_after_ns is not None and fault.retry_after_ns is not None:
            wait = max(fault.retry_after_ns, effect.retry_after_ns)
            fault = replace(fault, retry_after_ns=wait)
        self.finish(fault)

    def clocked(self, now: InstantNs) -> None:
        """Note how long its caller waited: for the first token, or for all of an answer."""
        if not (self.streamed and self.took_ns):
            self.took_ns = DurationNs(now - self.arrived_at)

    def decided(self, decision: Decision) -> None:
        """Note why it is not served as asked."""
        if isinstance(decision, Degrade):
            self.why = decision.why.encode()

    def sent(self, dispatch: Dispatch, now: InstantNs, models: Mapping[str, ModelSpec]) -> None:
        """It was sent to a replica of one of the models; nothing of the answer is there yet."""
        self.decision, self.attempt = dispatch.decision, dispatch.attempt
        self.queue_ns = DurationNs(now - self.arrived_at)
        lesser = self.lesser = dispatch.lesser
        if lesser is not None or dispatch.output_limit != self.request.max_output:
            self.output_limit = dispatch.output_limit
        answers = models.get(self.request.model if lesser is None else lesser.model)
        told = "" if answers is None else answers.revision
        self.model_revision = told.encode() if told.isascii() and told.isprintable() else None

    def push(self, data: bytes) -> None:
        """Add to the answer."""
        if self._end is not None or not data:
            return
        waiter = self._waiter  # of a handler that waits: no piece stands before this one
        if self.sink is not None and waiter is not None and not waiter.done() and self.sink(data):
            return
        self._pieces.append(data)
        self._size += len(data)
        if self._size > HIGH and not self._held and self.on_held is not None:
            self._held = True
            self.on_held(True)
        self._wake()

    def finish(self, end: End) -> None:
        """End it; the first end counts."""
        if self._end is None:
            self._end = end
            self._wake()

    # The caller's side ------------------------------------------------------------------------

    async def chunk(self) -> Chunk:
        """Wait for more of the answer or for its end, and return all there is."""
        while not self._pieces and self._end is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._size = 0
        end = self._end
        if self._held:
            self._held = False
            if self.on_held is not None and end is None:
                self.on_held(False)
        return Chunk(data, end)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
