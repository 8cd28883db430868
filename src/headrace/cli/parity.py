"""`headrace parity`: does the simulator foretell what happens live?"""

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import msgspec
from cyclopts import Parameter, validators
from msgspec import Struct
from msgspec.structs import replace

from headrace.adapters.journal.ring import segments
from headrace.cli.errors import FAILED, INTERRUPTED, INVALID, OK, fail
from headrace.cli.live import BrokenError, StoppedError, named, run_live
from headrace.cli.out import show
from headrace.cli.simulate import trace_folders
from headrace.load.caller import Answer
from headrace.load.lag import LIMIT_NS
from headrace.plane.journal import JournalError, Verified, verify
from headrace.report.parity import Pair, Parity, lag_verdict, parity_tables
from headrace.report.parity import parity as judged
from headrace.report.summary import Summary, summarise
from headrace.report.tables import render_all
from headrace.sim.experiment import simulate
from headrace.sim.reading import load_scenario
from headrace.sim.scenario import LOAD_MAX, LOAD_MIN, Scenario, rows_of
from headrace.trace.reshape import window
from headrace.units import DurationNs, InstantNs, seconds, to_ms

PROGRESS_EVERY_S = 10
_TRIES = 3

File = Annotated[Path, Parameter(help="Scenario, YAML or JSON; without faults.")]
Seeds = Annotated[
    tuple[int, ...], Parameter(name="--seed", negative=(), help="Seed; may be given again.")
]
Minutes = Annotated[
    float | None,
    Parameter(validator=validators.Number(gt=0), help="Offer only the first minutes of the trace."),
]
Load = Annotated[
    float,
    Parameter(
        validator=validators.Number(gte=LOAD_MIN, lte=LOAD_MAX),
        help="Offered rate, times the scenario's own.",
    ),
]
Json = Annotated[
    str | None,
    Parameter(name="--json", allow_leading_hyphen=True, help="All as JSON to a file; - prints."),
]


class Replayed(Struct, frozen=True, kw_only=True):
    """Whether a journal follows from what happened."""

    records: int
    whole: bool
    """Every record replayed to the same effects, from the first on."""
    why: str | None = None


class SeedRun(Struct, frozen=True, kw_only=True):
    """One seed, simulated and live."""

    seed: int
    loop_lag_p99_ms: float
    valid: bool
    journal: Replayed
    parity: Parity
    """Of this seed alone."""
    simulated: Summary
    live: Summary


class ParityReport(Struct, frozen=True, kw_only=True):
    """What the command found."""

    scenario: str
    load: float
    parity: Parity
    """Of all valid seeds together: what is judged."""
    seeds: tuple[SeedRun, ...]

    @property
    def valid(self) -> bool:
        """Whether every run measured what it was to measure."""
        return all(one.valid for one in self.seeds)

    @property
    def holds(self) -> bool:
        """Whether all is within bounds and every journal replays."""
        return self.parity.holds and all(one.journal.whole for one in self.seeds)


def parity(
    file: File,
    /,
    *,
    seeds: Seeds = (),
    minutes: Minutes = None,
    load: Load = 1.0,
    json: Json = None,
) -> int:
    """Run a scenario simulated and live on the same requests, and say how far both agree.

    Live means: this gateway over emulated replicas, callers over loopback HTTP, in real time, with a
    journal that must replay. Ends with 1 if something is out of bounds, and with 3 if this machine
    was too busy to tell.
    """
    scenario = load_scenario(file)
    if problem := unfit(scenario):
        return fail(f"{file}: {problem}")
    if not LOAD_MIN <= scenario.load * load <= LOAD_MAX:
        return fail(f"load {scenario.load * load:g} in all: expected {LOAD_MIN:g} to {LOAD_MAX:g}")
    scenario = replace(scenario, load=scenario.load * load)
    try:
        report = compared(
            scenario, seeds or (scenario.seed,), minutes=minutes, folders=trace_folders(file)
        )
    except (StoppedError, BrokenError) as ended:
        show(f"headrace: {ended}", file=sys.stderr)
        return INTERRUPTED if isinstance(ended, StoppedError) else FAILED
    text = msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"
    if json == "-":
        show(text, end="")
    else:
        if json is not None:
            Path(json).write_text(text, encoding="utf-8")
        _print(report)
    if not report.valid:
        return INVALID
    return OK if report.holds else FAILED


