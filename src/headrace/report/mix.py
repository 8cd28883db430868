"""Were two populations of requests drawn from the same mix?

What was measured live before and after a change was never the same requests. Their difference says
something of the change only where classes, tenants, lengths and rate agree (SLO-5).

A difference counts if chance would show a larger one in fewer than one of a thousand comparisons of
equal mixes, and if it is larger than what is too small to matter: large runs are not refused for
what nobody would notice. Few requests hide large differences; checks of lengths and rates say from
which size on they would see one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from math import log, sqrt

from msgspec import Struct

from headrace.model.ids import ClassName, TenantId
from headrace.report.run import Offered
from headrace.report.stats import rounded
from headrace.units import DurationNs

CHANCE = 0.001
"""How often one check may refuse equal mixes."""
TOLERANCE = Fraction(1, 20)
"""Differences up to this are let pass: of two distributions at any length, of shares moved."""
RATE_TOLERANCE = Fraction(1, 10)
"""Likewise of the rates, relative to the first."""
LEAST = 100
"""Requests that a mix must have, and a class in both to have its lengths compared by itself."""
_EXPECTED_LEAST = 5
"""Cells in which fewer are expected are taken together: the test's approximation needs it."""
_NORMAL = 3.2905
"""Two-sided normal quantile of `CHANCE`."""
_NORMAL_ABOVE = 3.0902
"""One-sided."""
_CHI_SQUARE = (10.828, 13.816, 16.266, 18.467, 20.515, 22.458, 24.322, 26.124, 27.877, 29.588)
"""Quantiles by degrees of freedom from 1; beyond, Wilson and Hilferty's approximation."""

Lengths = tuple[tuple[int, int], ...]
"""(tokens, requests of that length), by length."""


class CellMix(Struct, frozen=True, kw_only=True):
    """The offered requests of one tenant's class."""

    tenant: TenantId
    slo_class: ClassName
    input: Lengths
    output: Lengths
    """True lengths."""

    @property
    def requests(self) -> int:
        """How many there were."""
        return sum(number for _, number in self.input)


class Mix(Struct, frozen=True, kw_only=True):
    """What a population was made of."""

    span_ns: DurationNs
    """From the first arrival to the last."""
    cells: tuple[CellMix, ...]

    @property
    def requests(self) -> int:
        """How many there were."""
        return sum(cell.requests for cell in self.cells)


class Check(Struct, frozen=True, kw_only=True, gc=False):
    """One way in which two mixes could differ."""

    name: str
    difference: float
    limit: float
    """Up to which it is chance, or too small to matter."""
    agrees: bool


def mix_of(offered: Sequence[Offered], span_ns: DurationNs) -> Mix:
    """Return what was offered, as far as mixes are compared by it."""
    cells: dict[tuple[TenantId, ClassName], tuple[dict[int, int], dict[int, int]]] = {}
    for one in offered:
        given, made = cells.setdefault((one.tenant, one.slo_class), ({}, {}))
        given[one.input_tokens] = given.get(one.input_tokens, 0) + 1
        made[one.output_tokens] = made.get(one.output_tokens, 0) + 1
    return Mix(
        span_ns=span_ns,
        cells=tuple(
            CellMix(
                tenant=tenant,
                slo_class=slo_class,
                input=tuple(sorted(given.items())),
                output=tuple(sorted(made.items())),
            )
            for (tenant, slo_class), (given, made) in sorted(cells.items())
        ),
    )


def checks(one: Mix, two: Mix) -> list[Check]:
    """Return every check of two mixes; they agree if all of them do.

    Lengths are compared over all requests and within each class and each tenant that has enough.
    """
    sizes = [one.requests, two.requests]
    if min(sizes) < LEAST:
        name = f"requests in the smaller: {min(sizes)}, at least {LEAST} tell anything"
        return [Check(name=name, difference=float(LEAST - min(sizes)), limit=0.0, agrees=False)]
    found = [
        _rates(one, two),
        _shares("share of each tenant", _counts(one, _tenant), _counts(two, _tenant)),
        _shares("share of each class", _counts(one, _class), _counts(two, _class)),
        _shares("share of each tenant's class", _counts(one, _both), _counts(two, _both)),
    ]
    parts: dict[str, tuple[list[CellMix], list[CellMix]]] = {}
    for nth, mix in enumerate((one, two)):
        for cell in mix.cells:
            for name in ("", f" of class {cell.slo_class}", f" of tenant {cell.tenant}"):
                parts.setdefault(name, ([], []))[nth].append(cell)
    for name, (mine, its) in sorted(parts.items()):
        if min(sum(cell.requests for cell in cells) for cells in (mine, its)) >= LEAST:
            found.append(_lengths(f"input lengths{name}", _input(mine), _input(its)))
            found.append(_lengths(f"output lengths{name}", _output(mine), _output(its)))
    return found


