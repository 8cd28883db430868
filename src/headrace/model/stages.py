"""How long until a group that comes up is ready, and how sure is that?

SCALE-4: a start goes through seven stages. Each has its time as a distribution, by hardware and by what was
made ready beforehand; what the whole takes beyond them is `unattributed`. Nothing is drawn here: who
emulates a start brings the chances with it.
"""

from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import Annotated

from msgspec import Meta, Struct

from headrace.units import MICRO, DurationNs, ceil_div, seconds

_Seconds = Annotated[float, Meta(ge=0, le=86_400)]
POINTS = 20
"""Equally likely values that stand for a distribution: p50 and p90 are the 10th and the 18th of them."""
_P50, _P90, _P99 = MICRO // 2, MICRO * 9 // 10, MICRO * 99 // 100


class Stage(StrEnum):
    """What a group has to go through, in order. Also a metric label: a closed list."""

    PROVISION = "provision"
    """A node and its driver."""
    IMAGE = "image"
    """The container, and the engine's own start."""
    WEIGHTS = "weights"
    """Loaded, sharded, in the layout of their quantization."""
    RANKS = "ranks"
    """Communicators between all of them."""
    COMPILE = "compile"
    """Kernels compiled, graphs captured."""
    WARM = "warm"
    """Dummy prefill and decode."""
    REGISTER = "register"
    """A correct token was made, and the gateway knows."""


UNATTRIBUTED = "unattributed"
"""What the whole took beyond its stages, as it is shown beside them."""


