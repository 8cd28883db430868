"""How a pool may grow and shrink: what an operator declares of it. Every default says why."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from headrace.model.group import Domain, GroupShape
from headrace.model.stages import Stages, StageTimes, StartOptions, shipped
from headrace.units import MICRO, NS_PER_S, DurationNs, MicroUsd, ceil_div, seconds

DAY_MINUTES = 24 * 60
WEEK_MINUTES = 7 * DAY_MINUTES
_HOUR_NS = 3_600 * NS_PER_S
_Groups = Annotated[int, Meta(ge=0, le=1_024)]
_Seconds = Annotated[float, Meta(ge=0, le=86_400)]
_Positive = Annotated[float, Meta(gt=0, le=86_400)]
_Part = Annotated[float, Meta(gt=0, le=1)]
_Place = Annotated[str, Meta(min_length=1, max_length=256)]
_Clock = Annotated[str, Meta(pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]$(?!\n)")]


class Day(StrEnum):
    """A day of the week."""

    MON = "mon"
    TUE = "tue"
    WED = "wed"
    THU = "thu"
    FRI = "fri"
    SAT = "sat"
    SUN = "sun"


class Schedule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Groups that are there at certain hours, whatever the load. They are asked for early enough."""

    start: _Clock
    """From when, such as `08:00`."""
    end: _Clock
    """Until when; not after `start`: of the next day."""
    groups: _Groups
    """The least that serve then."""
    days: Annotated[tuple[Day, ...], Meta(min_length=1, max_length=7)] = tuple(Day)
    """On which days it starts. All of them."""

    def holds(self, minute: int) -> bool:
        """Return whether it holds in a minute of the week, from Monday 0:00."""
        length = (_minutes(self.end) - _minutes(self.start) - 1) % DAY_MINUTES + 1
        return any((minute - begin) % WEEK_MINUTES < length for begin in self._begins())

    def begins_within(self, minute: int, minutes: int) -> bool:
        """Return whether it begins at most so many minutes after one."""
        return any((begin - minute) % WEEK_MINUTES <= minutes for begin in self._begins())

    def _begins(self) -> tuple[int, ...]:
        order, start = tuple(Day), _minutes(self.start)
        return tuple(order.index(day) * DAY_MINUTES + start for day in self.days)


def _minutes(clock: str) -> int:
    hours, _, minutes = clock.partition(":")
    return int(hours) * 60 + int(minutes)


class Mode(StrEnum):
    """Whether decisions are carried out."""

    ACT = "act"
    ADVISE = "advise"
    """They are made, logged and explained, and that is all."""
    OFF = "off"
    """The kill switch: the pool stays as it is."""


class Cover(StrEnum):
    """What bridges a burst until groups that it asked for are ready (SCALE-5)."""

    WARM = "warm"
    """`min` is enough for it."""
    ADMISSION = "admission"
    """What cannot be served in time is refused in time."""
    FALLBACK = "fallback"
    """A smaller model answers."""
    DEFER = "defer"
    """It waits in the durable queue."""


class By(StrEnum):
    """What says how many groups there are to be."""

    SLO = "slo"
    """What is promised, and the capacity that was measured to hold it."""
    UTILIZATION = "utilization"
    """The busy part of the groups, as horizontal autoscalers of GPUs go by it."""
    QUEUE = "queue"
    """Requests that wait, as autoscalers of engines go by their queues' lengths."""
    TOKENS = "tokens"
    """Tokens that are offered, reserved and waiting."""


