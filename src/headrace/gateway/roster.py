"""Which engines does a driver have, which of them are to go, and what runs there?"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from headrace.model.ids import Incarnation, ReplicaName
from headrace.plane.ledger import Load
from headrace.ports.engine import EngineClient


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
