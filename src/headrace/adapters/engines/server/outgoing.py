"""One answer on its way to its caller, in one piece or in events, and what befalls it there."""

from headrace.adapters.engines.answer import text
from headrace.adapters.engines.server.asgi import EVENTS, JSON, Exchange
from headrace.adapters.engines.server.attempts import Answer
from headrace.adapters.engines.server.faults import Damage, Faults
from headrace.adapters.engines.words.frame import Writer


class Outgoing:
    """Sends what an engine makes; ends with the answer, or with its connection."""

    def __init__(self, exchange: Exchange, answer: Answer, writer: Writer, faults: Faults) -> None:
        """Send nothing yet. The faults are those of now, whatever is told while it streams."""
        self._exchange, self._answer, self._writer = exchange, answer, writer
        self._faults, self._damage = faults, Damage(faults)
        self._sent = 0
        self._opening: list[bytes] = []

    async def stream(self) -> None:
        """Send the answer in events. As of vLLM, the head goes out before the first token."""
        exchange, answer, writer = self._exchange, self._answer, self._writer
        await exchange.begin(200, (b"content-type", EVENTS))
        if self._faults.die_after == 0:
            await exchange.cut()
            return
        opening = writer.opening()
        early, self._opening = opening[: writer.early], opening[writer.early :]
        if early and not await self._sent_all(early, more=True):
            return
        over = False
        while not over:
            await answer.moved()
            if answer.left:
                return
            if self._is_silent():
                await self._fall_silent()
                return
            over = answer.end is not None
            events = self._last() if over else self._more()
            if not await self._sent_all(events, more=not over):
                return

    async def whole(self) -> None:
        """Send the answer in one piece."""
        exchange, answer = self._exchange, self._answer
        while answer.end is None:
            await answer.moved()
        if answer.left:
            return
        if self._is_silent():
            await exchange.gone.wait()
            return
        said = text(answer.attempt, 0, answer.made)
        content = self._writer.whole(said, answer.finish_reason, answer.made, answer.cached)
        promised, content, cut = self._damage.whole(content)
        length = (b"content-length", b"%d" % promised)
        await exchange.begin(200, (b"content-type", JSON), length)
        await exchange.send(content, more=cut)
        if cut:
            await exchange.cut()

    async def _sent_all(self, events: list[bytes], *, more: bool) -> bool:
        """Send events; return whether all of them went out, and the connection is not cut."""
        content, cut = self._damage.events(events)
        await self._exchange.send(content, more=cut or more)
        if cut:
            await self._exchange.cut()
        return not cut

    def _is_silent(self) -> bool:
        after = self._faults.stall_after
        return after is not None and self._answer.made >= after

    async def _fall_silent(self) -> None:
        """Send the last tokens there will be, and wait for the caller to give up."""
        last = self._faults.stall_after
        if last:
            content, _ = self._damage.events(self._up_to(last))
            await self._exchange.send(content)
        await self._exchange.gone.wait()

    def _more(self) -> list[bytes]:
        return self._up_to(self._answer.made)

    def _up_to(self, made: int) -> list[bytes]:
        """Return the events of the tokens not sent yet."""
        events, self._opening = self._opening, []
        first = self._sent + 1 if self._damage.counts else made
        for upto in range(max(first, self._sent + 1), made + 1):
            events.append(self._writer.piece(self._said(upto), upto))
        return events

    def _last(self) -> list[bytes]:
        """Return the events of the rest and of the end."""
        answer, made = self._answer, self._answer.made
        events = self._up_to(made - 1) if self._damage.counts else self._up_to(self._sent)
        reason = answer.finish_reason
        events += self._writer.closing(self._said(made), reason, made, answer.cached)
        mark = self._writer.end_mark
        return [*events, mark] if mark and not self._faults.no_done else events

    def _said(self, made: int) -> str:
        """Return the text up to the `made`-th token that was not sent, and count it as sent."""
        first, self._sent = self._sent, made
        return text(self._answer.attempt, first, made)
