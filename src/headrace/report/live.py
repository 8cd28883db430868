"""What a live replay leaves behind: the figures of any run, and how the load itself was made.

The same summary as of a simulated run, judged by what callers saw, so that everything that reads one
reads the other. Beside it stand the mix that was offered and how punctual the client was: a client
that lags measures itself.
"""

from collections.abc import Sequence
from math import sqrt

import msgspec
from msgspec import Struct

from headrace.report.mix import Mix, mix_of
from headrace.report.run import RunRecord
from headrace.report.stats import Quantiles, student_t
from headrace.report.summary import Summary, summarise
from headrace.units import DurationNs, InstantNs

WINDOWS = 10
"""Parts of the span over which a figure's spread is taken."""


class Client(Struct, frozen=True, kw_only=True):
    """How the load was made, as its sender knows it."""

    url: str
    trusted: bool
    """Whether lengths were told to the server; else answers were as long as it liked."""
    speed: float
    profile: str
    """What work is priced by."""
    trace_rows: int
    """Requests that the trace had; fewer were offered if the replay was stopped."""
    sent: int
    """Of those offered; the rest found no free connection."""
    answers: dict[str, int]
    """Requests by what came back: `200`, a status with its code, or what failed."""
    usage_input_tokens: int
    usage_output_tokens: int
    """As the server counted them."""
    lateness: Quantiles | None
    """How long after its time each request was sent."""
    loop_lag_p99_ns: DurationNs
    loop_lag_limit_ns: DurationNs
    """Beyond it the client measured itself."""
    stopped: bool = False
    """Whether somebody stopped the replay before its end."""

    @property
    def valid(self) -> bool:
        """Whether the client kept up."""
        return self.loop_lag_p99_ns <= self.loop_lag_limit_ns


class Window(Struct, frozen=True, kw_only=True, gc=False):
    """A part of the span: work that arrived in it, and how much of that met."""

    work_ns: int
    met_work_ns: int


class Report(Summary, frozen=True, kw_only=True):
    """A summary as it is written to a file; a live one says how it was made."""

    client: Client | None = None
    mix: Mix | None = None
    windows: tuple[Window, ...] = ()


def report_of(run: RunRecord, client: Client) -> Report:
    """Return the report of a live run."""
    summary = summarise(run)
    fields = {name: getattr(summary, name) for name in Summary.__struct_fields__}
    return Report(
        **fields, client=client, mix=mix_of(run.offered, run.span_ns), windows=windows_of(run)
    )


def windows_of(run: RunRecord) -> tuple[Window, ...]:
    """Return equal parts of the span, by arrival."""
    met = {row.request for row in run.rows if row.met}
    begin = min((one.at for one in run.offered), default=InstantNs(0))
    sums = [[0, 0] for _ in range(WINDOWS)]
    for one in run.offered:
        nth = min(WINDOWS - 1, (one.at - begin) * WINDOWS // max(1, run.span_ns))
        sums[nth][0] += one.work_ns
        sums[nth][1] += one.work_ns if one.request in met else 0
    return tuple(Window(work_ns=work, met_work_ns=done) for work, done in sums)


def difference(one: Sequence[Window], two: Sequence[Window]) -> tuple[float, float, float] | None:
    """Return two - one of work goodput over offered, with a 95 % interval: (mean, low, high).

    Parts of a span stand for independent draws, which parts much longer than an answer nearly are.
    Welch's interval at the lesser degrees of freedom; None where a side has fewer than two parts.
    """
    shares = [[w.met_work_ns / w.work_ns for w in side if w.work_ns] for side in (one, two)]
    if min(map(len, shares)) < 2:  # noqa: PLR2004 - one part has no spread
        return None
    means = [sum(side) / len(side) for side in shares]
    parts = [
        sum((share - mean) ** 2 for share in side) / (len(side) - 1) / len(side)
        for side, mean in zip(shares, means, strict=True)
    ]
    half = student_t(min(map(len, shares)) - 1) * sqrt(sum(parts))
    middle = means[1] - means[0]
    return middle, middle - half, middle + half


def decoded(content: bytes) -> list[Report]:
    """Return a report's runs, one object or an array; raises `msgspec.DecodeError`."""
    told = msgspec.json.decode(content, type=Report | list[Report])
    return [told] if isinstance(told, Report) else told
