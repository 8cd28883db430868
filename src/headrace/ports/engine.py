"""How is one inference engine spoken to, and what does it tell?

Failures of an engine are no exceptions here: an attempt that was submitted and not aborted is told
to have ended exactly once, whatever happened to it.
"""

from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from headrace.model.effect import Dispatch
from headrace.model.engine import Snapshot, Usage
from headrace.model.ids import AttemptId, Incarnation, PoolName, ReplicaName
from headrace.model.meter import StreamTiming
from headrace.model.request import Request
from headrace.model.slo import Outcome
from headrace.units import Tokens


class Finish(StrEnum):
    """Why an answer stops; OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    """The output limit was reached."""


class Call(Struct, frozen=True, kw_only=True):
    """One attempt as it is sent to an engine."""

    dispatch: Dispatch
    request: Request
    replay_output: Tokens | None = None
    """The true output length, told by a trusted replay. The plane never sees it."""


class Ending(Struct, frozen=True, kw_only=True):
    """How an attempt ended."""

    outcome: Outcome
    usage: Usage | None
    timing: StreamTiming
    finish: Finish = Finish.STOP


class Listener(Protocol):
    """Whom an engine tells; calls may come from within `submit`, `abort` and `poll`."""

    def produced(self, attempt: AttemptId, text: str, tokens: int) -> None:
        """Tokens of an answer, in order."""
        ...

    def ended(self, attempt: AttemptId, ending: Ending) -> None:
        """An attempt is over; nothing of it follows."""
        ...

    def reported(self, snapshot: Snapshot) -> None:
        """The engine's account of itself, perhaps late."""
        ...


class EngineClient(Protocol):
    """One incarnation of one replica."""

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

    def connect(self, listener: Listener) -> None:
        """Say who listens; called once, before anything else."""
        ...

    def submit(self, call: Call) -> None:
        """Start an attempt."""
        ...

    def abort(self, attempt: AttemptId) -> None:
        """Stop an attempt; nothing of it is told any more. An unknown one is none's."""
        ...

    def poll(self) -> None:
        """Ask for a report."""
        ...

    def close(self) -> None:
        """Let go of everything; nothing is told any more."""
        ...
