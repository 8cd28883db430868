"""What comes in for each class as it would be at each level of a ladder, and where the class stands on it.

Plain counts: when a class moves is for `policy/degrade/level` to say.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct, field

from headrace.model.ids import ClassName
from headrace.model.ladder import LEVEL_MAX
from headrace.policy.degrade.level import REFUSED, SETTLE_NS, SIGN_NS
from headrace.units import MICRO, NS_PER_S, DurationNs, InstantNs, elapsed, later

_KEEP, _OF = 9, 10
"""Forgetting per second: all of it together weighs ten seconds."""
_MEMORY_S = 10
_GONE_S = 300
"""Nothing is left after so long."""


class Inflow(Struct):
    """Work that came in by class, as it would be at each level from 0 on, decayed."""

    work_ns: dict[ClassName, list[int]] = {}
    at: InstantNs = InstantNs(0)
    """Up to when it has been decayed."""

    def add(self, slo_class: ClassName, works: Sequence[int]) -> None:
        """Count a request by its work at each level; `forget` comes first."""
        mine = self.work_ns.setdefault(slo_class, list(NOTHING))
        for level, work in enumerate(works):
            mine[level] += work

    def forget(self, now: InstantNs) -> None:
        """Decay by the whole seconds that have passed."""
        passed = (now - self.at) // NS_PER_S
        if not passed:
            return
        self.at = InstantNs(self.at + passed * NS_PER_S)
        if passed > _GONE_S:
            self.work_ns.clear()
            return
        keep, of = _KEEP**passed, _OF**passed
        left = {name: [one * keep // of for one in mine] for name, mine in self.work_ns.items()}
        self.work_ns = {name: mine for name, mine in left.items() if any(mine)}

    def micro(self, classes: Iterable[ClassName]) -> tuple[int, ...]:
        """Return the work-seconds per second of some classes at each level, in millionths."""
        found = [self.work_ns[name] for name in classes if name in self.work_ns]
        per = _MEMORY_S * NS_PER_S
        return tuple(sum(each) * MICRO // per for each in zip(*found, strict=True)) or NOTHING


NOTHING = (0,) * (LEVEL_MAX + 1)


class Standing(Struct):
    """Where one class stands on its ladder, and how it came there."""

    level: int = 0
    since: InstantNs = InstantNs(0)
    """When it came to this level."""
    calm_from: InstantNs | None = None
    """Since when the level above would have done; None: it would not."""
    quiet_from: InstantNs = InstantNs(0)
    """Since when there was no sign that this one does not do."""
    refused_at: list[InstantNs] = []
    """When the last few were refused at this level, the first moments after a step down apart."""
    rose: bool = False
    """Whether it came here by a step up."""
    trying: bool = False
    """Whether that was against the forecast."""
    failed: int = 0
    """Such steps in a row that were taken back."""
    entered: list[int] = field(default_factory=lambda: list(NOTHING))
    """How often it came to each level."""
    spent_ns: list[int] = field(default_factory=lambda: list(NOTHING))
    """How long it was at each, up to when it came to this one."""
    left_at: InstantNs | None = None
    """When it last left level 0; None: it is there."""
    recovered_ns: DurationNs | None = None
    """How long it took the last time until it was back there; None: it never was away."""

    def move(self, level: int, now: InstantNs, *, trying: bool) -> None:
        """Come to another level; `trying`: against the forecast, if it is a step up."""
        assert level != self.level, "it is there"
        self.rose = level < self.level
        if not self.rose:
            self.failed += self.trying
        elif not trying:
            self.failed = 0
        self.trying = self.rose and trying
        self.spent_ns[self.level] += now - self.since
        self.entered[level] += 1
        if not self.level:
            self.left_at = now
        elif not level:
            assert self.left_at is not None, "it was away"
            self.recovered_ns, self.left_at = elapsed(self.left_at, now), None
        self.level, self.since, self.quiet_from = level, now, now
        self.calm_from, self.refused_at = None, []

    def refuse(self, now: InstantNs) -> None:
        """Note that a request was refused at this level."""
        went_down = bool(self.level) and not self.rose
        if not went_down or now >= later(self.since, SETTLE_NS):
            self.refused_at = [*self.refused_at, now][-REFUSED:]

    def refused(self, now: InstantNs) -> int:
        """Return how many of these were refused lately."""
        return sum(now <= later(at, SIGN_NS) for at in self.refused_at)

    def time_at(self, now: InstantNs) -> tuple[int, ...]:
        """Return how long it was at each level by now, in ns."""
        times = list(self.spent_ns)
        times[self.level] += now - self.since
        return tuple(times)
