"""What does the plane's state say at one instant? Readings that metrics and `/state` share."""

from collections.abc import Iterator, Mapping

from msgspec import Struct

from headrace.model.ids import ClassName, ModelName, TenantId
from headrace.plane.core import Plane
from headrace.plane.fleet import Replica
from headrace.plane.state import ModelState, Phase
from headrace.units import InstantNs


class Waiting(Struct):
    """Who waits in one class of one model."""

    count: int = 0
    work_ns: int = 0
    oldest: InstantNs | None = None
    urgent: InstantNs | None = None
    """The earliest instant by which one of them must be sent."""

    def add(self, work_ns: int, arrived_at: InstantNs, latest_start: InstantNs | None) -> None:
        """Count one more."""
        self.count += 1
        self.work_ns += work_ns
        if self.oldest is None or arrived_at < self.oldest:
            self.oldest = arrived_at
        if latest_start is not None and (self.urgent is None or latest_start < self.urgent):
            self.urgent = latest_start


class Queues(Struct, frozen=True):
    """Who waits for whom."""

    classes: dict[tuple[ModelName, ClassName], Waiting]
    """By every model and class that it serves."""
    oldest: dict[tuple[ModelName, TenantId], InstantNs]
    """When the first came of those that wait, by model and tenant."""


def waiting(plane: Plane) -> Queues:
    """Return who waits; one pass over all that is live."""
    oldest: dict[tuple[ModelName, TenantId], InstantNs] = {}
    found = {
        (model, one): Waiting()
        for model in plane.state.models
        for one in plane.settings.classes
        if plane.settings.serving(model, one)
    }
    for live in plane.state.live.values():
        if live.phase is Phase.QUEUED:
            bounded = live.bounds.ttft_ns is not None or live.bounds.e2e_ns is not None
            found.setdefault((live.model, live.slo_class), Waiting()).add(
                live.demand.work_p50_ns,
                live.entry.arrived_at,
                live.latest_start if bounded else None,
            )
            who, since = (live.model, live.request.tenant), live.entry.arrived_at
            if since < oldest.get(who, since + 1):
                oldest[who] = since
    return Queues(found, oldest)


def fleet(models: Mapping[ModelName, ModelState]) -> Iterator[tuple[ModelName, Replica]]:
    """Yield every ready replica with its model."""
    for model, known in models.items():
        for replica in known.fleet.replicas.values():
            yield model, replica