class Targets(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a group is held to where another rule than `slo` is followed.

    The tokens' defaults are of a Llama-3 8B on an A100 80 GB. Another model or GPU has others, and nothing
    here works them out.
    """

    busy: _Part = 0.7
    """Busy part of its time. .7: what such rules are set to."""
    waiting: Annotated[float, Meta(gt=0, le=100_000)] = 5.0
    """Requests that wait. 5: what such rules are set to."""
    input_tps: Annotated[float, Meta(gt=0, le=10_000_000)] = 7_600.0
    """Prompt tokens a second. 7,600: four fifths of the 9,500 that one computes beside its decodes."""
    output_tps: Annotated[float, Meta(gt=0, le=10_000_000)] = 10_000.0
    """Answers' tokens a second, beside those of prompts."""
    kv_fill: _Part = 0.8
    """Reserved part of its KV pool."""
    backlog_tokens: Annotated[int, Meta(ge=1, le=1_000_000_000)] = 18_000
    """Prompt tokens that wait. 18,000: two seconds of prefill."""


class Forecasting(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How offered work is foreseen, and how far that is believed."""

    interval_s: Annotated[float, Meta(ge=1, le=3_600)] = 30.0
    """Offered work is counted by intervals of so long. 30: two ticks, and enough requests to count."""
    season_s: Annotated[float, Meta(ge=60, le=604_800)] = 86_400.0
    """After how long it repeats itself. 86,400: a day; a week takes 604,800 and seven times the memory."""
    error_limit: _Part = 0.5
    """Mean error from which on the forecast is not used at all; below, as much of the foreseen rise is as
    the error is smaller. .5: it was off by half."""
    rise_limit: Annotated[float, Meta(ge=1, le=100)] = 3.0
    """Most that a trend may foresee, as a multiple of what is offered now; what a season saw is no guess.
    3: more is a wild extrapolation."""

    @property
    def slots(self) -> int:
        """Intervals of a season."""
        return max(1, seconds(self.season_s) // seconds(self.interval_s))


class Scaling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one pool may grow and shrink."""

    mode: Mode = Mode.ACT
    by: By = By.SLO
    """The rule that says how many groups there are to be, floors and limits apart. slo: the others are there
    to be compared with it."""
    targets: Targets = Targets()
    """What the other rules hold a group to; `slo` does not look at it."""
    min: _Groups = 1
    """Groups that always serve: the warm floor. 1: at 0, a first request waits for a whole start."""
    max: Annotated[int, Meta(ge=1, le=1_024)] = 8
    """Most groups that serve or are on their way. 8: a bound must be there; money is yours."""
    max_gpus: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    """Most GPUs that the pool may hold, standby and partial groups included. None: as `max` has it."""
    floor: Annotated[tuple[Schedule, ...], Meta(max_length=64)] = ()
    """Hours with more groups than `min`."""
    utc_offset_min: Annotated[int, Meta(ge=-840, le=840)] = 0
    """Minutes by which the schedules' clock is ahead of UTC."""
    standby: _Groups = 0
    """Groups kept asleep beside those that serve: they hold their GPUs and wake in seconds. 0: they cost as
    much as warm ones where nothing else uses the GPUs."""
    reserve: Annotated[int, Meta(ge=0, le=16)] = 0
    """Failure domains whose loss at once must leave what is needed. 0: nothing is kept for it; 1 is N+1."""
    reserve_domain: Domain = Domain.NODE
    """What is lost then. node: the most common loss."""

    headroom: Annotated[float, Meta(ge=1, le=10)] = 1.1
    """s: capacity for each unit of offered work. 1.1: a tenth above what an envelope was measured to
    hold, for what chance adds within a tick."""
    target_drain_s: _Positive = 30.0
    """T_d: within how long what waits is to be worked off. 30: two ticks; shorter buys groups for a queue
    that is over when they come."""
    active_part: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Part of the work that runs which counts as queued. 0: it is being served, and was offered before."""
    retry_budget: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Most repeats that count, as a part of first tries. .1: more are a storm that capacity would feed."""

    wait_part: _Part = 0.8
    """Predicted wait, as a part of the tightest first-token bound, beyond which groups are asked for.
    .8: the rest is the prompt's own prefill."""
    slack_part: _Part = 0.2
    """Part of waiting requests with little slack beyond which groups are asked for. .2: a few are always
    late, a fifth is a trend."""
    slack_least: Annotated[int, Meta(ge=1)] = 5
    """Waiting requests from which on that part says anything."""
    kv_fill: _Part = 0.85
    """Part of the KV pools that may be held. .85: beyond, growth ends in preemption."""
    goodput_margin: Annotated[float, Meta(ge=0, le=1)] = 0.02
    """How far attainment over offered may fall below its target first. .02: the noise of 500 requests."""
    goodput_least: Annotated[int, Meta(ge=1)] = 50
    """Requests in the window from which on attainment says anything."""
    goodput_extra: _Groups = 2
    """Most groups that falling attainment asks for beyond every other signal. 2: if two do not help, what
    lacks is not capacity."""
    forecast: Forecasting | None = Forecasting()
    """None: nothing is foreseen."""

    tick_s: Annotated[float, Meta(ge=0.1, le=86_400)] = 15.0
    """Period of decisions. 15: a twentieth of the window; cheaper than a tick of cold start."""
    in_threshold: _Part = 0.9
    """Load, as a part of what groups are asked for at, below which they may go. .9: it has to rise by a
    ninth before they are asked for again."""
    in_window_s: _Seconds = 120.0
    """How long a group must not have been needed before it is drained. 120: its start cost about as much. With
    180, bursts ten minutes apart take a tenth more GPU time and leave no less unserved; the 300 of horizontal
    autoscalers more."""
    cancel_window_s: _Seconds = 60.0
    """The same for a group that is on its way. 60: it serves nobody yet, and asking again costs no more
    than its start."""
    out_groups: Annotated[int, Meta(ge=1, le=1_024)] = 4
    """Groups that one tick may add in any case."""
    out_part: Annotated[float, Meta(ge=0, le=10)] = 1.0
    """The same as a part of those that are there; the larger counts. 1: it may double."""
    in_groups: Annotated[int, Meta(ge=1, le=1_024)] = 1
    """Groups that one tick may drain in any case."""
    in_part: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """The same as a part of those that are there; the larger counts. .1: ten ticks for all."""
    min_life_s: _Seconds = 120.0
    """How long a group serves at least. 120: its start cost about as much."""
    stale_s: _Positive = 15.0
    """Age from which on what an engine said of itself is unknown: then nothing is taken away. 15: a tick."""
    warmup_s: _Seconds = 30.0
    """How long what a new group measures of itself is not believed. 30: its first steps are slow."""
    ail_part: _Part = 0.5
    """Part of its envelope that a group counts at which is told to run a slower kernel or slow collectives,
    until it is seen what it does. .5: about what either costs where it is measured."""
    partial_s: _Positive = 600.0
    """How long a group may lack ranks before all of it is given back. 600: longer than a node takes to
    come."""

    shape: GroupShape | None = None
    """Ranks of a group, and how they lie. None: as the profile's `hardware` ends, such as `x4`: tensor parallel
    on one node."""
    start: StartOptions = StartOptions()
    """What is made ready before a group is asked for."""
    times: StageTimes | None = None
    """How long the stages of a start take. None: as measured on hardware of the kind."""
    domains: Annotated[tuple[_Place, ...], Meta(max_length=1_024)] = ()
    """Failure domains of the kind of `reserve_domain` that groups may be placed in. Empty: each group stands
    in one of its own."""
    drain_s: _Seconds = 120.0
    """How long a group that goes may take for what runs there; then it ends with an error. 120: nine of ten
    answers are over by then; its GPUs cost as before."""

    migrate: bool = True
    """Whether what runs on a group that goes is moved to others of the pool that have room, where the engines can
    do so. True: it is gone in seconds instead of minutes, and nothing is cut off; each request stands still once."""

    gpu_hour_usd: Annotated[float, Meta(ge=0, le=10_000)] | None = None
    """Price of an hour of one GPU of the pool's hardware, in US dollars. None: not counted in money."""
    burst_horizon_s: _Positive | None = None
    """How long the bursts last that must be served from their beginning. None: none is declared. Shorter
    than a start needs a cover."""
    covers: tuple[Cover, ...] = ()
    """What bridges such bursts, beside schedules and standby groups."""

    def __post_init__(self) -> None:
        """Refuse limits that leave nothing between them."""
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        if self.by is By.UTILIZATION and self.min == 0:
            raise ValueError("by utilization, min 0 is for ever: no group, nothing busy")
        high = max((one.groups for one in self.floor), default=0)
        if high > self.max:
            raise ValueError(f"a schedule asks for {high} groups, above max {self.max}")

    def group_shape(self, hardware: str) -> GroupShape:
        """Return the shape of a group on hardware as a profile calls it."""
        if self.shape is not None:
            return self.shape
        count = hardware.rpartition(" x")[2]
        fits = count.isdecimal() and 1 <= int(count) <= GroupShape().ranks_per_node
        return GroupShape(tp=int(count)) if fits else GroupShape()

    def stages(self, hardware: str) -> Stages:
        """Return the time of each stage of a start on such hardware."""
        return (self.times or shipped(hardware)).stages(self.start)

    def waking(self, hardware: str) -> Stages:
        """Return the same for a standby group that is woken."""
        return (self.times or shipped(hardware)).waking()

    def floor_at(self, minute: int, ahead_ns: DurationNs) -> int:
        """Return the groups that must serve at any minute from now until a group asked for is ready.

        `minute` of the week in UTC.
        """
        local = (minute + self.utc_offset_min) % WEEK_MINUTES
        last = ceil_div(ahead_ns, 60 * NS_PER_S)
        hours = [
            one.groups for one in self.floor if one.holds(local) or one.begins_within(local, last)
        ]
        return max([self.min, *hours])

    def ceiling(self, gpus: int) -> int:
        """Return the most groups of so many GPUs each."""
        return self.max if self.max_gpus is None else min(self.max, self.max_gpus // gpus)

    def cost(self, gpu_ns: int) -> MicroUsd | None:
        """Return what so much GPU time costs, held for whatever reason; None: no price is declared."""
        if self.gpu_hour_usd is None:
            return None
        return MicroUsd(ceil_div(gpu_ns * round(self.gpu_hour_usd * MICRO), _HOUR_NS))

    def uncovered(self, ready_p90_ns: DurationNs, wake_p90_ns: DurationNs) -> bool:
        """Return whether declared bursts are over before a group is ready, and nothing bridges them."""
        if self.burst_horizon_s is None or seconds(self.burst_horizon_s) >= ready_p90_ns:
            return False
        awake = self.standby > 0 and wake_p90_ns <= seconds(self.burst_horizon_s)
        return not (awake or self.floor or self.covers)


def ppm(part: float) -> int:
    """Return a setting in whole millionths."""
    return round(part * MICRO)
