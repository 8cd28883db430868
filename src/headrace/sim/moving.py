"""Running requests on their way from one emulated replica to another: how long that takes, and who has them meanwhile.

A move has two ends: its KV is copied while it runs where it was, then it stands still and is handed over. Until it is
handed over it belongs to the replica that it comes from, and is lost with it.
"""

from collections.abc import Callable
from itertools import count
from typing import Protocol

from msgspec import Struct

from headrace.model.effect import Migrate
from headrace.model.event import Event, Migrated
from headrace.model.ids import AttemptId, Incarnation, PoolName
from headrace.replica.core import Replica
from headrace.replica.job import Finished
from headrace.replica.moving import Migration, Moved
from headrace.sim.agenda import Agenda, Kind
from headrace.units import DurationNs, InstantNs, later


class Fleet(Protocol):
    """The replicas, as a move needs them."""

    def engine_of(self, life: Incarnation) -> Replica | None:
        """Return the engine of a life; None: it is over."""
        ...

    def pool_of(self, life: Incarnation) -> PoolName:
        """Return the pool of a life, over or not."""
        ...

    def replan(self, life: Incarnation) -> None:
        """Plan anew when that engine is to be looked at."""
        ...


class Moves(Struct, frozen=True, kw_only=True, gc=False):
    """What became of the moves of one pool."""

    begun: int = 0
    done: int = 0
    stayed: int = 0
    """The request was not where it could be moved, or the other replica was gone or full: it went on where it was.
    What is neither done nor stayed ended before it was over."""


class _Move(Struct):
    """One move under way."""

    nth: int
    source: Incarnation
    target: Incarnation
    moved: Moved | None = None
    """What is handed over, while it stands still."""


class Moving:
    """All moves of a run."""

    def __init__(
        self,
        how: Migration | None,
        fleet: Fleet,
        agenda: Agenda[object],
        tell: Callable[[Event], None],
        home: dict[AttemptId, Incarnation],
    ) -> None:
        """Move nothing yet; `home` has where each attempt runs, `tell` hears how a move went."""
        self._how, self._fleet, self._agenda, self._tell, self._home = (
            how,
            fleet,
            agenda,
            tell,
            home,
        )
        self._count = count(1)
        self._under_way: dict[AttemptId, _Move] = {}
        self.counts: dict[PoolName, Moves] = {}

    def begin(self, effect: Migrate, now: InstantNs) -> None:
        """Set room aside and begin to copy; where that is not possible, it is told at once."""
        attempt, source, target = effect.attempt, effect.incarnation, effect.target_incarnation
        self._note(source, begun=1)
        takes = self._copy_ns(effect, now)
        if takes is None:
            self._plan(attempt, now, Migrated(attempt=attempt, incarnation=target, done=False))
            return
        move = _Move(nth=next(self._count), source=source, target=target)
        self._under_way[attempt] = move
        self._fleet.replan(target)
        self._plan(attempt, later(now, takes), move.nth)

    def _copy_ns(self, effect: Migrate, now: InstantNs) -> DurationNs | None:
        """Set room aside for what is to be copied, and return how long that takes; None: it cannot be."""
        attempt, here = effect.attempt, self._fleet.engine_of(effect.incarnation)
        there = self._fleet.engine_of(effect.target_incarnation)
        if self._how is None or here is None or there is None or attempt in self._under_way:
            return None
        blocks = here.movable(attempt, now)
        if blocks is None or not there.set_aside(attempt, blocks, now):
            return None
        return self._how.copy_ns(blocks, here.profile)

    def advance(self, attempt: AttemptId, event: object, now: InstantNs) -> None:
        """Hand a request over whose KV is copied, or have it go on once it stood still for long enough."""
        if isinstance(event, Migrated):
            self._note(self._home.get(attempt), stayed=1)
            self._tell(event)
            return
        move = self._under_way.get(attempt)
        if move is None or move.nth != event:
            return
        if move.moved is None:
            self._copied(attempt, move, now)
        else:
            self._handed_over(attempt, move, move.moved, now)

    def _copied(self, attempt: AttemptId, move: _Move, now: InstantNs) -> None:
        assert self._how is not None
        here = self._fleet.engine_of(move.source)
        if here is not None and self._fleet.engine_of(move.target) is not None:
            move.moved = here.export(attempt, now)
            self._fleet.replan(move.source)
        if move.moved is None:
            self.drop(attempt, now)
            self._over(attempt, move, done=False)
            return
        self._plan(attempt, later(now, self._how.pause_ns), move.nth)

    def _handed_over(self, attempt: AttemptId, move: _Move, moved: Moved, now: InstantNs) -> None:
        """Have it go on in the other replica; if that is gone, where it was."""
        del self._under_way[attempt]
        there = self._fleet.engine_of(move.target)
        life = move.source if there is None else move.target
        engine = self._fleet.engine_of(life)
        assert engine is not None, f"{attempt} was lost with the replica that it came from"
        engine.take_in(moved, now)
        self._home[attempt] = life
        self._fleet.replan(life)
        self._over(attempt, move, done=there is not None)

    def _over(self, attempt: AttemptId, move: _Move, *, done: bool) -> None:
        self._note(self._home[attempt], done=done, stayed=not done)
        self._tell(Migrated(attempt=attempt, incarnation=move.target, done=done))

    def drop(self, attempt: AttemptId, now: InstantNs) -> Finished | None:
        """Forget the move of an attempt that is over; return what it has had, if it was between two replicas."""
        move = self._under_way.pop(attempt, None)
        if move is None:
            return None
        engine = self._fleet.engine_of(move.target)
        if engine is not None:
            engine.give_up(attempt, now)
            self._fleet.replan(move.target)
        return None if move.moved is None else move.moved.so_far

    def clear(self, now: InstantNs) -> None:
        """Forget all moves: whoever wanted them is gone."""
        for attempt in list(self._under_way):
            self.drop(attempt, now)

    def _plan(self, attempt: AttemptId, at: InstantNs, what: object) -> None:
        self._agenda.push(at, Kind.MOVE, attempt, what)

    def _note(
        self, life: Incarnation | None, *, begun: int = 0, done: int = 0, stayed: int = 0
    ) -> None:
        if life is None:
            return
        pool = self._fleet.pool_of(life)
        known = self.counts.get(pool, Moves())
        self.counts[pool] = Moves(
            begun=known.begun + begun, done=known.done + done, stayed=known.stayed + stayed
        )
