"""Who provides replica groups, and what becomes of one?

A group is everything that one replica needs: all of its ranks, or it serves nothing. It is asked for
and told of: it may take minutes, come in part, be refused or be lost, so nothing is known from the
return of a call. Whoever asks hears of every stage, timed on the gateway's own clock.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Protocol

from msgspec import Struct

from headrace.model.engine import EngineKind
from headrace.model.group import Place
from headrace.model.ids import PoolName, ReplicaName
from headrace.units import InstantNs, elapsed, to_seconds


class Stage(StrEnum):
    """How far a group is: the way up in order, then the ways out."""

    ASKED = "asked"
    REFUSED = "refused"
    """Nothing was placed: it is over, unless it is asked for again."""
    PLACED = "placed"
    """All of its ranks have their place, and their processes run."""
    LISTENING = "listening"
    """Its port takes connections."""
    HEALTHY = "healthy"
    """It says that it is well."""
    LOADED = "loaded"
    """It has its model."""
    READY = "ready"
    """It made a token that somebody asked for: the only proof that it serves."""
    ASLEEP = "asleep"
    """It could serve within seconds of being woken."""
    LOST = "lost"
    """All of it is gone though nobody asked: a rank ended, or it was not ready in time. It is over,
    unless `PLACED` follows: then it was started again."""
    GIVEN_UP = "given_up"
    """Lost too often: it is over."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    """Nothing of it is left: it is over."""


OVER = frozenset({Stage.REFUSED, Stage.GIVEN_UP, Stage.STOPPED})
"""Stages after which a group is there no more, and its name is free."""


class GroupEvent(Struct, frozen=True, kw_only=True):
    """A group reached a stage."""

    group: ReplicaName
    life: int
    """Which of its lives this is, from 1: one that was lost and started again has another."""
    stage: Stage
    at: InstantNs
    why: str = ""
    """For people; no part of anybody's request is in it."""
    step: str = ""
    """Which part of a start it is in, as in `model.stages`, where more is known than the stage says."""


def stage_seconds(events: Sequence[GroupEvent]) -> dict[str, float]:
    """Return how long each stage of one life took since the one before it; they add up to the whole."""
    return {
        after.step or after.stage: to_seconds(elapsed(before.at, after.at))
        for before, after in pairwise(events)
    }


class Group(Struct, frozen=True, kw_only=True):
    """A group as it stands."""

    name: ReplicaName
    pool: PoolName
    stage: Stage
    """Where its present life is."""
    life: int = 1
    step: str = ""
    """Which part of a start it is in, where more is known than the stage says."""
    url: str
    """Where it listens, or will. Empty: it is emulated in this process."""
    kind: EngineKind | None = None
    """Which software it is; None: whoever talks to it finds out."""
    model: str | None = None
    """What it calls its model. None: as the deployment does."""
    ranks: int
    """How many processes it consists of."""
    running: int
    """How many of them are there. Fewer than `ranks` serve nothing, and are held all the same."""
    places: tuple[Place, ...] = ()
    """Where they are, each place once; empty: nobody knows."""


Listener = Callable[[GroupEvent], None]
"""Whom an actuator tells, in the order of time; calls may come from within `start` and `stop`."""


class Actuator(Protocol):
    """Starts and stops groups of one kind."""

    def connect(self, listener: Listener) -> None:
        """Say who listens, before anything else."""
        ...

    def start(self, name: ReplicaName, pool: PoolName, *, standby: bool = False) -> None:
        """Ask for a group by a name that is free; `standby`: it is to sleep once it could serve."""
        ...

    def wake(self, name: ReplicaName) -> None:
        """Have a standby group serve, asleep or on its way there."""
        ...

    def stop(self, name: ReplicaName) -> None:
        """Give a group back, whatever its stage; one that is stopping or over stays so.

        Not a drain: whoever calls has seen to it that nothing runs there any more.
        """
        ...

    def groups(self) -> tuple[Group, ...]:
        """Return what is there, ready or not, in the order in which it was asked for."""
        ...