def _tenant(cell: CellMix) -> str:
    return cell.tenant


def _class(cell: CellMix) -> str:
    return cell.slo_class


def _both(cell: CellMix) -> str:
    return f"{cell.tenant}/{cell.slo_class}"


def _counts(mix: Mix, key: Callable[[CellMix], str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for cell in mix.cells:
        found[key(cell)] = found.get(key(cell), 0) + cell.requests
    return found


def _input(cells: Iterable[CellMix]) -> dict[int, int]:
    return _pooled(cell.input for cell in cells)


def _output(cells: Iterable[CellMix]) -> dict[int, int]:
    return _pooled(cell.output for cell in cells)


def _pooled(parts: Iterable[Lengths]) -> dict[int, int]:
    found: dict[int, int] = {}
    for part in parts:
        for tokens, number in part:
            found[tokens] = found.get(tokens, 0) + number
    return found


def _lengths(name: str, one: Mapping[int, int], two: Mapping[int, int]) -> Check:
    """Compare by Kolmogorov and Smirnov's largest distance of the two distributions."""
    n, m = sum(one.values()), sum(two.values())
    limit = max(float(TOLERANCE), sqrt(-log(CHANCE / 2) / 2) * sqrt((n + m) / (n * m)))
    return _check(name, distance(one, two), limit)


def distance(one: Mapping[int, int], two: Mapping[int, int]) -> Fraction:
    """Return the largest distance of two distributions, given as counts by value; exact."""
    n, m = sum(one.values()), sum(two.values())
    largest = below = above = 0
    for value in sorted({**one, **two}):
        below += one.get(value, 0)
        above += two.get(value, 0)
        largest = max(largest, abs(below * m - above * n))
    return Fraction(largest, n * m)


def _shares(name: str, one: Mapping[str, int], two: Mapping[str, int]) -> Check:
    """Compare by the share that would have to move, which chi-square may lay to chance.

    Where it does, the limit told is the difference itself, if that is above the tolerance.
    """
    moved = variation(one, two)
    statistic, freedom = chi_square(one, two)
    usual = statistic <= chi_square_limit(freedom) if freedom else True
    return Check(
        name=name,
        difference=rounded(float(moved)),
        limit=rounded(float(max(TOLERANCE, moved) if usual else TOLERANCE)),
        agrees=usual or moved <= TOLERANCE,
    )


def variation(one: Mapping[str, int], two: Mapping[str, int]) -> Fraction:
    """Return the total variation of two sets of shares, given as counts; exact."""
    n, m = sum(one.values()), sum(two.values())
    return (
        sum(
            (
                abs(Fraction(one.get(name, 0), n) - Fraction(two.get(name, 0), m))
                for name in sorted({**one, **two})
            ),
            Fraction(0),
        )
        / 2
    )


def chi_square(one: Mapping[str, int], two: Mapping[str, int]) -> tuple[Fraction, int]:
    """Return the statistic of homogeneity and its degrees of freedom; exact.

    Names of which fewer than five are expected on either side are counted together.
    """
    n, m = sum(one.values()), sum(two.values())
    pairs: list[tuple[int, int]] = []
    rest = (0, 0)
    for name in sorted({**one, **two}):
        mine, its = one.get(name, 0), two.get(name, 0)
        if (mine + its) * min(n, m) >= _EXPECTED_LEAST * (n + m):
            pairs.append((mine, its))
        else:
            rest = (rest[0] + mine, rest[1] + its)
    pairs += [rest] if any(rest) else []
    statistic = sum(
        (Fraction((mine * m - its * n) ** 2, (mine + its) * n * m) for mine, its in pairs),
        Fraction(0),
    )
    return statistic, len(pairs) - 1


def chi_square_limit(freedom: int) -> float:
    """Return what the statistic exceeds by chance once in a thousand."""
    if freedom <= len(_CHI_SQUARE):
        return _CHI_SQUARE[freedom - 1]
    part = 2 / (9 * freedom)
    return float(freedom * (1 - part + _NORMAL_ABOVE * sqrt(part)) ** 3)


def _rates(one: Mix, two: Mix) -> Check:
    """Compare the requests per second, relative to the first, with the noise of Poisson arrivals."""
    n, m = one.requests, two.requests
    noise = _NORMAL * sqrt(1 / n + 1 / m)
    if not one.span_ns or not two.span_ns:
        return _check("rate", Fraction(one.span_ns != two.span_ns), float(RATE_TOLERANCE))
    ratio = Fraction(m * one.span_ns, n * two.span_ns)
    return _check("rate", abs(ratio - 1), max(float(RATE_TOLERANCE), noise))


def _check(name: str, difference: Fraction, limit: float) -> Check:
    return Check(
        name=name,
        difference=rounded(float(difference)),
        limit=rounded(limit),
        agrees=difference <= limit,
    )
