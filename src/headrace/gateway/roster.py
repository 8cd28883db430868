"""Which engines does a driver have, which of them are to go, and what runs there?"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from headrace.gateway.stream import Stream
from headrace.model.ids import Incarnation, ReplicaName
from headrace.model.meter import Meter
from headrace.plane.ledger import Load
from headrace.ports.clock import Timer
from headrace.ports.engine import EngineClient


class Flight(Struct):
    """An attempt that an engine has."""

    stream: Stream
    engine: EngineClient
    meter: Meter
    """What the engine noted: for ends of which no engine tells."""
    guess: Timer | None = None
    """When its first token is taken to come, where the engine tells of none before the whole."""
    told: int = 0
    """Tokens of it that the plane was, or at the next tick will be, told of."""


class Roster:
    """The engines by name."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        """Begin with those that a configuration names."""
        self.engines = {engine.name: engine for engine in engines}
        self.leaving: dict[ReplicaName, Callable[[], None] | None] = {}
        """Those that take nothing new, with whom to tell once nothing of ours runs there."""

    def add(self, engine: EngineClient) -> None:
        """Take one more, of a name that is free."""
        assert engine.name not in self.engines, f"{engine.name} is there"
        self.engines[engine.name] = engine

    def remove(self, name: ReplicaName) -> None:
        """Forget one."""
        self.leaving.pop(name, None)
        del self.engines[name]

    def empty(self, loads: Mapping[Incarnation, Load]) -> Iterator[Callable[[], None]]:
        """Yield, once, whom to tell of each that has become empty.

        By the ledger, not by what engines say of themselves: theirs is late.
        """
        for name, done in self.leaving.items():
            load = loads.get(self.engines[name].incarnation)
            if done is not None and (load is None or not load.attempts):
                self.leaving[name] = None
                yield done
