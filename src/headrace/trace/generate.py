"""How does a mix of sources become a trace?

Each source draws arrivals, lengths, declared bounds and prefixes from streams of their own, named
by seed and source: adding, dropping or changing one source or one setting moves nothing else. Times
are added up in seconds and rounded to whole nanoseconds once. Equal mix and seed give equal rows on
one Python version; `trace_hash` tells whether two machines agree.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from hashlib import sha256
from heapq import merge
from itertools import accumulate, count, islice
from math import ceil, exp, log, log1p
from random import Random
from statistics import NormalDist
from typing import assert_never

from headrace.trace.mix import (
    PERCENT,
    Always,
    Arrivals,
    Blend,
    Empirical,
    Even,
    Exact,
    Fixed,
    Gamma,
    Headroom,
    Lengths,
    Lognormal,
    MaxTokens,
    Mix,
    OnOff,
    OptionalParts,
    Plain,
    Poisson,
    Quantiles,
    Ramp,
    Segment,
    SharedPrefix,
    Table,
    TenantSource,
    Undeclared,
    Uniform,
)
from headrace.trace.row import TraceRow
from headrace.trace.streams import stream
from headrace.units import InstantNs, Tokens, seconds

ROWS_MAX = 10_000_000
"""Most rows of a trace bounded by duration only; more is a mistaken rate."""

Draw = Callable[[Random], tuple[int, int]]
"""Draws the (input, output) tokens of one request."""

_NORMAL = NormalDist()
_TINY = 2.0**-54
"""Stands for a draw of exactly 0, which has no logarithm and no normal quantile."""
_CHUNK_ID_BYTES = 7
"""56 bits: chunk ids of a million chunks collide with a chance below 1e-5."""


def generate(mix: Mix, seed: int) -> list[TraceRow]:
    """Return the trace of a mix: rows by (arrival, place of the source, place in the source).

    Raises ValueError for more than `ROWS_MAX` rows.
    """
    end = None if mix.duration_s is None else seconds(mix.duration_s)
    sources = [_ranked(index, source, seed) for index, source in enumerate(mix.sources)]
    rows: list[TraceRow] = []
    for at, _, _, row in islice(merge(*sources), mix.rows):
        if end is not None and at >= end:
            break
        if len(rows) == ROWS_MAX:
            raise ValueError(f"expected a trace of at most {ROWS_MAX} rows")
        rows.append(row)
    return rows


def _ranked(
    index: int, source: TenantSource, seed: int
) -> Iterator[tuple[InstantNs, int, int, TraceRow]]:
    """Yield a source's rows with what they are merged by; no two tie, so rows are not compared."""
    for nth, row in enumerate(rows_of(source, seed)):
        yield row.at, index, nth, row


def rows_of(source: TenantSource, seed: int) -> Iterator[TraceRow]:
    """Yield one source's rows by time, without end unless it has one."""
    path = ("source", source.tenant, source.slo_class or "", source.name)
    length_rng, bound_rng = stream(seed, *path, "lengths"), stream(seed, *path, "max_tokens")
    draw = length_draw(source.lengths)
    bound = _bounder(source.max_tokens)
    prefix = _prefixes(source.prefix, path, stream(seed, *path, "prefix"))
    shared = source.prefix.tokens if source.prefix else 0
    chunk = source.prefix.chunk_tokens if source.prefix else 0
    for since in arrival_times(source.arrivals, stream(seed, *path, "arrivals")):
        at_s = source.start_s + since
        if source.stop_s is not None and at_s >= source.stop_s:
            return
        given, wanted = draw(length_rng)
        made, declared = bound(wanted, bound_rng)
        yield TraceRow(
            at=InstantNs(seconds(at_s)),
            input_tokens=Tokens(given + shared),
            output_tokens=Tokens(made),
            max_tokens=None if declared is None else Tokens(declared),
            tenant=source.tenant,
            slo_class=source.slo_class,
            model=source.model,
            prefix=prefix(),
            prefix_tokens=chunk,
            optional=optional_parts(source.optional, given),
            lowest=source.lowest,
        )


def optional_parts(rule: OptionalParts | None, given: int) -> tuple[Tokens, ...]:
    """Return the parts of a prompt of so many tokens that may be left out, by rank."""
    part = 0 if rule is None else int(given * rule.share) // rule.parts
    return () if rule is None or not part else (Tokens(part),) * rule.parts


def _unit_gap(rng: Random) -> float:
    """Return an exponential gap of mean 1."""
    return -log1p(-rng.random())


def _poisson(rate: float, rng: Random) -> Iterator[float]:
    return accumulate(_unit_gap(rng) / rate for _ in count())


def _even(rate: float) -> Iterator[float]:
    return (nth / rate for nth in count())


def _gamma(config: Gamma, rng: Random) -> Iterator[float]:
    shape = 1 / config.cv**2
    scale = 1 / (config.rate * shape)
    return accumulate(rng.gammavariate(shape, scale) for _ in count())


def _on_off(config: OnOff, rng: Random) -> Iterator[float]:
    """Yield arrivals drawn in time spent on, each then moved past the silences before it."""
    for busy in _even(config.rate) if config.even else _poisson(config.rate, rng):
        cycles, into = divmod(busy, config.on_s)
        yield cycles * (config.on_s + config.off_s) + into


