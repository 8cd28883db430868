"""What does a whole service offer over a day, client by client?

ServeGen (Alibaba; Apache-2.0) tells of each client, for every 600 s, how many requests it sent and how unevenly
(the coefficient of variation of its gaps), and for every six hours quantiles of its lengths. From that an offered trace is
made: in each interval a client sends as many as it did, with gamma gaps of that variation; lengths are drawn from
its tables, in and out by themselves, since no table says how they belong together. Answers above 8,192 tokens are left
out of the tables, clients without tables altogether (`Service.untold`).

Traces only. HEADRACE_DATA names the folder of public traces: `python -m benchmarks.servegen` tells of them.
"""

import gzip
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import msgspec
from msgspec import Struct

from benchmarks import tenants
from benchmarks.mixes import ENGINE
from headrace.model.ids import ClassName, TenantId
from headrace.model.profile import Profile
from headrace.trace.generate import length_draw
from headrace.trace.mix import PERCENT, Quantiles, Table
from headrace.trace.row import TraceRow
from headrace.trace.streams import stream
from headrace.units import NS_PER_S, InstantNs, Tokens

NAMES = ("deepseek-r1", "m-large")
"""Services that are told of: one day of long reasoning, and fourteen of a general model."""
DAY_S = 86_400
OUTPUT_MAX = 8_192
_EVEN = 1e-3
"""A variation of gaps below this is none."""


class Sent(Struct, frozen=True, array_like=True):
    """What a client sent in one interval."""

    start_s: int
    rate_rps: float
    """Requests by seconds of the interval."""
    cv: float
    """Standard deviation of the gaps over their mean."""


class Lengths(Struct, frozen=True):
    """Quantiles of a client's lengths in some hours."""

    given: list[int] = msgspec.field(name="in")
    made: list[int] = msgspec.field(name="out")


class Client(Struct, frozen=True):
    """One caller of a service."""

    id: int
    rates: list[Sent]
    lengths: dict[int, Lengths] | None
    """By the second at which their hours begin; None: nobody told."""


class Service(Struct, frozen=True):
    """All that is told of a service."""

    model: str
    rate_window_s: int
    length_window_s: int
    quantile_percents: list[float]
    clients: list[Client]

    def sent(self, start_s: int, span_s: int) -> Iterator[tuple[Client, Sent]]:
        """Yield what each client sent in each interval that begins within a span."""
        for client in self.clients:
            for one in client.rates:
                if start_s <= one.start_s < start_s + span_s:
                    yield client, one

    def rps(self, start_s: int, span_s: int) -> float:
        """Return the mean requests a second of clients whose lengths are known."""
        known = sum(one.rate_rps for client, one in self.sent(start_s, span_s) if client.lengths)
        return known * self.rate_window_s / span_s

    def untold(self, start_s: int, span_s: int) -> float:
        """Return the share of requests of clients whose lengths nobody told."""
        every = sum(one.rate_rps for _, one in self.sent(start_s, span_s))
        return 1 - self.rps(start_s, span_s) * span_s / self.rate_window_s / every if every else 0.0


class Part(Struct, frozen=True, kw_only=True):
    """Which part of a service is offered."""

    start_s: int = 0
    """From which second on; a whole interval."""
    span_s: int = DAY_S
    """For how long; whole intervals."""
    keep: float = 1.0
    """The chance that a request is kept: what is left of a burst is a burst of fewer."""
    rps: float | None = None
    """The same as the mean requests a second that are left."""


def read(path: Path) -> Service:
    """Return a service's file."""
    with gzip.open(path) as file:
        return msgspec.json.decode(file.read(), type=Service, strict=False)


def offered(
    service: Service,
    part: Part,
    seed: int,
    *,
    tenant: TenantId,
    slo_class: ClassName | None = None,
) -> list[TraceRow]:
    """Return the requests of a part of a service, by arrival from its beginning.

    An interval of a client is drawn by itself, so that a part is the same alone and in a longer one. Raises
    ValueError where parts of intervals are asked for, or more requests than there were.
    """
    if part.start_s % service.rate_window_s or part.span_s % service.rate_window_s:
        raise ValueError(f"expected whole intervals of {service.rate_window_s} s")
    keep = part.keep
    if part.rps is not None:
        keep = part.rps / max(1e-9, service.rps(part.start_s, part.span_s))
    if not 0 < keep <= 1:
        raise ValueError(
            f"expected a part of the requests that there were, not {keep:g} times them"
        )
    found: list[tuple[InstantNs, int, int, int, int]] = []
    draws: dict[tuple[int, int], Callable[[Random], tuple[int, int]]] = {}
    for client, one in service.sent(part.start_s, part.span_s):
        if not client.lengths:
            continue
        hours = one.start_s - one.start_s % service.length_window_s
        draw = draws.get((client.id, hours))
        if draw is None:
            tables = _tables(service, client.lengths[hours])
            draw = draws[client.id, hours] = length_draw(tables)
        rng = stream(seed, "servegen", service.model, client.id, one.start_s)
        for nth, at_s in enumerate(_arrivals(one, service.rate_window_s, keep, rng)):
            at = InstantNs(round((one.start_s - part.start_s + at_s) * NS_PER_S))
            found.append((at, client.id, nth, *draw(rng)))
    found.sort()
    return [
        TraceRow(
            at=at,
            input_tokens=Tokens(given),
            output_tokens=Tokens(made),
            tenant=tenant,
            slo_class=slo_class,
        )
        for at, _, _, given, made in found
    ]


