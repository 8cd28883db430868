"""An emulated replica in real time: the pure engine, woken by a clock, telling a listener.

Runs on planned time: step n+1 starts at the planned end of step n. A late wake-up delays what
callers see and nothing else; first tokens, gaps and usage carry the planned instants.

First tokens and endings are handed out at their instants. The tokens between are handed out every
`DELIVERY_NS`, those made meanwhile in one piece: a wake-up for each step of each replica would cost
more than it shows, and steps mostly last longer than that anyway.
"""

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from headrace.adapters.engines.answer import Order, text
from headrace.model.engine import Snapshot, Usage, Yielded
from headrace.model.ids import AttemptId, Incarnation, PoolName, ReplicaName
from headrace.model.meter import NO_STREAM, StreamTiming
from headrace.model.profile import Profile
from headrace.model.slo import Outcome
from headrace.ports.clock import Clock, Timer
from headrace.ports.engine import Finish
from headrace.replica.core import Replica
from headrace.replica.job import Finished, FirstTokenMade, Job
from headrace.units import NS_PER_MS, InstantNs, Tokens

DELIVERY_NS = 20 * NS_PER_MS
"""Tokens are handed out at multiples of this. 20 ms: below the gap a reader notices."""
_CHUNK_TOKENS = Tokens(256)  # of a prefix chunk, where a request has none to tell it


class Made(Struct, frozen=True, kw_only=True):
    """How an attempt ended."""

    outcome: Outcome
    usage: Usage | None
    timing: StreamTiming
    finish: Finish = Finish.STOP


class Listener(Protocol):
    """Whom the engine tells what it makes, in text and tokens: words of a route are others' business."""

    def produced(self, attempt: AttemptId, text: str, tokens: int) -> None:
        """Tokens of an answer, in order."""
        ...

    def ended(self, attempt: AttemptId, made: Made) -> None:
        """An attempt is over; nothing of it follows."""
        ...

    def reported(self, snapshot: Snapshot) -> None:
        """The engine's account of itself."""
        ...


class _Answer(Struct):
    """One attempt on its way out."""

    finish: Finish
    handed: int = 0


class EmulatedEngine:
    """One emulated replica in real time."""

    def __init__(
        self,
        replica: Replica,
        pool: PoolName,
        clock: Clock,
        length: Callable[[Order], Tokens],
    ) -> None:
        """Wrap an idle replica; `length` says how long an answer wants to be."""
        self._replica, self._pool = replica, pool
        self._clock, self._length = clock, length
        self._listener: Listener | None = None
        self._answers: dict[AttemptId, _Answer] = {}
        self._streaming = 0
        self._delivered = 0  # the last multiple at which tokens were handed out
        self._last = InstantNs(0)
        self._due: InstantNs | None = None
        self._timer: Timer | None = None

    @property
    def name(self) -> ReplicaName:
        """The replica's name."""
        return self._replica.name

    @property
    def incarnation(self) -> Incarnation:
        """Which of its lives this is."""
        return self._replica.incarnation

    @property
    def pool(self) -> PoolName:
        """The pool it belongs to."""
        return self._pool

    def connect(self, listener: Listener) -> None:
        """Say who listens."""
        self._listener = listener

    def submit(self, order: Order) -> None:
        """Start an attempt; one that the engine does not take ends with an error at once."""
        dispatch, request = order.dispatch, order.request
        wanted = self._length(order)
        output = max(1, min(wanted, dispatch.output_limit))
        job = Job(
            attempt=dispatch.attempt,
            prompt_tokens=request.input_tokens,
            output_tokens=Tokens(output),
            prefix=request.prefix,
            prefix_tokens=request.prefix_tokens or _CHUNK_TOKENS,
            gap_bound_ns=dispatch.gap_ns,
            tenant=dispatch.tenant,
            deadline=dispatch.deadline,
            relegated=dispatch.relegated,
            way=dispatch.way,
            counters=dispatch.counters,
        )
        if self._replica.submit(job, self._now()) is not None:
            failed = Made(outcome=Outcome.ERROR, usage=None, timing=NO_STREAM)
            self._tell.ended(dispatch.attempt, failed)
            return
        finish = Finish.LENGTH if output == dispatch.output_limit else Finish.STOP
        self._answers[dispatch.attempt] = _Answer(finish=finish)
        self._arm()

    def abort(self, attempt: AttemptId) -> None:
        """Stop an attempt."""
        if self._forget(attempt) is not None:
            self._replica.abort(attempt, self._now())
            self._arm()

    def reprice(self, profile: Profile) -> None:
        """Let steps take what another profile of the same size says, from the next one on."""
        if profile != self._replica.profile:
            self._replica.reprice(profile, self._now())
            self._arm()

    def forget_prefixes(self) -> None:
        """Drop the cached prefixes that nothing runs on."""
        self._replica.forget_prefixes(self._now())
        self._arm()

    def poll(self) -> None:
        """Report at once."""
        self._tell.reported(self._replica.report(self._now()))
        self._arm()

    def yielded(self) -> Yielded:
        """Return what came of requests that gave way."""
        return self._replica.yielded(self._now())

    def close(self) -> None:
        """Stop for good."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._due = None
        self._answers.clear()
        self._streaming = 0

    @property
    def _tell(self) -> Listener:
        assert self._listener is not None, "connect first"
        return self._listener

    def _now(self) -> InstantNs:
        self._last = max(self._last, self._clock.now())
        return self._last

    def _wake(self) -> None:
        """Hand out whatever has become visible."""
        self._timer = self._due = None
        for event in self._replica.advance(self._now()):
            match event:
                case FirstTokenMade():
                    self._hand(event.attempt, 1)
                case Finished():
                    self._finish(event)
        # Whoever was told may have submitted meanwhile, and time went on: it is asked for anew.
        slot = self._now() // DELIVERY_NS
        if slot != self._delivered and self._streaming:
            self._delivered = slot
            for attempt, made in self._replica.progress(self._last):
                self._hand(attempt, made)
        self._arm()

    def _hand(self, attempt: AttemptId, made: int) -> None:
        """Hand out an answer's tokens up to `made`; one that was aborted meanwhile has none."""
        answer = self._answers.get(attempt)
        if answer is None or made <= answer.handed:
            return
        first, answer.handed = answer.handed, made
        self._streaming += not first
        self._tell.produced(attempt, text(attempt, first, made), made - first)

    def _finish(self, event: Finished) -> None:
        self._hand(event.attempt, event.usage.output_tokens)
        answer = self._forget(event.attempt)
        if answer is not None:
            made = Made(
                outcome=Outcome.SUCCESS,
                usage=event.usage,
                timing=event.timing,
                finish=answer.finish,
            )
            self._tell.ended(event.attempt, made)

    def _forget(self, attempt: AttemptId) -> _Answer | None:
        answer = self._answers.pop(attempt, None)
        if answer is not None and answer.handed:
            self._streaming -= 1
        return answer

    def _arm(self) -> None:
        """Wake at the replica's next event, and for the next delivery while answers stream."""
        due = self._replica.next_event()
        if self._streaming:
            delivery = InstantNs((self._last // DELIVERY_NS + 1) * DELIVERY_NS)
            due = delivery if due is None else min(due, delivery)
        if due == self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = None if due is None else self._clock.call_at(due, self._wake)
