"""How much work that cannot wait comes in, so that enough replicas stay open to it?

Work-seconds per second by class, over about the last ten seconds. It only changes where turns are
handed out, never between: whatever it holds back is tried again in the same breath.
"""

from collections.abc import Iterable
from typing import ClassVar

from msgspec import Struct

from headrace.model.ids import ClassName
from headrace.units import MICRO, NS_PER_S, InstantNs

_GONE = 30
"""Nothing is left after so many times its memory."""


class Pace(Struct):
    """The urgent work that came in, decayed."""

    MEMORY_S: ClassVar[int] = 10
    """Seconds that all of it together weighs: of one, all but one of so many parts are left after a second."""

    work_ns: dict[ClassName, int] = {}
    at: InstantNs = InstantNs(0)
    """Up to when it has been decayed."""

    def add(self, slo_class: ClassName, work: int) -> None:
        """Count work that came in."""
        self.work_ns[slo_class] = self.work_ns.get(slo_class, 0) + work

    def forget(self, now: InstantNs) -> None:
        """Decay by the whole seconds that have passed."""
        passed = (now - self.at) // NS_PER_S
        if not passed:
            return
        self.at = InstantNs(self.at + passed * NS_PER_S)
        memory = self.MEMORY_S
        if passed > memory * _GONE:
            self.work_ns.clear()
            return
        keep, of = (memory - 1) ** passed, memory**passed
        left = {name: work * keep // of for name, work in self.work_ns.items()}
        self.work_ns = {name: work for name, work in left.items() if work}

    def next_change(self) -> InstantNs | None:
        """Return when it decays next; None: there is nothing to forget."""
        return InstantNs(self.at + NS_PER_S) if self.work_ns else None

    def micro(self, classes: Iterable[ClassName]) -> int:
        """Return the work-seconds per second that came in for some classes, in millionths."""
        work = sum(self.work_ns.get(name, 0) for name in classes)
        return work * MICRO // (self.MEMORY_S * NS_PER_S)
