"""How is a trace made faster, shorter, smaller, or given owners it lacks?

Every function returns new rows by time and leaves its argument alone. Time is changed in exact
integer arithmetic.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, groupby
from typing import TypeVar

from msgspec.structs import replace

from headrace.model.ids import ClassName, TenantId
from headrace.trace.row import TraceRow
from headrace.trace.streams import stream
from headrace.units import DurationNs, InstantNs, Tokens

K = TypeVar("K", bound=str)


def lengths_of(rows: Iterable[TraceRow]) -> list[tuple[int, int]]:
    """Return the (input, true output) tokens of each row, for `mix.Empirical`."""
    return [(row.input_tokens, row.output_tokens) for row in rows]


def head(rows: Sequence[TraceRow], count: int) -> list[TraceRow]:
    """Return the first `count` rows, fewer if there are no more."""
    return list(rows[: max(0, count)])


def window(rows: Iterable[TraceRow], start: InstantNs, end: InstantNs) -> list[TraceRow]:
    """Return the rows that arrive in [start, end), timed from `start`."""
    return [replace(row, at=InstantNs(row.at - start)) for row in rows if start <= row.at < end]


def scale(rows: Iterable[TraceRow], factor: float | Fraction) -> list[TraceRow]:
    """Return the rows `factor` times as fast: at / factor, exact and then rounded down to ns.

    A float counts as the decimal it prints as: 2.6 is 13/5. ValueError: not above 0.
    """
    exact = factor if isinstance(factor, Fraction) else Fraction(str(factor))
    if exact <= 0:
        raise ValueError(f"expected a factor above 0, not {factor}")
    up, down = exact.denominator, exact.numerator
    return [replace(row, at=InstantNs(row.at * up // down)) for row in rows]


def spread(rows: Sequence[TraceRow], tick_ns: DurationNs) -> list[TraceRow]:
    """Return the rows with those of one arrival time spread evenly over the tick it opens.

    The i-th of n rows at t arrives at t + i/n of the tick, or of the time to the next arrival if
    that is nearer. So order stays, no row moves by a whole tick, and the trace grows by less than
    one.
    """
    groups = [(at, list(group)) for at, group in groupby(rows, key=lambda row: row.at)]
    ends = [at for at, _ in groups[1:]] + [InstantNs(at + tick_ns) for at, _ in groups[-1:]]
    return [
        replace(row, at=InstantNs(at + nth * min(tick_ns, end - at) // len(group)))
        for (at, group), end in zip(groups, ends, strict=True)
        for nth, row in enumerate(group)
    ]


def cap_lengths(
    rows: Iterable[TraceRow], *, input_max: int | None = None, output_max: int | None = None
) -> list[TraceRow]:
    """Return the rows with longer inputs, outputs and declared bounds cut to a maximum, in tokens.

    A cut input keeps only the prefix chunks that lie wholly in it.
    """
    return [_capped(row, input_max, output_max) for row in rows]


def _capped(row: TraceRow, input_max: int | None, output_max: int | None) -> TraceRow:
    if input_max is not None and row.input_tokens > input_max:
        kept = row.prefix[: input_max // row.prefix_tokens] if row.prefix else ()
        row = replace(
            row,
            input_tokens=Tokens(input_max),
            prefix=kept,
            prefix_tokens=row.prefix_tokens if kept else 0,
        )
    if output_max is not None:
        declared = row.max_tokens
        row = replace(
            row,
            output_tokens=Tokens(min(row.output_tokens, output_max)),
            max_tokens=None if declared is None else Tokens(min(declared, output_max)),
        )
    return row


def _chooser(weights: Mapping[K, float], seed: int, what: str) -> Callable[[], K | None]:
    """Return a draw from `weights`, in their order; from none at all, always None."""
    if any(not weight > 0 for weight in weights.values()):
        raise ValueError(f"expected weights above 0 for each {what}, not {dict(weights)}")
    names, sums = list(weights), list(accumulate(weights.values()))
    rng = stream(seed, "assign", what)

    def choose() -> K | None:
        if not names:
            return None
        return names[min(bisect_right(sums, rng.random() * sums[-1]), len(names) - 1)]

    return choose


def assign(
    rows: Iterable[TraceRow],
    *,
    tenants: Mapping[TenantId, float],
    classes: Mapping[ClassName, float],
    seed: int,
) -> list[TraceRow]:
    """Return the rows with tenants and classes drawn by weight for those that have none.

    An empty mapping gives none. Tenants and classes come from streams of their own, one draw a row
    whether used or not, so neither moves the other. ValueError: a weight not above 0.
    """
    tenant, slo_class = _chooser(tenants, seed, "tenant"), _chooser(classes, seed, "class")
    drawn = ((row, tenant(), slo_class()) for row in rows)
    return [
        replace(
            row,
            tenant=mine if row.tenant is None else row.tenant,
            slo_class=served if row.slo_class is None else row.slo_class,
        )
        for row, mine, served in drawn
    ]