def unfit(scenario: Scenario) -> str | None:
    """Return what of a scenario the live side cannot do, or None."""
    if scenario.faults:
        return "faults happen in simulations only: expected none"
    return None


def compared(
    scenario: Scenario,
    seeds: Sequence[int],
    *,
    minutes: float | None = None,
    folders: tuple[Path, ...] = (),
) -> ParityReport:
    """Run each seed both ways and judge all together. Raises StoppedError and BrokenError."""
    runs: list[SeedRun] = []
    pairs: list[Pair] = []
    for seed in seeds:
        run, pair = _valid_run(scenario, seed, minutes, folders)
        runs.append(run)
        pairs.append(pair)
    return ParityReport(
        scenario=scenario.name, load=scenario.load, parity=judged(pairs), seeds=tuple(runs)
    )


def _valid_run(
    scenario: Scenario, seed: int, minutes: float | None, folders: tuple[Path, ...]
) -> tuple[SeedRun, Pair]:
    """Run a seed, again if this machine was too busy, three times at most."""
    for left in reversed(range(_TRIES)):
        run, pair = _run(scenario, seed, minutes, folders)
        why = lag_verdict(DurationNs(round(run.loop_lag_p99_ms * 1e6)), LIMIT_NS)
        if why is None or not left:
            return run, pair
        _progress(f"seed {seed}: {why}; once more")
    raise AssertionError("the last try is returned")


def _run(
    scenario: Scenario, seed: int, minutes: float | None, folders: tuple[Path, ...]
) -> tuple[SeedRun, Pair]:
    rows = named(scenario, rows_of(scenario, seed, folders))
    if minutes is not None:
        rows = window(rows, InstantNs(0), InstantNs(seconds(minutes * 60)))
    _progress(
        f"{scenario.name} seed {seed} load {scenario.load:g}: {len(rows)} requests, simulated"
    )
    simulated = simulate(scenario, seed, rows, label="simulated")
    counted = _Progress(len(rows), seed)
    with TemporaryDirectory(prefix="headrace-parity-") as folder:
        journal = Path(folder) / "journal"
        live = run_live(scenario, seed, rows, journal=journal, answered=counted)
        replayed = _replayed(journal)
    run = SeedRun(
        seed=seed,
        loop_lag_p99_ms=to_ms(live.loop_lag_p99_ns),
        valid=live.loop_lag_p99_ns <= LIMIT_NS,
        journal=replayed,
        parity=judged([(simulated, live.run)]),
        simulated=summarise(simulated),
        live=summarise(live.run),
    )
    return run, (simulated, live.run)


def _replayed(journal: Path) -> Replayed:
    try:
        found = verify(segments(journal))
    except JournalError as broken:
        return Replayed(records=0, whole=False, why=str(broken))
    if not isinstance(found, Verified):
        why = f"record {found.index} ({found.event}) differs: {found.why}"
        return Replayed(records=found.index, whole=False, why=why)
    whole = found.first == 0 and found.records > 0
    return Replayed(records=found.records, whole=whole, why=None if whole else "the start is gone")


class _Progress:
    """Tells now and then how far the live side is."""

    def __init__(self, requests: int, seed: int) -> None:
        self._requests, self._seed = requests, seed
        self._answered = 0
        self._told = 0

    def __call__(self, _index: int, answer: Answer) -> None:
        self._answered += 1
        at_s = answer.ended_at // seconds(PROGRESS_EVERY_S) * PROGRESS_EVERY_S
        if at_s > self._told:
            self._told = at_s
            _progress(
                f"  seed {self._seed}: {at_s} s, {self._answered} of {self._requests} answered"
            )


def _print(report: ParityReport) -> None:
    for one in report.seeds:
        lag = f"loop lag p99 {one.loop_lag_p99_ms:.1f} ms"
        journal = f"{one.journal.records} journal records " + (
            "replay to the same effects"
            if one.journal.whole
            else f"DO NOT REPLAY: {one.journal.why}"
        )
        show(f"seed {one.seed}: {lag}{'' if one.valid else ' (INVALID)'}; {journal}")
    verdict = "agree" if report.holds else "DO NOT AGREE"
    if not report.valid:
        verdict = "were not measured: this machine was too busy"
    title = f"{report.scenario} at load {report.load:g}: simulated and live {verdict}"
    show(render_all(parity_tables(report.parity, title)))


def _progress(line: str) -> None:
    show(line, file=sys.stderr)
