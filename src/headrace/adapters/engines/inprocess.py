"""An emulated replica inside the gateway: what it makes, in the words of the route asked for."""

import secrets
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from headrace.adapters.engines.answer import Order
from headrace.adapters.engines.emulated import EmulatedEngine, Made
from headrace.adapters.engines.words import writer
from headrace.adapters.engines.words.frame import Writer
from headrace.model.engine import Snapshot
from headrace.model.ids import AttemptId, Incarnation, PoolName, ReplicaName
from headrace.model.ladder import LEVEL_MAX
from headrace.model.meter import NO_STREAM
from headrace.model.profile import Profile
from headrace.model.slo import Outcome
from headrace.ports.clock import Clock
from headrace.ports.engine import Call, Ending, Listener

_ID_BYTES = 12


class _Answer(Struct):
    """One answer on its way out."""

    call: Call
    writer: Writer
    texts: list[str]
    """What was not written yet: all of a whole answer, or what came while its caller was slow."""
    made: int = 0
    begun: bool = False
    paused: bool = False


class InProcessEngine:
    """An emulated replica as the driver knows engines."""

    def __init__(self, engine: EmulatedEngine, clock: Clock) -> None:
        """Speak for an engine that nobody listens to yet."""
        self._engine, self._clock = engine, clock
        self._listener: Listener | None = None
        self._answers: dict[AttemptId, _Answer] = {}
        self.tells_first = True
        """It is here."""
        self.missing: tuple[str, ...] = ()
        self.trouble: str | None = None
        """None that it could have."""
        self.report: Callable[[Snapshot], None] | None = None
        """Whoever has its accounts of itself lost or late on purpose, and gets them first."""
        self._crashed = False

    @property
    def name(self) -> ReplicaName:
        """The replica's name."""
        return self._engine.name

    @property
    def incarnation(self) -> Incarnation:
        """Which of its lives this is."""
        return self._engine.incarnation

    @property
    def pool(self) -> PoolName:
        """The pool it belongs to."""
        return self._engine.pool

    def connect(self, listener: Listener) -> None:
        """Say who listens; it is up at once."""
        self._listener = listener
        self._engine.connect(self)
        listener.up(self)

    def submit(self, call: Call) -> None:
        """Start an attempt."""
        if self._crashed:
            return  # nobody knows yet that it is gone
        ask, request = call.ask, call.request
        if (lesser := call.dispatch.lesser) is not None:
            request = request.lessened(lesser.kept)
            if lesser.level == LEVEL_MAX:
                request = replace(request, model=lesser.model)
        name = secrets.token_hex(_ID_BYTES)
        written = writer(
            ask.route,
            name,
            self._clock.wall(),
            request.model,
            request.input_tokens,
            usage_at_end=ask.usage_shown,
        )
        self._answers[call.dispatch.attempt] = _Answer(call=call, writer=written, texts=[])
        self._engine.submit(
            Order(dispatch=call.dispatch, request=request, replay_output=ask.replay_output)
        )

    def abort(self, attempt: AttemptId) -> None:
        """Stop an attempt."""
        self._answers.pop(attempt, None)
        self._engine.abort(attempt)

    def pause(self, attempt: AttemptId) -> None:
        """Tell nothing of an attempt; what is made meanwhile is kept as text, which is short."""
        answer = self._answers.get(attempt)
        if answer is not None:
            answer.paused = True

    def resume(self, attempt: AttemptId) -> None:
        """Go on telling."""
        answer = self._answers.get(attempt)
        if answer is not None:
            answer.paused = False
            self._write(attempt, answer)

    def reprice(self, profile: Profile) -> None:
        """Let steps be as another profile of the same size says, from the next one on."""
        self._engine.reprice(profile)

    def forget_prefixes(self) -> None:
        """Drop the cached prefixes that nothing runs on, and tell nobody."""
        self._engine.forget_prefixes()

    def poll(self) -> None:
        """Report at once."""
        if not self._crashed:
            self._engine.poll()

    def crash(self, *, streams_break: bool) -> None:
        """Die with all it holds, and say nothing any more: on purpose, to see what comes of it.

        `streams_break`: each answer's end is seen, as that of a connection would be. Else nothing is heard
        of them until somebody tells that the replica is down.
        """
        lost = tuple(self._answers)
        self._crashed = True
        self.close()
        if streams_break:
            for attempt in lost:
                failed = Ending(outcome=Outcome.ERROR, usage=None, timing=NO_STREAM)
                self._tell.ended(attempt, failed)

    def close(self) -> None:
        """Stop for good."""
        self._engine.close()
        self._answers.clear()

    # What the engine tells --------------------------------------------------------------------

    def produced(self, attempt: AttemptId, text: str, tokens: int) -> None:
        """Write what was made, if its caller takes it now."""
        answer = self._answers[attempt]
        answer.call.meter.note(self._clock.now(), tokens)
        answer.made += tokens
        answer.texts.append(text)
        if not answer.call.ask.stream:
            self._tell.produced(attempt, b"")
        elif not answer.paused:
            self._write(attempt, answer)

    def ended(self, attempt: AttemptId, made: Made) -> None:
        """Write the end."""
        answer = self._answers.pop(attempt)
        if made.outcome is Outcome.SUCCESS:
            self._tell.produced(attempt, _end(answer, made))
        self._tell.ended(
            attempt, Ending(outcome=made.outcome, usage=made.usage, timing=made.timing)
        )

    def reported(self, snapshot: Snapshot) -> None:
        """Pass it on."""
        (self.report or self._tell.reported)(snapshot)

    @property
    def _tell(self) -> Listener:
        assert self._listener is not None, "connect first"
        return self._listener

    def _write(self, attempt: AttemptId, answer: _Answer) -> None:
        if answer.texts:
            self._tell.produced(attempt, b"".join(_opening(answer)) + _piece(answer))


def _opening(answer: _Answer) -> list[bytes]:
    """Return what comes before the first token, once."""
    begun, answer.begun = answer.begun, True
    return [] if begun else answer.writer.opening()


def _piece(answer: _Answer) -> bytes:
    text = "".join(answer.texts)
    answer.texts.clear()
    return answer.writer.piece(text, answer.made)


def _end(answer: _Answer, made: Made) -> bytes:
    """Return what completes an answer: all of it, if it is not streamed."""
    cached = None if made.usage is None else made.usage.cached_tokens
    if not answer.call.ask.stream:
        return answer.writer.whole("".join(answer.texts), made.finish, answer.made, cached)
    pieces = _opening(answer)
    if answer.texts:
        pieces.append(_piece(answer))
    pieces += answer.writer.closing("", made.finish, answer.made, cached)
    return b"".join(pieces) + answer.writer.end_mark
