"""What happens to the groups of a fleet in which something goes wrong: simulated and live alike."""

from collections.abc import Mapping

from msgspec import Struct

from headrace.model.effect import (
    AskGroup,
    Decided,
    DrainGroup,
    Effect,
    RecallGroup,
    StopGroup,
    WakeGroup,
)
from headrace.model.ids import ReplicaName
from headrace.model.scaling import ScaleRecord
from headrace.sim.expect import Fleet
from headrace.units import InstantNs

_SAID: dict[type, str] = {
    AskGroup: "asked for",
    WakeGroup: "woken",
    DrainGroup: "drained",
    RecallGroup: "its drain called off",
    StopGroup: "given back",
}


class Happened(Struct, frozen=True, kw_only=True):
    """Something worth telling, for people."""

    at: InstantNs
    what: str


class Stands(Struct, frozen=True, gc=False):
    """How a group really stands."""

    ready: bool
    """It serves, and takes requests."""
    gpus: int
    """GPUs that it holds."""


class Watch:
    """Keeps what becomes of groups, as whoever provides them knows it. Instants are those of the run."""

    def __init__(self) -> None:
        """Start having seen nothing."""
        self.decisions: list[ScaleRecord] = []
        self.fleet: list[Fleet] = []
        self.happened: list[Happened] = []
        self._ready: frozenset[ReplicaName] = frozenset()

    def did(self, effect: Effect, now: InstantNs) -> None:
        """Take in what the plane wants of groups, or decided about them."""
        match effect:
            case Decided(ScaleRecord() as record):
                self.decisions.append(record)
            case AskGroup() | WakeGroup() | DrainGroup() | RecallGroup() | StopGroup():
                self.tell(f"{effect.group}: {_SAID[type(effect)]}", now)
            case _:
                pass

    def look(self, groups: Mapping[ReplicaName, Stands], now: InstantNs) -> None:
        """Take in how all groups stand, whether that has changed or not."""
        ready = frozenset(name for name, one in groups.items() if one.ready)
        gpus = sum(one.gpus for one in groups.values())
        idle = gpus - sum(groups[name].gpus for name in ready)
        last = self.fleet[-1] if self.fleet else None
        if last is None or (last.ready, last.gpus, last.idle) != (len(ready), gpus, idle):
            if last is not None and last.at == now:
                self.fleet.pop()
            self.fleet.append(Fleet(at=now, ready=len(ready), gpus=gpus, idle=idle))
        for name in sorted(ready - self._ready):
            self.tell(f"{name}: ready, {len(ready)} are", now)
        for name in sorted(self._ready - ready):
            self.tell(f"{name}: not ready any more, {len(ready)} are", now)
        self._ready = ready

    def tell(self, what: str, now: InstantNs) -> None:
        """Take in something else that happened."""
        self.happened.append(Happened(at=now, what=what))
