"""What does it bring to give everybody less, instead of all to some and nothing to the rest (DEG-1)?

Half as much again as an engine can do, with two fifths of each prompt marked as optional and answers that
may be cut to half: once with tenants that agreed to it, once with the same trace and tenants that did not.
Served is who was let in at level 2 or above, over all that were offered; who met the bounds stands beside it.
Then the same load as a stretch between two of seven tenths: how soon all is as asked again, and how often the
level changed on the way.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from statistics import fmean
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.cells import ours, under
from benchmarks.harness import Claim, at_least, at_most, interval95
from benchmarks.mixes import TENANT, Load
from benchmarks.scenes import CHAT as CLASS
from headrace.model.effect import Concluded
from headrace.model.evidence import DecisionRecord, EntryRecord
from headrace.model.ladder import LadderSpec
from headrace.policy.admission.gates import Length
from headrace.policy.catalog import PlaneConfig
from headrace.trace.generate import generate
from headrace.trace.mix import Arrivals, Mix, OptionalParts, Poisson, Ramp, Segment, TenantSource
from headrace.trace.row import TraceRow
from headrace.units import NS_PER_S

TIMES, BELOW = 1.5, 0.7
"""Loads over capacity: of the overload, and of what comes before and after it."""
LOWEST = 2
CALM_S, LONG_S = 100.0, 200.0
"""How long each lasts where one follows the other."""
CLAIMED = "conv"
OPTIONAL = OptionalParts(share=0.4, parts=4)
LADDER = LadderSpec(level=LOWEST, output_part=0.5, keep=0)


class Served(Struct, frozen=True, kw_only=True):
    """What became of the requests of a span, each figure over all that were offered."""

    offered: int
    served: float
    """Let in, at level 2 or above."""
    met: float
    by_level: dict[int, float]
    intact: float
    """Of the answered, those whose prompt had all that is not optional, and of that the first parts."""


class Course(Struct, frozen=True, kw_only=True):
    """How a class went down its ladder and came back."""

    down_s: float | None
    """From when more came in until it was first not as asked; None: it never was."""
    back_s: float | None
    """From when less came in until it was as asked; None: it was not by the end."""
    changes: int
    served: float
    """Let in, of all that were offered from first to last."""


def deployment(consent: bool) -> PlaneConfig:
    """Return the configuration of all cells with a ladder, and a tenant that agreed to it or not."""
    base = ours(Length.FAIR)
    return replace(
        base,
        classes=tuple(
            replace(one, degrade=LADDER) if one.name == CLASS else one for one in base.classes
        ),
        tenants=tuple(replace(one, degrade=LOWEST if consent else 0) for one in base.tenants),
    )


def offered(load: Load, arrivals: Arrivals, seconds: float, seed: int) -> list[TraceRow]:
    """Return requests of a mix, part of each prompt optional."""
    source = TenantSource(
        tenant=TENANT, slo_class=CLASS, arrivals=arrivals, lengths=load.lengths, optional=OPTIONAL
    )
    return generate(Mix(sources=(source,), duration_s=seconds), seed)


def beside(load: Load, rate: float, seed: int) -> tuple[Served, Served]:
    """Return what became of one overload with consent, and without."""
    rows = offered(load, Poisson(TIMES * rate), load.warm_s + load.span_s, seed)
    found = [
        served(load, rows, under(deployment(consent), rows, seed).rows) for consent in (True, False)
    ]
    return found[0], found[1]


def served(load: Load, rows: Sequence[TraceRow], ended: Iterable[Concluded]) -> Served:
    """Return what became of the requests that came after the warm-up."""
    counted = [row for row in ended if row.entry.arrived_at >= load.warm_s * NS_PER_S]
    let_in = [row for row in counted if row.admitted and row.level <= LOWEST]
    answered = [row for row in let_in if row.usage is not None]
    whole = max(1, len(counted))
    return Served(
        offered=len(counted),
        served=len(let_in) / whole,
        met=sum(row.met for row in let_in) / whole,
        by_level={
            level: sum(row.level == level for row in let_in) / whole for level in range(LOWEST + 1)
        },
        intact=sum(is_intact(rows[row.request - 1], row) for row in answered)
        / max(1, len(answered)),
    )


def is_intact(row: TraceRow, ended: Concluded) -> bool:
    """Return whether the engine was sent all that is not optional, and the most useful parts first."""
    assert ended.usage is not None, "it was answered"
    optional = row.optional
    fixed = row.input_tokens - sum(optional)
    return ended.usage.input_tokens in {
        fixed + sum(optional[:kept]) for kept in range(len(optional) + 1)
    }


def course(load: Load, rate: float, seed: int) -> Course:
    """Return how a class fares through a stretch of overload."""
    calm = max(CALM_S, load.warm_s)
    until = (calm, calm + LONG_S, 2 * calm + LONG_S)
    rates = (BELOW * rate, TIMES * rate, BELOW * rate)
    ramp = Ramp(tuple(Segment(at, each) for at, each in zip(until, rates, strict=True)))
    rows = offered(load, ramp, until[-1], seed)
    seen = Levels()
    ended = under(deployment(True), rows, seed, decisions=seen).rows
    return seen.course(until[0], until[1], fmean(row.admitted for row in ended))


class Levels:
    """Looks on at decisions and keeps when the level changed."""

    def __init__(self) -> None:
        self.moves: list[tuple[float, int]] = [(0.0, 0)]

    def __call__(self, record: DecisionRecord) -> None:
        """Note the level of its class, if it is another."""
        if isinstance(record, EntryRecord) and record.ladder is not None:
            level = record.ladder.base
            if level != self.moves[-1][1]:
                self.moves.append((record.at / NS_PER_S, level))

    def course(self, begun: float, over: float, let_in: float) -> Course:
        """Return how it went, for an overload between two instants."""
        down = next((at for at, level in self.moves if level and at >= begun), None)
        after = [level for at, level in self.moves if at <= over][-1]
        back = next((at for at, level in self.moves if not level and at > over), None)
        if not after:
            back = over
        return Course(
            down_s=None if down is None else down - begun,
            back_s=None if back is None else back - over,
            changes=len(self.moves) - 1,
            served=let_in,
        )


def measured(
    known: Mapping[str, Load], rates: Mapping[str, float], seeds: Sequence[int]
) -> tuple[list[Claim], dict[str, Any]]:
    """Measure every mix; what is claimed is claimed of the conversations."""
    detail: dict[str, Any] = {
        "load": f"{TIMES:g}x capacity, between {BELOW:g}x",
        "optional": OPTIONAL.share,
        "output": LADDER.output_part,
    }
    claims: list[Claim] = []
    for name, load in known.items():
        pairs = [beside(load, rates[name], seed) for seed in seeds]
        courses = [course(load, rates[name], seed) for seed in seeds]
        detail[name] = {
            "with_consent": shown([one for one, _ in pairs]),
            "without": shown([other for _, other in pairs]),
            "more_served": interval95([a.served - b.served for a, b in pairs])._asdict(),
            "course": courses,
        }
        if name == CLAIMED:
            claims = claimed(pairs, courses)
    return claims, detail


def claimed(pairs: Sequence[tuple[Served, Served]], courses: Sequence[Course]) -> list[Claim]:
    """Return what is claimed, of the mean over seeds or of the worst."""
    more = fmean(100 * (one.served - other.served) for one, other in pairs)
    met = fmean(one.met for one, _ in pairs)
    back = max(one.back_s if one.back_s is not None else inf for one in courses)
    return [
        at_least(
            "degraded: served at level <= 2, of offered",
            fmean(one.served for one, _ in pairs),
            0.97,
        ),
        at_least("degraded: met their bounds, of offered", met, 0.95),
        at_least("degraded: served, in points above no consent", more, 12.0),
        at_least("degraded: protected parts intact", min(one.intact for one, _ in pairs), 1.0),
        at_most("degraded: seconds until all is as asked again, worst", back, 60.0),
        at_most(
            "degraded: level changes through one overload, worst",
            max(one.changes for one in courses),
            8,
        ),
    ]


def shown(each: Sequence[Served]) -> dict[str, Any]:
    """Return figures over seeds with their denominators."""
    return {
        "offered": [one.offered for one in each],
        "served": interval95([one.served for one in each])._asdict(),
        "met": interval95([one.met for one in each])._asdict(),
        "by_level": {
            level: fmean(one.by_level[level] for one in each) for level in range(LOWEST + 1)
        },
        "intact": min(one.intact for one in each),
    }
