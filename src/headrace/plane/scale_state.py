"""What the plane keeps of pools that scale: plain data, and what their configuration comes to."""

from math import isqrt
from typing import ClassVar

from msgspec import Struct, field

from headrace.model.deployment import PoolSpec
from headrace.model.envelope import Origin
from headrace.model.group import Ail, Life
from headrace.model.ids import ClassName, ModelName, PoolName, ReplicaName
from headrace.model.scaling import ScaleMemory
from headrace.model.scaling_spec import Scaling, ppm
from headrace.model.stages import Ahead, Stage, Stages, StageTimes, ready_time, shipped
from headrace.plane.pace import Pace
from headrace.policy.catalog import PlaneConfig
from headrace.policy.envelopes import reading
from headrace.policy.scaling.forecast import History
from headrace.units import MICRO, NS_PER_S, NS_PER_US, SUM_MAX, DurationNs, InstantNs, seconds

SERVES = ""
"""The stage of a group that serves, or has: its start is over."""
ASLEEP = "asleep"
"""The stage of a standby group that could be woken."""


_ALL = ClassName("")
_SURE = 3
"""Standard deviations beyond which more than the mean is a rise."""


class Offers(Pace):
    """The urgent work that comes in, as the mean of about a minute; a rise beyond chance is believed at once.

    Chance is that of single arrivals: a sum of independent ones varies by the root of the sum of their
    squares.
    """

    MEMORY_S: ClassVar[int] = 60
    fresh_ns: int = 0
    """Work since the last look."""
    squares_us: int = 0
    """Squares of its parts."""
    looked_at: InstantNs | None = None

    def come(self, work_ns: int, now: InstantNs) -> None:
        """Count work that came in."""
        self.forget(now)
        self.add(_ALL, work_ns)
        self.fresh_ns += work_ns
        self.squares_us = min(SUM_MAX, self.squares_us + (work_ns // NS_PER_US) ** 2)

    def look(self, now: InstantNs) -> int:
        """Return the rate, in millionths of work-seconds per second, and begin to count anew."""
        self.forget(now)
        passed = 0 if self.looked_at is None else now - self.looked_at
        if passed:
            sure = max(0, self.fresh_ns - _SURE * isqrt(self.squares_us) * NS_PER_US)
            if sure * MICRO > self.micro((_ALL,)) * passed:
                self.work_ns = {_ALL: self.fresh_ns * self.MEMORY_S * NS_PER_S // passed}
        self.fresh_ns, self.squares_us, self.looked_at = 0, 0, now
        return self.micro((_ALL,))


class Group(Struct):
    """One group of a pool that scales, from when it is asked for until nothing of it is left.

    Whether it serves is stored nowhere: it does while a replica of its name takes requests.
    """

    name: ReplicaName
    pool: PoolName
    life: Life
    """What is wanted of it."""
    since: InstantNs
    """Since when it has been what it is: asked for, serving, draining."""
    gpus: int
    """GPUs it holds."""
    stage: str = Stage.PROVISION
    """Of its start, which it is in until it serves."""
    stage_at: InstantNs = InstantNs(0)
    short_since: InstantNs | None = None
    """Since when it has lacked ranks; None: it has them all."""
    domain: str = ""
    """Where it stands; of several domains the first. Empty: nobody knows."""
    woken: bool = False
    """It comes from sleep."""
    told: bool = True
    """Somebody tells of it as a group. Else it is one for as long as its replica is up."""
    drain_by: InstantNs | None = None
    """When the time is over of what runs there."""
    ails: tuple[Ail, ...] = ()
    """What is told to be amiss."""
    told_ppm: int | None = None
    """The part of its envelope that it is told to do."""


class Counted(Struct):
    """Urgent requests that were over in one tick."""

    at: InstantNs
    """When the tick ended."""
    offered: int = 0
    met: int = 0


class PoolScale(Struct):
    """One pool that scales, or whose groups are not all gone yet."""

    next_at: InstantNs | None
    """Of the next decision; None: it scales no more."""
    groups: dict[ReplicaName, Group] = {}
    made: int = 0
    """Groups asked for in this epoch."""
    risen: int = 0
    """Starts that ended ready."""
    failed: int = 0
    offers: Offers = field(default_factory=Offers)
    """First tries."""
    repeats: Offers = field(default_factory=Offers)
    usual_prefill_ns: int = 0
    """Of a usual urgent prompt."""
    over: int = 0
    """Urgent requests that were over since the last tick, refused ones included."""
    met: int = 0
    windows: list[Counted] = []
    """Of the last ticks, the oldest first."""
    history: History = field(default_factory=History)
    memory: ScaleMemory = ScaleMemory()


class ScaledPool(Struct, frozen=True):
    """What the configuration of a pool that scales comes to; computed once."""

    name: PoolName
    model: ModelName
    settings: Scaling
    gpus: int
    """Of a whole group."""
    stages: Stages
    """Of a start."""
    waking: Stages
    """Of a standby group."""
    times: StageTimes
    ready: Ahead
    """How long a start takes."""
    wake: Ahead
    each_micro: int
    """Work rate of a group: of the envelope that fits, of the lowest of its kind, or declared."""
    origin: Origin
    """Which of these."""

    @classmethod
    def of(cls, config: PlaneConfig, spec: PoolSpec) -> "ScaledPool":
        """Return a pool's; it must scale."""
        settings, hardware = spec.scaling, spec.profile.hardware
        assert settings is not None, f"{spec.name} does not scale"
        stages, waking = settings.stages(hardware), settings.waking(hardware)
        known = reading(config, spec)
        return cls(
            name=PoolName(spec.name),
            model=ModelName(spec.model),
            settings=settings,
            gpus=settings.group_shape(hardware).gpus,
            stages=stages,
            waking=waking,
            times=settings.times or shipped(hardware),
            ready=ready_time(stages),
            wake=ready_time(waking),
            each_micro=ppm(known.work_rate),
            origin=known.origin,
        )

    @property
    def envelope_micro(self) -> int | None:
        """C of an envelope of just what runs, if one was measured."""
        return self.each_micro if self.origin is Origin.MEASURED else None

    @property
    def lowest_micro(self) -> int | None:
        """The lowest envelope of its kind, where none fits."""
        return self.each_micro if self.origin is Origin.LOWEST else None

    @property
    def tick_ns(self) -> DurationNs:
        """Period of decisions."""
        return seconds(self.settings.tick_s)

    def start_of(self, group: Group) -> Stages:
        """Return the stages that a group goes through."""
        return self.waking if group.woken else self.stages
