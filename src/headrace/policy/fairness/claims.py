"""Whose deferred work is taken up next? The share tree once more, between two looks at a durable queue.

Deferred jobs wait in a store, which several processes may claim from, so nobody holds their tree in
memory. What it must remember from one claim to the next is a `Memory`: plain data that the store keeps
beside the jobs and changes in the same transaction. A claim thaws it, lists who waits, asks for turns and
charges them, and freezes it again. Lifting, charging and turns are those of `Shares`; nothing is added but
when they happen: who came or left since the last claim does so at the next, which is the same, since
counters stand still between claims.

A job has no caller who waits for it now: turns are neither lent nor aged, nor boosted near a deadline.
Within a line the store goes by priority, deadline and sequence.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from msgspec import Struct

from headrace.model.ids import ClassName, TenantId
from headrace.model.paths import ROOT, Path, parent_of
from headrace.policy.fairness.shares import Rules, Shares, Side


class Line(Struct, frozen=True, order=True, gc=False):
    """The jobs of one tenant in one class: they stand in one place of the tree."""

    tenant: TenantId
    slo_class: ClassName


class ClaimOrder(Struct, frozen=True, kw_only=True):
    """Who shares with whom, as it is configured at the time of a claim."""

    way: Callable[[Line], Path | None]
    """Where in the tree a line stands; None: nothing of it is to be taken up now. Called in the store's own
    thread."""
    rules: Rules = Rules()


class Memory(Struct):
    """What one model's tree must know of earlier claims."""

    counters: dict[str, int] = {}
    served: dict[str, int] = {}
    lows: dict[str, int] = {}
    highs: dict[str, int] = {}
    last_out: dict[str, str] = {}
    waiting: list[Line] = []
    """The lines in which something was left."""


class Turns:
    """The turns of one claim."""

    def __init__(
        self,
        order: ClaimOrder,
        memory: Memory,
        waiting: Iterable[Line],
        owed: Mapping[Line, int],
    ) -> None:
        """Go on from `memory` with the lines in which something waits now.

        `owed`: service by which lines were charged too little (or, if negative, too much) since then.
        """
        self._shares = Shares(
            counters=dict(memory.counters),
            served=dict(memory.served),
            lows=dict(memory.lows),
            highs=dict(memory.highs),
            last_out=dict(memory.last_out),
            rules=order.rules,
        )
        self._way = order.way
        self._lines: dict[str, Line] = {}
        self._ways: dict[Line, Path] = {}
        self._idle: list[Line] = []
        """Lines in which something waits that is not to be taken up now."""
        before = set(memory.waiting)
        now = sorted(set(waiting))
        self._enter((line for line in now if line in before), again=True)
        self._enter((line for line in now if line not in before), again=False)
        for line, service in sorted(owed.items()):
            self._settle(line, service)

    def _enter(self, lines: Iterator[Line], *, again: bool) -> None:
        for line in lines:
            way = self._way(line)
            if way is None:
                self._idle += [line] if again else []
                continue
            self._lines[way[-1].key], self._ways[line] = line, way
            self._shares.join(way, again=again)
            self._shares.enlist(way, Side.URGENT, 0)

    def _settle(self, line: Line, service: int) -> None:
        way = self._ways.get(line) or self._way(line)
        if way is None:
            return
        passing = line not in self._ways
        if passing:  # so that it stands where it would on its return
            self._shares.join(way)
        self._shares.charge(way, max(0, -service), max(0, service))
        if passing:
            self._shares.leave(way)

    def next(self) -> Line | None:
        """Return the line whose turn it is, or None if none is left."""
        if not self._ways:
            return None
        return self._lines[self._shares.leaf(Side.URGENT, ROOT)]

    def lines(self) -> list[Line]:
        """Return the lines that may still have a turn."""
        return list(self._ways)

    def charge(self, line: Line, service: int) -> None:
        """Book a job that is taken from a line, by its predicted service."""
        self._shares.charge(self._ways[line], 0, service)

    def drop(self, line: Line) -> None:
        """Let a line have nothing more for this claim."""
        way = self._ways.pop(line)
        self._shares.delist(way)
        self._shares.leave(way)

    def memory(self) -> Memory:
        """Return what the next claim must know."""
        shares = self._shares
        for parent, keys in self._children().items():
            floor = shares.least(parent)
            last = shares.last_out.get(parent)
            if floor is None and last is not None:
                floor = shares.counter(last)
            for key in keys:
                if key != last and floor is not None and self._is_forgettable(key, parent, floor):
                    for marks in (shares.counters, shares.lows, shares.highs):
                        marks.pop(key, None)
        return Memory(
            counters=shares.counters,
            served=shares.served,
            lows=shares.lows,
            highs=shares.highs,
            last_out=shares.last_out,
            waiting=sorted([*self._ways, *self._idle]),
        )

    def _children(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for key in self._shares.counters:
            found.setdefault(parent_of(key), []).append(key)
        return found

    def _is_forgettable(self, key: str, parent: str, floor: int) -> bool:
        """Return whether a node that is lifted on its return will not know the difference."""
        shares = self._shares
        clock = shares.served.get(parent, 0)
        return (
            key not in shares.waiting
            and shares.counters[key] <= floor
            and max(shares.lows.get(key, clock), shares.highs.get(key, clock)) <= clock
        )