def _arrivals(one: Sent, window_s: int, keep: float, rng: Random) -> list[float]:
    """Return when requests of one interval arrive, in seconds from its beginning.

    As many gaps as there were requests, and one more, fill the interval. Of those that are not kept only
    the sums are drawn: gamma gaps add up to gamma.
    """
    shape = 1 / max(_EVEN, one.cv) ** 2
    left = round(one.rate_rps * window_s)
    at, times = 0.0, []
    while (step := _skipped(keep, rng)) <= left:
        left -= step
        at += rng.gammavariate(step * shape, 1.0)
        times.append(at)
    whole = at + rng.gammavariate((left + 1) * shape, 1.0)
    if whole == 0.0:  # so uneven that no gap is above the least number there is: all come at once
        return [rng.random() * window_s] * len(times)
    return [window_s * min(each / whole, 1 - 1e-9) for each in times]


def _skipped(keep: float, rng: Random) -> int:
    """Return which of the next requests is the first that is kept."""
    if keep == 1.0:
        return 1
    return 1 + int(math.log(1 - rng.random()) / math.log1p(-keep))


def _tables(service: Service, lengths: Lengths) -> Quantiles:
    percents = service.quantile_percents
    given = tuple(zip(percents, (max(1, each) for each in lengths.given), strict=True))
    made = tuple(zip(percents, (max(1, each) for each in lengths.made), strict=True))
    return Quantiles(input=given, output=below(made, OUTPUT_MAX))


def below(table: Table, most: int) -> Table:
    """Return the distribution of those values of a table that are at most so large."""
    if table[0][1] >= most:
        return (0.0, most), (float(PERCENT), most)
    kept = [point for point in table if point[1] <= most]
    if len(kept) == len(table):
        return table
    (low, least), (high, large) = table[len(kept) - 1], table[len(kept)]
    end = low + (high - low) * (most - least) / (large - least)
    points = [(PERCENT * percent / end, value) for percent, value in kept if percent < end]
    return (*points, (float(PERCENT), most))


# What it comes to --------------------------------------------------------------------------------


class Told(Struct, frozen=True, kw_only=True):
    """A trace in figures."""

    requests: int
    mean_rps: float
    peak_rps: float
    """Of the busiest 600 s."""
    least_rps: float
    given: float
    """Prompt tokens of a request, mean."""
    made: float
    """Answer tokens of a request, mean."""
    mean_work: float
    """Work-seconds offered a second, on `profile`."""
    peak_work: float
    """The same of the 600 s that have most of it."""


def told(rows: Sequence[TraceRow], span_s: int, profile: Profile = ENGINE.profile) -> Told:
    """Return a trace in figures, by intervals of 600 s."""
    window_s = 600
    counts, works = [0] * (span_s // window_s), [0.0] * (span_s // window_s)
    for row in rows:
        nth = row.at // (window_s * NS_PER_S)
        counts[nth] += 1
        works[nth] += profile.work_ns(row.input_tokens, 0, row.output_tokens) / NS_PER_S
    many = max(1, len(rows))
    return Told(
        requests=len(rows),
        mean_rps=len(rows) / span_s,
        peak_rps=max(counts) / window_s,
        least_rps=min(counts) / window_s,
        given=sum(row.input_tokens for row in rows) / many,
        made=sum(row.output_tokens for row in rows) / many,
        mean_work=sum(works) / span_s,
        peak_work=max(works) / window_s,
    )


def main() -> int:
    """Print what each service offers on its first day, thinned to 2 requests a second."""
    data = tenants.data_dir()
    if data is None:
        print("HEADRACE_DATA is unset", file=sys.stderr)
        return 2
    for name in NAMES:
        service = read(data / "traces" / "servegen" / f"{name}.json.gz")
        there, untold = service.rps(0, DAY_S), service.untold(0, DAY_S)
        print(f"{name}: {len(service.clients)} clients, {there:.1f} req/s over the first day")
        print(f"  {100 * untold:.1f} % of its requests are of clients without lengths, left out")
        rows = offered(service, Part(rps=min(2.0, there)), 0, tenant=TenantId("tenant"))
        found = msgspec.structs.asdict(told(rows, DAY_S))
        print("  thinned:", ", ".join(f"{key} {value:.4g}" for key, value in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
