"""A decision in rows, for whoever asks why: what each signal said, what held, what is done."""

from collections.abc import Iterator

from msgspec import Struct

from headrace.model.scaling import Brake, Reading, ScaleDecision, Standing
from headrace.model.scaling_spec import Scaling
from headrace.units import MICRO, to_seconds

BRAKES = {
    Brake.OFF: "the scaler is switched off (`mode: off`)",
    Brake.ADVICE: "the scaler only advises (`mode: advise`)",
    Brake.FROZEN: "an operator froze the scale",
    Brake.STALE: "an engine has not told of itself lately: nothing is taken away",
    Brake.WINDOW: "more was needed, or added, within the stabilization window",
    Brake.RATE: "no more may change in one tick",
    Brake.YOUNG: "what could go has not served for `min_life_s`",
    Brake.MAXIMUM: "the pool is at its maximum",
    Brake.GPUS: "the pool's GPUs are all taken (`max_gpus`)",
    Brake.RESERVE: "there are too few failure domains for the reserve",
}
"""What each brake means, in words."""


class Row(Struct, frozen=True, kw_only=True):
    """One line of an explanation."""

    what: str
    """Signal, limit, brake or step."""
    groups: int | None
    """Groups it stands for; None: it is no number, or unknown."""
    why: str
    numbers: str = ""
    """What it went by, with units."""
    wins: bool = False


def explained(settings: Scaling, decision: ScaleDecision) -> tuple[Row, ...]:
    """Return a decision in rows: signals, limits, supply, brakes, steps, in the order they matter in."""
    return (
        *(_signal(reading, decision) for reading in decision.readings),
        *_limits(settings, decision),
        *_supply(decision),
        *(Row(what=brake, groups=None, why=BRAKES[brake]) for brake in decision.brakes),
        *_steps(decision),
    )


def _signal(reading: Reading, decision: ScaleDecision) -> Row:
    numbers = ", ".join(written(name, value) for name, value in reading.numbers)
    wins = reading.signal is decision.winner
    return Row(
        what=reading.signal, groups=reading.desired, why=reading.why, numbers=numbers, wins=wins
    )


def _limits(settings: Scaling, decision: ScaleDecision) -> Iterator[Row]:
    yield Row(what="need", groups=decision.need, why="the largest of the signals")
    if settings.reserve:
        why = f"left when {settings.reserve} of each {settings.reserve_domain} are lost"
        numbers = written("left_micro", decision.supply.left_micro)
        yield Row(what="reserve", groups=decision.reserve, why=why, numbers=numbers)
    won = decision.winner is None
    yield Row(what="floor", groups=decision.floor, why="`min` and the schedules", wins=won)
    yield Row(what="ceiling", groups=decision.ceiling, why="`max` and `max_gpus`")
    yield Row(what="keep", groups=decision.keep, why="below this none would go")
    yield Row(what="desired", groups=decision.desired, why="after all limits")


def _supply(decision: ScaleDecision) -> Iterator[Row]:
    supply = decision.supply
    serving = written("now_micro", supply.now_micro)
    if supply.drain_ns is not None:
        serving += f", {written('drain_ns', supply.drain_ns)}"
    if supply.utilization_ppm is not None:
        serving += f", {written('utilization_ppm', supply.utilization_ppm)}"
    yield Row(what=Standing.READY, groups=supply.ready, why="serving", numbers=serving)
    yield Row(
        what=Standing.COMING, groups=supply.coming, why=f"{supply.counted} of them counted on",
        numbers=written("landing_micro", supply.landing_micro),
    )  # fmt: skip
    yield Row(what=Standing.STANDBY, groups=supply.standby, why="asleep")
    yield Row(what=Standing.DRAINING, groups=supply.draining, why="leaving")
    yield Row(what="gpus", groups=None, why=f"{supply.gpus_held} GPUs held, ready or not")


def _steps(decision: ScaleDecision) -> Iterator[Row]:
    steps = decision.steps
    for what, count in (("ask", steps.ask), ("ask_standby", steps.standby)):
        if count:
            yield Row(what=what, groups=count, why="new groups")
    for what, names in (
        ("recall", steps.recall), ("wake", steps.wake), ("cancel", steps.cancel),
        ("release", steps.release), ("drain", steps.drain),
    ):  # fmt: skip
        if names:
            yield Row(what=what, groups=len(names), why=", ".join(names))


def written(name: str, value: int) -> str:
    """Return a number of a reading with its unit, which its name ends with."""
    stem, _, unit = name.rpartition("_")
    match unit:
        case "micro":
            return f"{stem} {value / MICRO:.3g} s/s"
        case "ns":
            return f"{stem} {to_seconds(value):.3g} s"
        case "ppm":
            return f"{stem} {100 * value / MICRO:.3g} %"
        case _:
            return f"{name} {value}"
