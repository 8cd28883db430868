"""How much does one replica carry at its SLO? Measured open-loop, never taken from a formula (DEM-2).

First come first served without gates, Poisson arrivals of one mix at one rate after another, on one pool
alone. *Capacity* is the highest rate at which each class still holds its promise for the asked share of
all that is offered, by bisection on the mean of the seeds; each seed's own says how sure it is.
"""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from headrace import __version__
from headrace.model.deployment import ClassSpec, PoolSpec
from headrace.model.envelope import DECLARED_RATE, Envelope, Fingerprint
from headrace.model.hardware import hardware_of
from headrace.model.ids import ClassName
from headrace.model.profile import Profile
from headrace.policy.batching import Batching
from headrace.policy.envelopes import fingerprint
from headrace.replica.rules import NO_RULES, Rules
from headrace.report.capacity import Measured, Point
from headrace.report.run import RunRecord
from headrace.report.stats import interval
from headrace.sim.experiment import simulate, without_control
from headrace.sim.knee import NoKneeError, knee
from headrace.sim.scenario import Scenario
from headrace.sim.traffic import Traffic
from headrace.trace.row import TraceRow
from headrace.units import NS_PER_S, seconds, to_ms

KEPT = 0.9
"""The share of the offered that is to hold, unless told: what capacity means in every benchmark."""
SEEDS_MIN = 2
"""Fewer have no interval."""
PRECISION = 0.01
_SAMPLE = 1_000
"""Requests by which lengths are judged beforehand."""
_WARM_S, _WARM_MAX_S = 20.0, 600.0
_SPAN_S = 100.0
_COUNTED = 1_000
"""Requests of which a share is told, where they come within `_SPAN_MAX_S`."""
_SPAN_MAX_S = 3_600.0
_PATIENT = 20
"""Who waits for a part of the span above one in so many is taken to wait without end, whatever its class
bears: a queue that grows through the whole span is no capacity."""
_FIRST_MAX_S = 30.0
"""Classes that bear more for their first token do not make the span longer."""
_LEAST = 1e-3
"""An interval's lower end is at least this part of the mean: fewer seeds than noise would need."""


class CapacityError(ValueError):
    """There is nothing to measure, or no rate at which it would hold."""


class Question(Struct, frozen=True, kw_only=True):
    """What is to hold, and how closely it is looked at."""

    attainment: float | None = KEPT
    """Share of the offered; None: each class's own `target`."""
    seeds: tuple[int, ...] = (0, 1, 2)
    precision: float = PRECISION
    """How far above the rate that was found one is that did not hold, at most, as a share."""
    warm_s: float | None = None
    """How long is offered before what comes of it counts. None: twice as long as a mean answer takes."""
    span_s: float | None = None
    """And how long while it does. None: half as long again, 100 s at least."""
    part: float = 1.0
    """What part of those times is enough, where they are not told."""
    replicas: int = 1
    """How many share what is offered."""

    def wanted(self, spec: ClassSpec) -> float:
        """Return the share that a class is to hold."""
        return spec.target if self.attainment is None else self.attainment


class Trial(NamedTuple):
    """What one seed at one rate came to."""

    work_rate: float
    met_work_rate: float
    met: dict[ClassName, float]
    """By class, met over offered."""


