"""One deferred job is worked on: asked of the plane as any request is, until there is an answer to keep."""

from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from headrace.gateway.bodies import body
from headrace.gateway.driver import Driver
from headrace.gateway.errors import Edge, Fault, Headers, edge, headers
from headrace.gateway.exchange import settled
from headrace.gateway.intake import Intake, Letter, RefusedError
from headrace.gateway.jobs.watch import Watch
from headrace.gateway.stream import Cut, Done, End, Left, Stream
from headrace.model.decision import Reason
from headrace.model.effect import Concluded
from headrace.model.ids import RequestId
from headrace.ports.engine import Refusal
from headrace.ports.job import State, UnixNs
from headrace.ports.jobs import Claim, Ending, Result
from headrace.units import DurationNs, Service


class Stop(StrEnum):
    """Why work on a job ends before it is done."""

    CANCELLED = "cancelled"
    WITHDRAWN = "withdrawn"
    """It goes back and is taken up another time."""
    LOST = "lost"
    """It is another's by now."""


class Run(Struct):
    """A job under way."""

    claim: Claim
    request: RequestId | None = None
    """As the plane knows it; None: it has not been asked yet."""
    stop: Stop | None = None
    back: Fault | None = None
    """Why it goes back, if it was refused."""

    def is_stopped(self) -> bool:
        """Return whether nobody is to work on it any more."""
        return self.stop is not None


class Worker:
    """Works on jobs for one gateway."""

    def __init__(
        self, driver: Driver, intake: Intake, watch: Watch, *, tries: int, result_bytes: int
    ) -> None:
        """Try at most `tries` times what engines fail at; keep answers of at most `result_bytes`."""
        self._driver, self._intake, self._watch = driver, intake, watch
        self._tries, self._result_bytes = tries, result_bytes

    def stop(self, run: Run, why: Stop) -> None:
        """Have work on a job end; the first reason counts, but a lost lease counts most."""
        if run.stop is None or why is Stop.LOST:
            run.stop = why
        if run.request is not None:
            self._driver.leave(run.request)

    async def work(self, run: Run, now: UnixNs) -> Ending | None:
        """Return how a job ended, or None if it is to go back."""
        fault: Fault | None = None
        for nth in range(1, self._tries + 1):
            found = await self._try(run, nth, now)
            if not isinstance(found, Fault):
                return found
            fault = found
        assert fault is not None, "it was tried"
        return _failed(fault, run)

    async def _try(self, run: Run, nth: int, now: UnixNs) -> Ending | Fault | None:
        """Ask once; a fault: an engine failed at it."""
        spec = run.claim.job.spec
        told = [(n.encode(), v.encode("latin-1")) for n, v in spec.headers]
        letter = Letter(spec.tenant, spec.route, told, dict(reversed(told)), run.claim.body)
        try:
            taken = await self._intake.take(letter)
        except RefusedError as refused:
            return self._refused(run, refused.fault, sent=False)
        if run.is_stopped():
            return _stopped(run)
        request = replace(
            taken.request,
            slo_class=spec.slo_class,
            deferred=True,
            ttl_ns=DurationNs(max(1, spec.deadline_ns - now)),
        )
        run.request = request.id
        self._watch.own.add(request.id)
        stream = self._driver.offer(request, taken.ask)
        try:
            content, end = await self._whole(stream)
        finally:
            self._driver.leave(request.id)
            run.request = None
        return _stopped(run) if run.is_stopped() else self._told(run, stream, content, end, nth)

    async def _whole(self, stream: Stream) -> tuple[bytes, End]:
        """Return a whole answer, or as much of it as shows that it is too long."""
        pieces: list[bytes] = []
        size = 0
        while True:
            chunk = await stream.chunk()
            pieces.append(chunk.data)
            size += len(chunk.data)
            if size > self._result_bytes:
                message = "The answer is longer than is kept."
                return b"", edge(Edge.JOB_FAILED, message)
            if chunk.end is not None:
                return b"".join(pieces), chunk.end

    def _told(
        self, run: Run, stream: Stream, content: bytes, end: End, nth: int
    ) -> Ending | Fault | None:
        fields = settled(stream, nth)
        fields.append((b"x-headrace-policy-revision", b"%d" % stream.revision))
        match end:
            case Done():
                result = Result(status=200, headers=_text(fields), body=content)
                return Ending(state=State.DONE, result=result, spent=self._spent(stream))
            case Refusal():
                fields.append((b"x-should-retry", b"false"))
                result = Result(status=end.status, headers=_text(fields), body=end.body)
                return Ending(state=State.FAILED, result=result, spent=Service(0))
            case Fault():
                return self._refused(run, end, sent=stream.decision is not None)
            case Cut():
                return stream.fault(Edge.UPSTREAM)
            case Left():
                return None

    def _refused(self, run: Run, fault: Fault, *, sent: bool) -> Ending | Fault | None:
        """Return what a refusal or failure means for a job: its end, another try, or another time."""
        reason = fault.detail.reason
        if self._driver.closed is not None:
            return None
        if reason == Reason.WAITED_OUT:
            return Ending(state=State.EXPIRED, spent=Service(0))
        later = fault.retry_after_ns is not None or reason == Reason.EXPIRED
        if later and (not sent or reason == Edge.ENGINE_FULL):
            run.back = fault
            return None
        return fault if later else _failed(fault, run, spent=None if sent else Service(0))

    def _spent(self, stream: Stream) -> Service | None:
        """Return what an answer took in the unit of the counters; None if the engine did not tell."""
        row: Concluded | None = next(
            (one for one in reversed(self._driver.recent) if one.request == stream.request.id), None
        )
        price = None if row is None else self._driver.plane.settings.prices.get(row.model)
        if row is None or row.usage is None or price is None:
            return None
        usage = row.usage
        cached = min(usage.cached_tokens, usage.input_tokens)
        return price.service(usage.input_tokens - cached, cached, usage.output_tokens)


def _stopped(run: Run) -> Ending | None:
    return Ending(state=State.CANCELLED) if run.stop is Stop.CANCELLED else None


def _failed(fault: Fault, run: Run, spent: Service | None = None) -> Ending:
    """Return the end of a job that has failed, with what its caller is to be told of it."""
    final = replace(fault, retry_after_ns=None, detail=replace(fault.detail, retryable=False))
    content = body(final, run.claim.job.spec.route)
    result = Result(
        status=final.face.status, headers=_text(headers(final, lambda _bound: 0)), body=content
    )
    return Ending(state=State.FAILED, result=result, spent=spent)


def _text(fields: Headers) -> tuple[tuple[str, str], ...]:
    return tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in fields)