class Spread(Struct, frozen=True, forbid_unknown_fields=True):
    """A time as a distribution, in seconds: half of all are below `p50_s`, nine of ten below `p90_s`.

    The tail has the shape of 7,531 model loads of a public fleet (p50 22.7, p90 42, p99 51.9, longest
    79.4 s): with d = p90 - p50, p99 lies d/2 and the longest 2d beyond p90; the shortest d below p50.
    """

    p50_s: _Seconds = 0.0
    p90_s: _Seconds = 0.0

    def __post_init__(self) -> None:
        """Refuse quantiles that fall."""
        if self.p90_s < self.p50_s:
            raise ValueError(f"p90_s {self.p90_s:g} is below p50_s {self.p50_s:g}")

    def knots(self) -> tuple[tuple[int, int], ...]:
        """Return (chance in millionths, ns): between them the time rises along lines."""
        mid, high = seconds(self.p50_s), seconds(self.p90_s)
        wide = high - mid
        low = max(0, mid - wide)
        return (
            (0, low), (_P50, mid), (_P90, high), (_P99, high + wide // 2), (MICRO, high + 2 * wide)
        )  # fmt: skip

    def at(self, chance: int) -> DurationNs:
        """Return the time that `chance` millionths of all stay below; a draw, if the chance is one."""
        knots = self.knots()
        for (left, low), (right, high) in pairwise(knots):
            if chance <= right:
                return DurationNs(low + (high - low) * (chance - left) // (right - left))
        return DurationNs(knots[-1][1])

    def chance(self, spent_ns: int) -> int:
        """Return how many millionths are over by then."""
        knots = self.knots()
        if spent_ns < knots[0][1]:
            return 0
        for (left, low), (right, high) in pairwise(knots):
            if spent_ns < high:
                return left + (right - left) * (spent_ns - low) // (high - low)
        return MICRO


class StartOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was made ready before a group was asked for (SCALE-5)."""

    node_held: bool = True
    """Whether its nodes are there, driver and all. True: a fleet of fixed size."""
    preloaded: bool = False
    """Whether the weights lie in the node's memory, or another group's ranks hand them over."""
    local_cache: bool = False
    """Whether the checkpoint lies on the node's own disk, in a layout made for loading."""
    compile_cache: bool = True
    """Whether compiled kernels were kept from an earlier start of the same engine, model and GPU."""


class StageTimes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long each stage takes on one kind of hardware, with and without what shortens it.

    Defaults are measured where a measurement is public: vLLM 0.10 on an A100 (11 models of up to 14B, mean of
    five starts each; without compile cache, one start each). The others say so.
    """

    provision: Spread = Spread(120.0, 300.0)
    """Without a held node. Minutes, which nobody measured in public."""
    node_held: Spread = Spread(1.0, 5.0)
    """With one: placing alone. Assumed."""
    image: Spread = Spread(10.2, 10.6)
    """The engine's own start, with its image on the node."""
    weights: Spread = Spread(7.6, 15.0)
    """From a shared store or a plain disk. 7.6 to 15: 7B to 14B."""
    local_cache: Spread = Spread(0.7, 3.2)
    """From the node's own disk by a loader made for it: 8B and 32B, H100 with NVMe of 29 GB/s."""
    preloaded: Spread = Spread(0.7, 1.3)
    """From memory: 32B cached, H100; 16 GB over 100 Gb/s of RDMA take 1.3 as well."""
    ranks: Spread = Spread(2.0, 5.0)
    """Communicators. Assumed: nobody published them apart."""
    compile: Spread = Spread(67.0, 87.0)
    """Compiling and capturing, nothing cached."""
    compile_cache: Spread = Spread(9.7, 13.0)
    """The same with kernels cached: they are loaded, graphs are captured again."""
    warm: Spread = Spread(2.6, 5.0)
    """The dummy run that sizes the KV pool."""
    register: Spread = Spread(1.0, 2.0)
    """A look of the gateway's each second, and a token."""
    wake: Spread = Spread(3.0, 6.0)
    """In place of all but `register` for a standby group: large models woken from sleep of level 1."""
    unattributed: Spread = Spread(15.4, 18.3)
    """What those starts took beyond their stages."""
    success: Annotated[float, Meta(gt=0, le=1)] = 0.95
    """Share of starts that end ready, until starts were counted. .95: assumed; one that fails is asked
    for again."""

    def stages(self, options: StartOptions) -> tuple[tuple[str, Spread], ...]:
        """Return the time of each stage of a cold start, in order.

        What no stage explains is over when a group registers, and stands before that.
        """
        weights = self.local_cache if options.local_cache else self.weights
        return (
            (Stage.PROVISION, self.node_held if options.node_held else self.provision),
            (Stage.IMAGE, self.image),
            (Stage.WEIGHTS, self.preloaded if options.preloaded else weights),
            (Stage.RANKS, self.ranks),
            (Stage.COMPILE, self.compile_cache if options.compile_cache else self.compile),
            (Stage.WARM, self.warm),
            (UNATTRIBUTED, self.unattributed),
            (Stage.REGISTER, self.register),
        )

    def waking(self) -> tuple[tuple[str, Spread], ...]:
        """Return the same for a standby group that is woken."""
        return ((Stage.WARM, self.wake), (Stage.REGISTER, self.register))


Stages = tuple[tuple[str, Spread], ...]
"""What is left of a start, by stage in order."""

SHIPPED: dict[str, StageTimes] = {
    "A100": StageTimes(),
    "A10G": StageTimes(weights=Spread(14.3, 48.0)),
    "H100": StageTimes(weights=Spread(4.4, 20.6)),
}
"""By the first word of a profile's `hardware`. A10G: 8B from a gp3 volume by streamer and by safetensors;
H100: 8B and 32B by safetensors from NVMe. What is not measured there is as on the A100."""


def shipped(hardware: str) -> StageTimes:
    """Return the times that ship for a profile's hardware; those of the A100 where nobody measured."""
    return SHIPPED.get(hardware.partition(" ")[0], StageTimes())


class Ahead(Struct, frozen=True, gc=False):
    """The time that is left, in ns."""

    p50_ns: DurationNs
    p90_ns: DurationNs


def ready_time(stages: Stages) -> Ahead:
    """Return the whole time of a start that has not begun."""
    return _quantiles(_points(stages))


def remaining(stages: Stages, present: str, spent_ns: int) -> Ahead:
    """Return what is left for a group that has been in its `present` stage for a while.

    The stage is known not to have ended yet, which shifts what is expected of it: one that was to take
    10 s and has taken 15 may take long. Beyond its longest time it is taken to last as long again as
    it is overdue. Raises `ValueError` for a stage that the start does not go through.
    """
    names = [name for name, _ in stages]
    if present not in names:
        raise ValueError(f"{present} is none of {', '.join(names)}")
    at = names.index(present)
    return _quantiles(_added(_rest(stages[at][1], spent_ns), _points(stages[at + 1 :])))


def unattributed(whole_ns: int, taken: Mapping[str, int]) -> int:
    """Return what a start took beyond its stages, in ns: they and the rest sum to the whole."""
    return whole_ns - sum(taken[stage] for stage in Stage if stage in taken)


def success_ppm(times: StageTimes, ended_ready: int, failed: int) -> int:
    """Return the chance that a start ends ready, in millionths.

    The declared share counts as 20 starts that were seen; real ones soon outweigh them.
    """
    declared = round(times.success * MICRO)
    return (20 * declared + ended_ready * MICRO) // (20 + ended_ready + failed)


_Points = tuple[int, ...]


@lru_cache(maxsize=256)
def _points(stages: Stages) -> _Points:
    """Return the sum of independent stages as equally likely values, in rising order."""
    total: _Points = (0,) * POINTS
    for _, spread in stages:
        total = _added(total, _rest(spread, 0))
    return total


def _rest(spread: Spread, spent_ns: int) -> _Points:
    """Return what is left of one stage that has taken `spent_ns`."""
    over = spread.chance(spent_ns)
    if over >= MICRO:
        late = spent_ns - spread.knots()[-1][1]
        return (late,) * POINTS
    left = MICRO - over
    return tuple(
        max(0, spread.at(over + left * (2 * i + 1) // (2 * POINTS)) - spent_ns)
        for i in range(POINTS)
    )


def _added(one: _Points, other: _Points) -> _Points:
    """Return the sum of two: all pairs, and of each POINTS of them in order the mean."""
    pairs = sorted(a + b for a in one for b in other)
    return tuple(ceil_div(sum(pairs[i : i + POINTS]), POINTS) for i in range(0, len(pairs), POINTS))


def _quantiles(points: _Points) -> Ahead:
    """Return p50 and p90: between the 10th and 11th, and between the 18th and 19th value."""
    middle, high = POINTS // 2, POINTS * 9 // 10
    p50 = (points[middle - 1] + points[middle]) // 2
    return Ahead(DurationNs(p50), DurationNs((points[high - 1] + points[high]) // 2))