def measure(  # noqa: PLR0913 - what is measured, and how
    scenario: Scenario,
    pool: PoolSpec,
    traffic: Traffic,
    question: Question,
    *,
    now_s: int,
    rules: Rules = NO_RULES,
    note: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Return what one replica of a pool carries of a traffic; `now_s`: when this is, since 1970.

    `rules`: whom the replicas let in, for engines with rules of their own. Raises CapacityError where
    requests of these lengths cannot hold even alone, or hold at any rate.
    """
    bench = Bench(scenario, pool, traffic, question, rules)
    bench.judge_alone()
    try:
        found = knee(partial(bench.holds, note=note), bench.guess, question.precision)
        owns = [bench.own_knee(seed) for seed in question.seeds]
    except NoKneeError as error:
        raise CapacityError(str(error)) from error
    spread = interval(owns)
    best = bench.point(found)
    replicas = question.replicas
    low = max(_LEAST * best.work_rate, min(spread.low, best.work_rate))
    envelope = Envelope(
        fingerprint=bench.fingerprint(),
        work_rate=_told(best.work_rate / replicas),
        low=_told(low / replicas),
        high=_told(max(spread.high, best.work_rate) / replicas),
        request_rate=_told(found / replicas),
        attainment={name: bench.wanted[ClassName(name)] for name in best.attained},
        seeds=question.seeds,
        measured_at_s=now_s,
    )
    return Measured(
        pool=pool.name,
        replicas=replicas,
        gpus=hardware_of(pool.profile.hardware).gpus,
        warm_s=bench.warm_s,
        span_s=bench.span_s,
        patience_s=bench.patience_s,
        precision=question.precision,
        envelope=envelope,
        points=tuple(bench.points[rate] for rate in sorted(bench.points)),
    )


class Bench:
    """One pool under one traffic: runs each rate and seed once, and remembers what came of it."""

    def __init__(
        self, scenario: Scenario, pool: PoolSpec, traffic: Traffic, question: Question, rules: Rules
    ) -> None:
        """Take the pool out of its deployment, and everything off that is in the way of what is offered."""
        self.pool = scenario.deployment.window.stepped(pool)
        self.scenario = bare(scenario, pool, question.replicas)
        self.traffic, self.question, self.rules = traffic, question, rules
        self.wanted = {
            ClassName(spec.name): question.wanted(spec) for spec in self.scenario.deployment.classes
        }
        self.sample = traffic.sample(_SAMPLE)
        if not self.sample:
            raise CapacityError("nothing is offered to it")
        self.warm_s, self.span_s = self._spans()
        self.patience_s = max(_SPAN_S, self.span_s) / _PATIENT
        self.trials: dict[tuple[float, int], Trial] = {}
        self.points: dict[float, Point] = {}

    def _spans(self) -> tuple[float, float]:
        step_s = self.pool.profile.reference_step_ns / NS_PER_S
        answer_s = fmean(row.output_tokens for row in self.sample) * step_s
        asked = self.question
        firsts = [one for one in self._firsts() if one <= _FIRST_MAX_S]
        warm_s = round(min(_WARM_MAX_S, max(_WARM_S, 2 * answer_s)) * asked.part)
        span_s = round(max(_SPAN_S, 1.5 * warm_s, *(_PATIENT * one for one in firsts)) * asked.part)
        return asked.warm_s or warm_s, asked.span_s or span_s

    def _firsts(self) -> list[float]:
        """Return the bounds on first tokens of the classes that are offered, in s."""
        offered = {row.slo_class for row in self.sample}
        specs = [one for one in self.scenario.deployment.classes if one.name in offered]
        return [one.ttft_ms / 1_000 for one in specs if one.ttft_ms is not None]

    @property
    def guess(self) -> float:
        """Requests a second at which all replicas work as much as one is taken to before it is measured."""
        works = [self.work_ns(row) for row in self.sample]
        return DECLARED_RATE * self.question.replicas * NS_PER_S / fmean(works)

    def work_ns(self, row: TraceRow) -> int:
        """Return the work of a request's true length as if nothing were cached."""
        return self.pool.profile.work_ns(row.input_tokens, 0, row.output_tokens)

    def fingerprint(self) -> Fingerprint:
        """Return what is measured here."""
        mark = fingerprint(self.scenario.deployment, self.pool)
        offered = {row.slo_class for row in self.sample}
        return replace(
            mark,
            engine=f"emulated {__version__}",
            scheduler=_scheduler(self.scenario.batching),
            mix=self.traffic.name,
            mix_digest=self.traffic.digest,
            promises={name: one for name, one in mark.promises.items() if name in offered},
        )

    def counted_s(self, rate: float) -> float:
        """Return how long a rate is offered while it counts: longer where few would come, unless told."""
        if self.question.span_s is not None:
            return self.span_s
        return max(self.span_s, min(_SPAN_MAX_S, _COUNTED * self.question.part / rate))

    def trial(self, rate: float, seed: int) -> Trial:
        """Return what comes of a rate under a seed."""
        found = self.trials.get((rate, seed))
        if found is None:
            span_s = self.counted_s(rate)
            rows = self.traffic.rows(rate, self.warm_s + span_s, seed)
            run = simulate(self.scenario, seed, rows, rules=self.rules)
            found = self.trials[rate, seed] = self._came(run, span_s)
        return found

    def _came(self, run: RunRecord, span_s: float) -> Trial:
        """Sum up the requests that arrived after the warm-up.

        Who waited too long for that time to tell whether the wait would ever end has not met.
        """
        patience_ns = seconds(self.patience_s)
        good = {
            row.request
            for row in run.rows
            if row.met and row.indicators is not None and row.indicators.ttft_ns <= patience_ns
        }
        counted = [one for one in run.offered if one.at >= seconds(self.warm_s)]
        met: dict[ClassName, list[bool]] = {}
        for one in counted:
            met.setdefault(one.slo_class, []).append(one.request in good)
        span_ns = span_s * NS_PER_S
        return Trial(
            work_rate=sum(one.work_ns for one in counted) / span_ns,
            met_work_rate=sum(one.work_ns for one in counted if one.request in good) / span_ns,
            met={name: fmean(held) for name, held in sorted(met.items())},
        )

    def point(self, rate: float) -> Point:
        """Return what comes of a rate, as the mean of the seeds."""
        trials = [self.trial(rate, seed) for seed in self.question.seeds]
        names = sorted({name for trial in trials for name in trial.met})
        attained: dict[str, float] = {
            name: fmean(trial.met[name] for trial in trials if name in trial.met) for name in names
        }
        binding = min(names, key=lambda name: attained[name] - self.wanted[name], default="")
        return self.points.setdefault(
            rate,
            Point(
                rate=rate,
                work_rate=fmean(trial.work_rate for trial in trials),
                met_work_rate=fmean(trial.met_work_rate for trial in trials),
                attained=attained,
                binding=binding,
                by_seed=tuple(trial.met.get(ClassName(binding), 0.0) for trial in trials),
                holds=all(attained[name] >= self.wanted[name] for name in names)
                if names
                else False,
            ),
        )

    def holds(self, rate: float, note: Callable[[str], None]) -> bool:
        """Return whether a rate holds, as the mean of the seeds."""
        found = self.point(rate)
        share = found.attained.get(found.binding, 0.0)
        note(f"{self.traffic.name} at {rate:.4g} requests/s: {100 * share:.1f} % met")
        return found.holds

    def own_knee(self, seed: int) -> float:
        """Return the work rate that still holds under one seed alone."""

        def holds(rate: float) -> bool:
            met = self.trial(rate, seed).met
            return bool(met) and all(share >= self.wanted[name] for name, share in met.items())

        return self.trial(knee(holds, self.guess, self.question.precision), seed).work_rate

    def judge_alone(self) -> None:
        """Refuse lengths of which too many miss their promise on a replica that has nothing else to do."""
        for spec in self.scenario.deployment.classes:
            mine = [row for row in self.sample if row.slo_class == spec.name]
            wanted = self.wanted[ClassName(spec.name)]
            why = alone(self.pool.profile, spec, mine, wanted)
            if why is not None:
                raise CapacityError(why)


def alone(profile: Profile, spec: ClassSpec, rows: Sequence[TraceRow], wanted: float) -> str | None:
    """Return why too few requests would meet their bounds with a replica to themselves; None: enough do."""
    if not rows:
        return None
    bounds, budget = spec.bounds(None, None), profile.token_budget
    missed = {"room": 0, "first": 0, "each": 0}
    steps, ttfts = [], []
    for row in rows:
        context = row.input_tokens + row.output_tokens // 2
        ttfts.append(profile.prefill_ns(row.input_tokens, 0, 0, 0, budget))
        steps.append(profile.decode_step_ns(1, context))
        missed["room"] += row.input_tokens + row.output_tokens > profile.kv_capacity_tokens
        missed["first"] += bounds.ttft_ns is not None and ttfts[-1] > bounds.ttft_ns
        missed["each"] += row.output_tokens > 1 and steps[-1] > bounds.tpot_ns
    most = max(missed, key=lambda name: missed[name])
    share = missed[most] / len(rows)
    if 1 - share >= wanted:
        return None
    ttft_ms = "" if bounds.ttft_ns is None else f"{to_ms(bounds.ttft_ns):g}"
    said = {
        "room": f"need more than its KV pool of {profile.kv_capacity_tokens:,} tokens",
        "first": f"take {to_ms(round(fmean(ttfts))):,.0f} ms on average to the first token, of {ttft_ms}",
        "each": f"take {to_ms(round(fmean(steps))):.1f} ms a token, of {to_ms(bounds.tpot_ns):g}",
    }
    return f"{100 * share:.0f} % {said[most]}, even alone"


def bare(scenario: Scenario, pool: PoolSpec, replicas: int) -> Scenario:
    """Return the scenario with so many replicas of one pool alone, first come first served without gates.

    Nothing fails, nobody has a limit of his own, and who has waited too long is served all the same.
    """
    declared = scenario.deployment
    deployment = replace(
        declared,
        pools=(replace(pool, replicas=replicas),),
        models=tuple(one for one in declared.models if one.name == pool.model),
        tenants=tuple(
            replace(
                one,
                models=(),
                tpm_limit=None,
                rpm_limit=None,
                max_parallel_requests=None,
                max_parallel_sessions=None,
                budgets=(),
                degrade=0,
            )
            for one in declared.tenants
        ),
        classes=tuple(replace(one, expire=False) for one in declared.classes),
    )
    return without_control(replace(scenario, deployment=deployment, faults=(), drain_s=600.0))


def _scheduler(batching: Batching) -> str:
    tag = batching.__struct_config__.tag
    assert isinstance(tag, str)
    return tag


def _told(value: float) -> float:
    """Return a figure as it is written: six digits, so that equal runs give equal bytes."""
    return float(f"{value:.6g}")
