"""How long does a step of so many tokens take, where it was measured and not fitted?

The matrix products of a step take time in stairs rather than along a line: a table of measured points
says so, and steps between two points lie on the line between them.
"""

from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated

from msgspec import Meta, Struct

from headrace.units import MICRO, Ps

_NotNegative = Annotated[float, Meta(ge=0)]
_Point = tuple[Annotated[int, Meta(ge=1)], Annotated[float, Meta(gt=0)]]


class TableFit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Any step, in ms: G(T) + e*A, and with decodes h + c*D + d*KV more; letters as in `MixedFit`."""

    points: Annotated[tuple[_Point, ...], Meta(min_length=2)]
    """G: tokens of the step, decodes and prompt tokens alike, and its time in ms; both rising. Fewer
    tokens than the first point's take its time, more than the last one's follow the last line."""
    h_ms: _NotNegative = 0.0
    """What a step with any decode takes more."""
    c_ms: _NotNegative
    d_ms: _NotNegative
    e_ms: _NotNegative

    def __post_init__(self) -> None:
        """Refuse a table that says two things of one step, or that more tokens take less time."""
        for (low, less), (high, more) in pairwise(self.points):
            if low >= high or less > more:
                msg = f"points must rise: [{low}, {less:g}] comes before [{high}, {more:g}]"
                raise ValueError(msg)


class StepTable(Struct, frozen=True, gc=False):
    """A table in whole picoseconds; no step is shorter than one of fewer tokens."""

    tokens: tuple[int, ...]
    levels: tuple[Ps, ...]
    slopes: tuple[Ps, ...]
    """Of the line from each point on, per token, rounded down."""
    decodes: Ps
    """What a step with any decode takes more."""

    def step_ps(self, tokens: int, *, decodes: bool) -> Ps:
        """Return the time of a step of so many tokens, attention apart, in ps."""
        at = max(bisect_right(self.tokens, tokens) - 1, 0)
        beyond = tokens - self.tokens[at]
        time = self.levels[at] + (self.slopes[at] * beyond if beyond > 0 else 0)
        return Ps(time + self.decodes if decodes else time)

    def scaled(self, ppm: int) -> "StepTable":
        """Return the table of an engine that takes `ppm` millionths of the time."""
        levels = tuple(Ps(level * ppm // MICRO) for level in self.levels)
        return table_through(self.tokens, levels, Ps(self.decodes * ppm // MICRO))


def table_through(tokens: tuple[int, ...], levels: tuple[Ps, ...], decodes: Ps) -> StepTable:
    """Return the table of lines from point to point."""
    steps = pairwise(zip(tokens, levels, strict=True))
    slopes = [Ps((more - less) // (high - low)) for (low, less), (high, more) in steps]
    return StepTable(tokens, levels, (*slopes, slopes[-1]), decodes)


def in_ps(fit: TableFit, level: Callable[[float], Ps], added: Callable[[float], Ps]) -> StepTable:
    """Return a fit's table; `level` turns the ms of a whole step into ps, `added` those of a part."""
    tokens = tuple(tokens for tokens, _ in fit.points)
    return table_through(tokens, tuple(level(ms) for _, ms in fit.points), added(fit.h_ms))
