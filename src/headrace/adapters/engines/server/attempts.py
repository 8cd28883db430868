"""Requests inside the engine: what each has made so far, and who waits for more of it."""

import asyncio

from msgspec import Struct

from headrace.adapters.engines.answer import Order
from headrace.adapters.engines.emulated import EmulatedEngine, Made
from headrace.adapters.engines.server.metrics import Metrics
from headrace.model.effect import Dispatch
from headrace.model.engine import Snapshot, Usage, Yielded
from headrace.model.ids import AttemptId, ClassName, DecisionId, ModelName, RequestId, TenantId
from headrace.model.request import Request
from headrace.model.slo import Outcome
from headrace.model.told import Told
from headrace.ports.clock import Clock
from headrace.units import NS_PER_MS, DurationNs, InstantNs, Tokens, later

ABORTED = "abort"
"""Why an answer stops that was ended by its id."""
_NOBODY, _NO_CLASS, _NEVER = TenantId("-"), ClassName("-"), InstantNs(1 << 62)
_GAP_NS = DurationNs(80 * NS_PER_MS)  # that of the default class: callers cannot tell another


class Work(Struct, frozen=True, kw_only=True):
    """One request as the engine gets it."""

    name: str
    """The id by which it may be aborted."""
    prompt_tokens: Tokens
    prefix: tuple[int, ...]
    prefix_tokens: Tokens
    limit: Tokens
    """The most output tokens."""
    to_the_limit: bool
    """Whether it makes all of them, instead of stopping where it would."""
    told: Told | None = None
    """What a gateway told of it."""


class End(Struct, frozen=True):
    """The answer is over."""

    finish: str | None
    """None: nobody reads it any more."""
    usage: Usage | None = None


class Answer:
    """One answer being made."""

    def __init__(self, attempt: AttemptId, work: Work, arrived_at: InstantNs) -> None:
        """Start with nothing made."""
        self.attempt, self.work, self.arrived_at = attempt, work, arrived_at
        self.made = 0
        """Tokens handed out by the engine."""
        self.end: End | None = None
        self._moved = asyncio.Event()

    @property
    def left(self) -> bool:
        """Whether it is over because nobody reads it any more."""
        return self.end is not None and self.end.finish is None

    @property
    def finish_reason(self) -> str:
        """Why it is over, for its caller."""
        assert self.end is not None, "it is not over"
        assert self.end.finish is not None, "nobody asks"
        return self.end.finish

    @property
    def cached(self) -> int | None:
        """Prompt tokens found in the cache; None if that was never told."""
        usage = None if self.end is None else self.end.usage
        return None if usage is None else usage.cached_tokens

    async def moved(self) -> None:
        """Wait until more was made or the end is known, since the last call."""
        await self._moved.wait()
        self._moved.clear()

    def add(self, tokens: int) -> None:
        """Count tokens."""
        self.made += tokens
        self._moved.set()

    def finish(self, end: End) -> None:
        """End it; the first end counts."""
        if self.end is None:
            self.end = end
            self._moved.set()


class Attempts:
    """The engine's listener, and the one way to it."""

    def __init__(
        self,
        engine: EmulatedEngine,
        clock: Clock,
        model: str,
        metrics: Metrics,
        most: int | None = None,
    ) -> None:
        """Listen to an engine that takes at most `most` requests at once, running or waiting."""
        self._engine, self._clock, self._metrics = engine, clock, metrics
        self._model, self._most = ModelName(model), most
        self._live: dict[AttemptId, Answer] = {}
        self._serial = 0
        self._snapshot: Snapshot | None = None
        engine.connect(self)

    @property
    def count(self) -> int:
        """How many are inside."""
        return len(self._live)

    def submit(self, work: Work) -> Answer | None:
        """Start a request, or return None: there are too many."""
        if self._most is not None and len(self._live) >= self._most:
            self._metrics.rejections += 1
            return None
        self._serial += 1
        answer = Answer(AttemptId(self._serial), work, self._clock.now())
        self._live[answer.attempt] = answer
        self._engine.submit(self._order(answer.attempt, work))
        if answer.end is not None:  # the engine's own bound, far above any test's
            self._metrics.rejections += 1
            return None
        return answer

    def leave(self, answer: Answer) -> None:
        """Nobody waits for an answer any more; one that is over stays as it is."""
        self._end(answer, None)

    def abort(self, names: set[str]) -> None:
        """End every answer that has one of the names, whole; its caller is told."""
        for answer in list(self._live.values()):
            if answer.work.name in names:
                self._end(answer, ABORTED)

    def snapshot(self) -> Snapshot:
        """Return the engine's account of itself."""
        self._engine.poll()
        assert self._snapshot is not None, "an emulated engine reports at once"
        return self._snapshot

    def yielded(self) -> Yielded:
        """Return what came of requests that gave way in the engine."""
        return self._engine.yielded()

    # What the engine tells ----------------------------------------------------------------------

    def produced(self, attempt: AttemptId, text: str, tokens: int) -> None:  # noqa: ARG002 - its text follows from the count
        """Count tokens."""
        answer = self._live[attempt]
        if not answer.made:
            waited = self._clock.now() - answer.arrived_at
            self._metrics.first(answer.work.prompt_tokens, waited)
        self._metrics.generation_tokens += tokens
        answer.add(tokens)

    def ended(self, attempt: AttemptId, made: Made) -> None:
        """End an answer."""
        answer = self._live.pop(attempt)
        answer.finish(End(str(made.finish), made.usage))
        if made.outcome is Outcome.SUCCESS:
            took = self._clock.now() - answer.arrived_at
            self._metrics.finished(made.finish, made.timing, took)

    def reported(self, snapshot: Snapshot) -> None:
        """Keep the engine's account."""
        self._snapshot = snapshot

    def _end(self, answer: Answer, finish: str | None) -> None:
        if self._live.pop(answer.attempt, None) is not None:
            self._engine.abort(answer.attempt)
            answer.finish(End(finish))

    def _order(self, attempt: AttemptId, work: Work) -> Order:
        number, told = int(attempt), work.told
        return Order(
            dispatch=Dispatch(
                request=RequestId(number),
                attempt=attempt,
                decision=DecisionId(number),
                replica=self._engine.name,
                incarnation=self._engine.incarnation,
                output_limit=work.limit,
                tenant=_NOBODY if told is None else told.tenant,
                slo_class=_NO_CLASS if told is None else told.slo_class,
                deadline=_NEVER if told is None else later(self._clock.now(), told.left_ns),
                relegated=told is not None and told.relegated,
                way=() if told is None else told.way,
                counters=() if told is None else told.counters,
                gap_ns=_GAP_NS if told is None else told.gap_ns,
            ),
            request=Request(
                id=RequestId(number),
                tenant=_NOBODY if told is None else told.tenant,
                model=self._model,
                input_tokens=work.prompt_tokens,
                prefix=work.prefix,
                prefix_tokens=work.prefix_tokens,
            ),
            replay_output=work.limit if work.to_the_limit else None,
        )
