"""How is one inference engine spoken to, and what does it tell?

Failures of an engine are no exceptions here: an attempt that was submitted and not aborted is told
to have ended exactly once, whatever happened to it. Answers pass as the bytes that callers get, whole
frames at a time, so that nothing between engine and caller reads or writes them anew.
"""

from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from headrace.model.effect import Dispatch
from headrace.model.engine import Snapshot, Usage
from headrace.model.ids import AttemptId, Incarnation, PoolName, ReplicaName
from headrace.model.meter import Meter, StreamTiming
from headrace.model.request import Request
from headrace.model.slo import Outcome
from headrace.units import Tokens


class Route(StrEnum):
    """What is asked of an engine: the path, on both sides of the gateway."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    EMBEDDINGS = "/v1/embeddings"


class Finish(StrEnum):
    """Why an answer stops; OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    """The output limit was reached."""


Place = tuple[int, int | None]
"""The number of a message, and of a part of it; None: all of it."""


class Ask(Struct, frozen=True, kw_only=True):
    """What the engine is to be asked, beside what the plane says."""

    route: Route
    body: bytes
    """The caller's own JSON; the engine's adapter edits it at the last hop."""
    stream: bool
    usage_shown: bool
    """The caller asked for the usage in its stream; else what we asked for is kept out of it."""
    each_usage_shown: bool = False
    """The caller asked for the usage so far in each frame of it."""
    replay_output: Tokens | None = None
    """The true output length, told by a trusted replay. The plane never sees it."""
    replay_input: Tokens | None = None
    """The length that the prompt stands for, told likewise."""
    session: bytes | None = None
    """Which session it belongs to, in a form that engines may know: plain, short, no tenant's own."""
    adapter: str | None = None
    """Which of the model's adapters is asked for: engines know it under this very name."""
    optional: tuple[Place, ...] = ()
    """What of the prompt may be left out, the most useful first."""


class Call(Struct, frozen=True, kw_only=True):
    """One attempt as it is sent to an engine."""

    dispatch: Dispatch
    request: Request
    ask: Ask
    meter: Meter
    """The engine notes in it what it makes, when it makes it, before it is told."""


class Refusal(Struct, frozen=True, kw_only=True):
    """An engine's own answer that the request itself is at fault, for the caller as it stands."""

    status: int
    body: bytes


class Ending(Struct, frozen=True, kw_only=True):
    """How an attempt ended."""

    outcome: Outcome
    usage: Usage | None
    timing: StreamTiming
    refusal: Refusal | None = None
    """Why nothing was made, if the caller's request is to blame."""
    whole: bool = True
    """What was told ends with a frame, so that an error may follow it."""
    full: bool = False
    """It took no more: nothing was made, and another time may do."""


class Listener(Protocol):
    """Whom an engine tells; calls may come from within `submit`, `abort`, `resume` and `poll`."""

    def up(self, engine: "EngineClient") -> None:
        """It is ready to serve, under its present incarnation."""
        ...

    def down(self, engine: "EngineClient") -> None:
        """That incarnation is gone, and whatever it had; none of it is told to have ended."""
        ...

    def produced(self, attempt: AttemptId, data: bytes) -> None:
        """More of an answer: whole frames of a stream, or all of an answer in one piece."""
        ...

    def ended(self, attempt: AttemptId, ending: Ending) -> None:
        """An attempt is over; nothing of it follows."""
        ...

    def reported(self, snapshot: Snapshot) -> None:
        """The engine's account of itself, perhaps late."""
        ...

    def forgot(self, engine: "EngineClient") -> None:
        """Its cache was cleared, or nobody knows any more what is in it."""
        ...


class EngineClient(Protocol):
    """One replica, through all of its lives."""

    @property
    def name(self) -> ReplicaName:
        """The replica's name."""
        ...

    @property
    def incarnation(self) -> Incarnation:
        """Which of its lives this is."""
        ...

    @property
    def pool(self) -> PoolName:
        """The pool it belongs to."""
        ...

    @property
    def tells_first(self) -> bool:
        """Whether it tells of the first token of an answer that is not streamed."""
        ...

    @property
    def missing(self) -> tuple[str, ...]:
        """What of its load it should tell and does not; empty if all is well, or nothing is asked."""
        ...

    @property
    def trouble(self) -> str | None:
        """Why it is not ready; None: it is, or nothing is known of it yet."""
        ...

    def connect(self, listener: Listener) -> None:
        """Say who listens; called once, before anything else. It may be up at once."""
        ...

    def submit(self, call: Call) -> None:
        """Start an attempt."""
        ...

    def abort(self, attempt: AttemptId) -> None:
        """Stop an attempt; nothing of it is told any more. An unknown one is none's."""
        ...

    def pause(self, attempt: AttemptId) -> None:
        """Tell nothing of an attempt for now, and have the engine wait if it can."""
        ...

    def resume(self, attempt: AttemptId) -> None:
        """Go on telling."""
        ...

    def poll(self) -> None:
        """Ask for a report."""
        ...

    def close(self) -> None:
        """Let go of everything; nothing is told any more."""
        ...
