"""One caller's answer on its way: the driver fills it, one HTTP handler drains it."""

import asyncio

from msgspec import Struct

from headrace.gateway.errors import Fault
from headrace.model.engine import Usage
from headrace.model.ids import AttemptId, DecisionId
from headrace.model.request import Request
from headrace.ports.engine import Finish
from headrace.units import DurationNs, InstantNs, Tokens


class Done(Struct, frozen=True, kw_only=True):
    """The answer is complete."""

    usage: Usage
    finish: Finish


class Left(Struct, frozen=True):
    """The caller is gone; nobody reads what follows."""


End = Done | Fault | Left


class Chunk(Struct, frozen=True, kw_only=True):
    """Everything that came since the last chunk."""

    text: str
    end: End | None
    """Set in the last one."""


class Stream:
    """The answer to one request. Bounded by its output limit, so nothing is held back."""

    def __init__(
        self,
        request: Request,
        arrived_at: InstantNs,
        replay_output: Tokens | None = None,
        *,
        revision: int = 0,
    ) -> None:
        """Wait for a decision, made and carried out under a policy revision."""
        self.request, self.arrived_at = request, arrived_at
        self.replay_output = replay_output
        self.revision = revision
        self.decision: DecisionId | None = None
        """The admission decision, once it was sent to a replica."""
        self.queue_ns = DurationNs(0)
        self.attempt: AttemptId | None = None
        self._texts: list[str] = []
        self._end: End | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether the end is known; chunks before it may still be unread."""
        return self._end is not None

    # The driver's side ------------------------------------------------------------------------

    def sent(self, decision: DecisionId, attempt: AttemptId, now: InstantNs) -> None:
        """It was sent to a replica; nothing of the answer is there yet."""
        self.decision, self.attempt = decision, attempt
        self.queue_ns = DurationNs(now - self.arrived_at)

    def push(self, text: str) -> None:
        """Add to the answer."""
        if self._end is None:
            self._texts.append(text)
            self._wake()

    def finish(self, end: End) -> None:
        """End it; the first end counts."""
        if self._end is None:
            self._end = end
            self._wake()

    # The caller's side ------------------------------------------------------------------------

    async def chunk(self) -> Chunk:
        """Wait for more of the answer or for its end, and return all there is."""
        while not self._texts and self._end is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        text = "".join(self._texts)
        self._texts.clear()
        return Chunk(text=text, end=self._end)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
