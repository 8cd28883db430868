"""`headrace capacity`: what does one replica carry at its SLO, or how many replicas does a rate take?"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter, validators

from headrace.cli.capacity_setup import Wanted, prices_of, profiles_of, traffic_of
from headrace.cli.errors import FAILED, OK, fail
from headrace.cli.out import show
from headrace.cli.simulate import trace_folders
from headrace.config.errors import ConfigError, Fault, Origin
from headrace.gateway.clock import wall
from headrace.model.price import GpuPrices
from headrace.report.capacity import Measured, render_measured, report
from headrace.report.sizing import FORMAT, SizingReport, ordered, render_sizing
from headrace.sim.capacity import KEPT, PRECISION, CapacityError, Question, measure
from headrace.sim.reading import load_scenario
from headrace.sim.sizing import Ask, size
from headrace.sim.traffic import named, own
from headrace.trace.builtin import MIXES

_NAMES = ", ".join(MIXES)
_QUICK = 1 / 3
_HALF = 1 / 2
_ROUGH = 0.03
"""Of a fleet, where one replica more or less is what is asked."""
_Above = validators.Number(gt=0)

File = Annotated[Path | None, Parameter(help="Scenario, YAML or JSON.")]
MixNames = Annotated[
    tuple[str, ...],
    Parameter(
        name="--mix",
        negative=(),
        show_default=False,
        help=f"Lengths instead of the scenario's own, of {_NAMES}; may be given again.",
    ),
]
Pools = Annotated[
    tuple[str, ...],
    Parameter(
        name="--pool", negative=(), show_default=False, help="Only this pool [default: all]."
    ),
]
Attainment = Annotated[
    float,
    Parameter(
        validator=validators.Number(gt=0, lte=1),
        help="Share of all that is offered that must hold its bounds, in each class.",
    ),
]
Targets = Annotated[
    bool, Parameter(negative=(), help="Instead, each class's own `target` of the scenario.")
]
Seeds = Annotated[
    int, Parameter(validator=validators.Number(gte=3, lte=1_000), help="How many, from 0 on.")
]
Quick = Annotated[bool, Parameter(negative=(), help="A third of the time offered, to within 3 %.")]
_Seconds = validators.Number(gte=1, lte=86_400)
Warm = Annotated[
    float | None,
    Parameter(
        validator=_Seconds,
        help="Seconds offered before any counts [default: twice as long as a mean answer takes].",
    ),
]
Span = Annotated[
    float | None,
    Parameter(
        validator=_Seconds,
        help="Seconds offered that count [default: 1,000 requests, 100 s at least].",
    ),
]
Together = Annotated[
    int,
    Parameter(
        validator=validators.Number(gte=1, lte=1_024),
        help="Replicas that share what is offered; figures are of one.",
    ),
]
Json = Annotated[
    str | None,
    Parameter(
        name="--json", allow_leading_hyphen=True, help="Figures as JSON to a file; - prints."
    ),
]
At = Annotated[
    int | None,
    Parameter(
        validator=validators.Number(gte=0, lte=4_102_444_800),
        help="When this is, for the record, in seconds since 1970 [default: now].",
    ),
]
Price = Annotated[
    tuple[str, ...],
    Parameter(
        name="--price",
        negative=(),
        show_default=False,
        help="NAME=USD of an hour of one GPU, as h100=2.5; may be given again.",
    ),
]
Prices = Annotated[
    Path | None, Parameter(help="File of them: `usd_gpu_hour: {h100: 2.5}`, YAML or JSON.")
]
Rate = Annotated[float | None, Parameter(validator=_Above, help="Requests a second to serve.")]
Ttft = Annotated[float | None, Parameter(validator=_Above, help="Bound on the first token, in ms.")]
Tpot = Annotated[
    float | None,
    Parameter(validator=_Above, help="Bound on the mean time of each token after it, in ms."),
]
_Tokens = validators.Number(gte=1, lte=10_000_000)
Input = Annotated[int | None, Parameter(validator=_Tokens, help="Prompt tokens of each request.")]
Output = Annotated[int | None, Parameter(validator=_Tokens, help="Output tokens of each.")]
Trace = Annotated[Path | None, Parameter(help="Requests of a trace, in their order.")]
Kind = Annotated[
    Literal["headrace", "azure", "mooncake", "arena"], Parameter(help="Format of the trace.")
]
HardwareNames = Annotated[
    tuple[str, ...],
    Parameter(
        name="--hardware",
        negative=(),
        show_default=False,
        help="A profile, a file of one, or how some are called, as h100 [default: all with GPUs].",
    ),
]
Model = Annotated[str | None, Parameter(help="Only profiles of this model.")]


def capacity(  # noqa: PLR0913 - a command's options
    file: File = None,
    /,
    *,
    mix: MixNames = (),
    pool: Pools = (),
    attainment: Attainment = KEPT,
    class_targets: Targets = False,
    seeds: Seeds = 3,
    quick: Quick = False,
    warm_s: Warm = None,
    span_s: Span = None,
    replicas: Together = 1,
    rate: Rate = None,
    ttft_ms: Ttft = None,
    tpot_ms: Tpot = None,
    input: Input = None,  # noqa: A002 - the option's name
    output: Output = None,
    trace: Trace = None,
    kind: Kind = "headrace",
    hardware: HardwareNames = (),
    model: Model = None,
    price: Price = (),
    prices: Prices = None,
    json: Json = None,
    measured_at: At = None,
) -> int:
    """Find the largest offered rate that one replica still holds, or size a fleet for a rate.

    With SCENARIO: each pool's capacity in work-seconds per second, by mix, with an interval over seeds;
    `--json FILE` writes envelopes that `deployment.pools[].envelopes` reads. With --rate, --ttft-ms and
    --tpot-ms, and lengths by --input and --output, --mix or --trace: replicas, GPUs and money by hardware.
    First come first served without gates, Poisson arrivals, simulated.
    """
    if unknown := [name for name in mix if name not in MIXES]:
        return fail(f"no mix {unknown[0]!r}; there are: {_NAMES}")
    question = Question(
        attainment=None if class_targets else attainment,
        seeds=tuple(range(seeds)),
        warm_s=warm_s,
        span_s=span_s,
        replicas=replicas,
        precision=_ROUGH if quick or file is None else PRECISION,
        part=_QUICK if quick else _HALF if file is None else 1.0,
    )
    wanted = Wanted(rate, ttft_ms, tpot_ms, input, output, mix, trace, kind, tuple(hardware), model)
    known = prices_of(price, prices)
    if file is None:
        complaint = wanted.complaint() or _only_scenarios(pool, class_targets, replicas)
        return fail(complaint) if complaint else _sized(wanted, question, known, json)
    if wanted.names():
        return fail(f"{wanted.names()[0]} asks for a fleet, a scenario for the capacity of its own")
    now_s = wall() if measured_at is None else measured_at
    try:
        found = list(_measured(file, mix, pool, question, now_s))
    except CapacityError as error:
        show(f"headrace: {error}", file=sys.stderr)
        return FAILED
    return _told(file.stem, found, known, json)


def _told(name: str, found: list[Measured], prices: GpuPrices, json: str | None) -> int:
    _write(json, report(name, found))
    for one in found if json != "-" else ():
        show(render_measured(one, _usd_hour(one, prices)))
    return OK


def _only_scenarios(pool: tuple[str, ...], class_targets: bool, replicas: int) -> str | None:
    given = {"--pool": pool, "--class-targets": class_targets, "--replicas": replicas > 1}
    found = [name for name, value in given.items() if value]
    return f"{found[0]} is of a scenario" if found else None


def _measured(
    file: Path, mixes: tuple[str, ...], pools: tuple[str, ...], question: Question, now_s: int
) -> Iterator[Measured]:
    """Yield what each pool carries of each mix. Raises CapacityError, its pool and mix told."""
    scenario = load_scenario(file)
    known = {one.name: one for one in scenario.deployment.pools}
    for name in pools or known:
        if name not in known:
            message = f"no pool {name!r}; there are: {', '.join(known)}"
            raise ConfigError([Fault(Origin("flag --pool"), message)])
        one = known[name]
        traffics = [named(each, MIXES[each], scenario, one) for each in mixes]
        for traffic in traffics or [own(scenario, one, trace_folders(file))]:
            try:
                yield measure(scenario, one, traffic, question, now_s=now_s, note=_progress)
            except CapacityError as error:
                raise CapacityError(f"{traffic.name} on pool {name}: {error}") from error


def _usd_hour(measured: Measured, prices: GpuPrices) -> float | None:
    price = prices.of(measured.envelope.fingerprint.hardware)
    return None if price is None or not measured.gpus else price * measured.gpus


def _sized(wanted: Wanted, question: Question, prices: GpuPrices, json: str | None) -> int:
    profiles = profiles_of(wanted.hardware, wanted.model)
    traffic = traffic_of(wanted)
    assert wanted.rate is not None
    assert wanted.ttft_ms is not None
    assert wanted.tpot_ms is not None
    ask = Ask(rate=wanted.rate, ttft_ms=wanted.ttft_ms, tpot_ms=wanted.tpot_ms, traffic=traffic)
    answers = [size(ask, profile, question, prices, _progress) for profile in profiles]
    assert question.attainment is not None
    told = SizingReport(
        format=FORMAT,
        rate=ask.rate,
        ttft_ms=ask.ttft_ms,
        tpot_ms=ask.tpot_ms,
        attainment=question.attainment,
        mix=traffic.name,
        mix_digest=traffic.digest,
        seeds=question.seeds,
        answers=ordered(answers),
    )
    _write(json, told)
    if json != "-":
        show(render_sizing(told), end="")
    return OK if any(one.why is None for one in answers) else FAILED


def _write(json: str | None, told: Any) -> None:
    if json is None:
        return
    text = msgspec.json.format(msgspec.json.encode(told), indent=2).decode() + "\n"
    if json == "-":
        show(text, end="")
    else:
        Path(json).write_text(text, encoding="utf-8")


def _progress(line: str) -> None:
    show(line, file=sys.stderr)