def _ramp(segments: tuple[Segment, ...], rng: Random) -> Iterator[float]:
    """Yield a Poisson process of changing rate: unit gaps are used up at the rate of the time."""
    start, need = 0.0, _unit_gap(rng)
    for segment in segments:
        end, rate = segment.until_s, segment.rate
        while need < (end - start) * rate:
            start = min(start + need / rate, end)
            yield start
            need = _unit_gap(rng)
        need -= (end - start) * rate
        start = end


def arrival_times(arrivals: Arrivals, rng: Random) -> Iterator[float]:
    """Yield arrival times in s from the start of the source, rising; endless but for `Ramp`."""
    match arrivals:
        case Poisson():
            return _poisson(arrivals.rate, rng)
        case Gamma():
            return _gamma(arrivals, rng)
        case Even():
            return _even(arrivals.rate)
        case OnOff():
            return _on_off(arrivals, rng)
        case Ramp():
            return _ramp(arrivals.segments, rng)
        case _:
            assert_never(arrivals)


def _between(low: int, high: int, rng: Random) -> int:
    """Return a whole number from an even draw, ends included."""
    return low + int(rng.random() * (high - low + 1))


def _quantile(table: Table) -> Callable[[float], int]:
    """Return the function from a fraction in [0, 1) to the value there, straight between points."""
    percents, values = [point[0] for point in table], [point[1] for point in table]

    def value(fraction: float) -> int:
        percent = fraction * PERCENT
        right = bisect_right(percents, percent)
        low, high = values[right - 1], values[right]
        part = (percent - percents[right - 1]) / (percents[right] - percents[right - 1])
        return round(low + (high - low) * part)

    return value


def _quantile_draw(lengths: Quantiles) -> Draw:
    given, made = _quantile(lengths.input), _quantile(lengths.output)
    return lambda rng: (given(rng.random()), made(rng.random()))


def _lognormal_draw(lengths: Lognormal) -> Draw:
    given_mu, made_mu = log(lengths.input_median), log(lengths.output_median)

    def side(mu: float, sigma: float, low: int, high: int, rng: Random) -> int:
        deviate = _NORMAL.inv_cdf(rng.random() or _TINY)
        # Cut before exp, which overflows; a little over, since log and exp are not exact.
        return max(low, min(round(exp(min(mu + sigma * deviate, log(high) + 1))), high))

    def draw(rng: Random) -> tuple[int, int]:
        return (
            side(given_mu, lengths.input_sigma, lengths.input_min, lengths.input_max, rng),
            side(made_mu, lengths.output_sigma, lengths.output_min, lengths.output_max, rng),
        )

    return draw


def _empirical_draw(lengths: Empirical) -> Draw:
    pairs = lengths.kept()
    return lambda rng: pairs[int(rng.random() * len(pairs))]


def _plain_draw(lengths: Plain) -> Draw:
    match lengths:
        case Fixed():
            return lambda _: (lengths.input, lengths.output)
        case Uniform():
            return lambda rng: (
                _between(lengths.input_min, lengths.input_max, rng),
                _between(lengths.output_min, lengths.output_max, rng),
            )
        case Lognormal():
            return _lognormal_draw(lengths)
        case Quantiles():
            return _quantile_draw(lengths)
        case Empirical():
            return _empirical_draw(lengths)
        case _:
            assert_never(lengths)


def length_draw(lengths: Lengths) -> Draw:
    """Return the draw of a length distribution."""
    if not isinstance(lengths, Blend):
        return _plain_draw(lengths)
    draws = [_plain_draw(part.lengths) for part in lengths.parts]
    sums = list(accumulate(part.weight for part in lengths.parts))

    def draw(rng: Random) -> tuple[int, int]:
        which = bisect_right(sums, rng.random() * sums[-1])
        return draws[min(which, len(draws) - 1)](rng)

    return draw


def _bounder(rule: MaxTokens) -> Callable[[int, Random], tuple[int, int | None]]:
    """Return the function from the length wanted to (length made, bound declared)."""
    match rule:
        case Undeclared():
            return lambda wanted, _: (wanted, None)
        case Exact():
            return lambda wanted, _: (wanted, wanted)
        case Always():
            return lambda wanted, _: (min(wanted, rule.tokens), rule.tokens)
        case Headroom():
            reach = rule.high - rule.low
            return lambda wanted, rng: (
                wanted,
                ceil(wanted * (rule.low + reach * rng.random())),
            )
        case _:
            assert_never(rule)


def _prefixes(
    shared: SharedPrefix | None, path: tuple[str, ...], rng: Random
) -> Callable[[], tuple[int, ...]]:
    """Return the draw of a request's prefix: one group's chunk ids, equal for every seed."""
    if shared is None:
        return lambda: ()
    made: dict[int, tuple[int, ...]] = {}
    chunks = shared.tokens // shared.chunk_tokens

    def draw() -> tuple[int, ...]:
        group = _between(0, shared.groups - 1, rng)
        ids = made.get(group)
        if ids is None:
            names = (repr((path, group, chunk)).encode() for chunk in range(chunks))
            ids = made[group] = tuple(
                int.from_bytes(sha256(name).digest()[:_CHUNK_ID_BYTES]) for name in names
            )
        return ids

    return draw
