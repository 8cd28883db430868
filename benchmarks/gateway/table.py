"""What do the measurements come to? Ratios within a run, their median and range, and the claims."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from benchmarks.gateway.load import Mode, Sample
from benchmarks.gateway.stacks import LITELLM, NGINX, OURS, ROUTER
from benchmarks.harness import Claim, at_most

_BEHIND = 0.9
"""Share of the offered chunks below which a row says nothing."""
_FULL = 0.95
"""Share of a core from which it counts as saturated."""
_DISTURBED = 0.2
"""Share of the time from which it matters that nginx waited for its core."""
_MB = 1_000_000
LIMITS = (
    ("CPU per request over nginx", Mode.REQUESTS, NGINX, 5.5, 35.0),
    ("CPU per request over vllm-router", Mode.REQUESTS, ROUTER, 1.2, 8.0),
    ("CPU per request over litellm", Mode.REQUESTS, LITELLM, 1 / 80, 1 / 15),
    ("CPU per chunk over nginx", Mode.CHUNKS, NGINX, 2.3, 4.5),
    ("CPU per chunk over vllm-router", Mode.CHUNKS, ROUTER, 1.5, 3.0),
)
"""(claim, what is compared, with whom, most in full, most in the quick form).

The first is what we want to come to: a request still costs several times that, about a third of it
for decisions that are recorded and replay. The second keeps it from growing."""
QUICK_SLACK = 1.5
MEMORY_MB = 25.0
"""Most memory per 1,000 streams."""


class Row(Struct, frozen=True, kw_only=True):
    """One measurement of one gateway in one run."""

    run: int
    stack: str
    mode: Mode
    connections: int
    sample: Sample
    offered: float | None = None
    """Chunks per second."""

    @property
    def figure(self) -> float:
        """Microseconds of CPU a request or chunk; MB per 1,000 streams."""
        sample = self.sample
        if self.mode is Mode.MEMORY:
            return _over(sample.memory_bytes / _MB * 1_000, sample.requests)
        done = sample.requests if self.mode is Mode.REQUESTS else sample.chunks
        return _over(sample.cpu_s * 1e6, done)

    @property
    def valid(self) -> bool:
        """Whether something came through, and all that was offered."""
        if math.isnan(self.figure):
            return False
        if self.offered is None:
            return True
        return _over(self.sample.chunks, self.sample.wall_s) >= _BEHIND * self.offered

    @property
    def saturated(self) -> str:
        """Who used up its core."""
        if self.mode is Mode.MEMORY:
            return ""
        loads = {
            "gateway": _over(self.sample.cpu_s, self.sample.wall_s),
            "load": _over(self.sample.load_cpu_s, self.sample.wall_s),
        }
        return "+".join(name for name, share in loads.items() if share >= _FULL) or "none"


class Spread(NamedTuple):
    """Median and range."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread | None:
    """Return median and range, None of nothing."""
    if not values:
        return None
    return Spread(statistics.median(values), min(values), max(values))


def ratios(rows: Sequence[Row], mode: Mode, stack: str, base: str) -> list[float]:
    """Return figure over figure for each run in which both rows are valid."""
    found = {(row.run, row.stack): row.figure for row in rows if row.mode is mode and row.valid}
    return [
        figure / found[run, base]
        for (run, name), figure in found.items()
        if name == stack and (run, base) in found
    ]


def claims(rows: Sequence[Row], *, quick: bool) -> list[Claim]:
    """Return what can be said of ours; a peer without a valid row is not compared with.

    Ours without one holds no claim: the value is NaN.
    """
    there = {(row.stack, row.mode) for row in rows if row.valid}
    made = []
    for name, mode, peer, wanted, kept in LIMITS:
        if (peer, mode) in there:
            found = spread(ratios(rows, mode, OURS, peer))
            made.append(
                at_most(name, found.median if found else math.nan, kept if quick else wanted)
            )
    memory = spread(figures(rows, Mode.MEMORY, OURS))
    grown = memory.median if memory else math.nan
    made.append(at_most("MB per 1000 streams", grown, MEMORY_MB * (QUICK_SLACK if quick else 1)))
    return [*made, at_most("errors and reconnects", faults(rows, OURS), 0)]


def figures(rows: Sequence[Row], mode: Mode, stack: str) -> list[float]:
    """Return one gateway's figures, valid ones where there are any."""
    mine = [row for row in rows if row.stack == stack and row.mode is mode]
    valid = [row.figure for row in mine if row.valid]
    return valid or [row.figure for row in mine if not math.isnan(row.figure)]


def faults(rows: Sequence[Row], stack: str) -> int:
    """Return the errors and reconnects of one gateway, all measurements together."""
    mine = [row.sample for row in rows if row.stack == stack]
    return sum(sample.errors + sample.reconnects for sample in mine)


def lines(rows: Sequence[Row], absent: Mapping[str, str]) -> Iterator[str]:
    """Yield the table: one line a gateway, * where a row fell behind what was offered.

    Where a gateway waited much for its core, other work disturbed it: fewer, larger turns of its
    loop flatter it, and cold caches do the contrary.
    """
    cells = "{:<14} {:>9} {:>20} {:>9} {:>20} {:>8} {:>7} {:>9} {:>6} {:>6}  {}".format
    yield cells(
        "stack",
        "us/req",
        "x nginx",
        "us/chunk",
        "x nginx",
        "MB/1000",
        "errors",
        "reconn.",
        "opened",
        "waited",
        "saturated: requests, chunks",
    )
    for stack in dict.fromkeys(row.stack for row in rows):
        mine = [row for row in rows if row.stack == stack]
        yield cells(
            stack,
            _figure(rows, Mode.REQUESTS, stack),
            _ratio(rows, Mode.REQUESTS, stack),
            _figure(rows, Mode.CHUNKS, stack),
            _ratio(rows, Mode.CHUNKS, stack),
            _figure(rows, Mode.MEMORY, stack),
            sum(row.sample.errors for row in mine),
            sum(row.sample.reconnects for row in mine),
            sum(row.sample.opened for row in mine if row.mode is not Mode.MEMORY),
            f"{waited(mine):.0%}",
            ", ".join(_saturated(mine, mode) for mode in (Mode.REQUESTS, Mode.CHUNKS)),
        )
    if waited(row for row in rows if row.stack == NGINX) > _DISTURBED:
        yield "other work took much of the gateways' core: the ratios are rough"
    for stack, why in absent.items():
        yield f"{stack:<14} absent: {why}"
    for row in rows:
        if row.sample.said:
            yield f"{row.stack}, {row.mode}, run {row.run}: {row.sample.said!r}"


def _figure(rows: Sequence[Row], mode: Mode, stack: str) -> str:
    found = spread(figures(rows, mode, stack))
    if found is None:
        return "-"
    mine = [row for row in rows if row.stack == stack and row.mode is mode]
    return f"{found.median:.1f}" + ("" if all(row.valid for row in mine) else "*")


def _ratio(rows: Sequence[Row], mode: Mode, stack: str) -> str:
    found = spread(ratios(rows, mode, stack, NGINX))
    return f"{found.median:.2f} [{found.low:.2f}-{found.high:.2f}]" if found else "-"


def waited(rows: Iterable[Row]) -> float:
    """Return the largest share of a measurement that a gateway waited for its core."""
    timed = [row.sample for row in rows if row.sample.wall_s]
    return max((sample.waited_s / sample.wall_s for sample in timed), default=0.0)


def _saturated(mine: Sequence[Row], mode: Mode) -> str:
    said = sorted({row.saturated for row in mine if row.mode is mode})
    return "/".join(said) or "-"


def _over(top: float, bottom: float) -> float:
    return top / bottom if bottom else math.nan
