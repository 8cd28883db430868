"""What may a tenant use up within an hour, a day or a month, in which unit, and what does a request take?"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from headrace.units import MICRO, NS_PER_S, SUM_MAX, DurationNs, MicroUsd, Tokens, WorkNs

_Amount = Annotated[float, Meta(gt=0, le=1e15)]
_HOUR = 3_600 * NS_PER_S


class Unit(StrEnum):
    """What a budget counts."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    """Input plus output."""
    WORK = "work"
    """GPU seconds, as the profile has them for the tokens."""
    USD = "usd"
    """US dollars, by the price of the model."""


class Per(StrEnum):
    """How long a budget has to last. All of fixed length, from the tenant's first request on."""

    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"
    MONTH = "month"
    """Thirty days."""

    @property
    def ns(self) -> DurationNs:
        """The length."""
        return _LENGTHS[self]


_LENGTHS = {
    Per.MINUTE: DurationNs(60 * NS_PER_S),
    Per.HOUR: DurationNs(_HOUR),
    Per.DAY: DurationNs(24 * _HOUR),
    Per.MONTH: DurationNs(30 * 24 * _HOUR),
}
_SCALE = {Unit.REQUESTS: 1, Unit.TOKENS: 1, Unit.WORK: NS_PER_S, Unit.USD: MICRO}
"""Of the books' whole units in one of the configuration's: ns of work, millionths of a dollar."""


def written_amount(unit: Unit, amount: int) -> str:
    """Return an amount of the books in the configuration's unit."""
    scale = _SCALE[unit]
    return str(amount) if scale == 1 else f"{amount / scale:.6g}"


class WindowSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A budget for a while: what is left over at its end does not go on, nor does a debt."""

    unit: Unit
    """requests, tokens, work (GPU seconds) or usd."""
    per: Per
    """minute, hour, day or month (30 days)."""
    hard: _Amount | None = None
    """Beyond it requests are refused. None: never."""
    soft: _Amount | None = None
    """Beyond it requests are let in, warned and counted. None: no warning."""

    def __post_init__(self) -> None:
        """Refuse a budget that limits nothing, or warns when it is too late."""
        if self.hard is None and self.soft is None:
            raise ValueError("a budget needs `hard` or `soft`")
        if self.hard is not None and self.soft is not None and self.soft > self.hard:
            raise ValueError(f"soft {self.soft:g} is above hard {self.hard:g}")

    @property
    def name(self) -> str:
        """As errors, metrics and logs call it: `tokens/day`."""
        return f"{self.unit}/{self.per}"

    def hard_amount(self) -> int | None:
        """Return the hard limit in the books' whole units."""
        return _whole(self.unit, self.hard)

    def soft_amount(self) -> int | None:
        """Return the soft limit in the books' whole units."""
        return _whole(self.unit, self.soft)


def _whole(unit: Unit, amount: float | None) -> int | None:
    return None if amount is None else min(SUM_MAX, int(amount * _SCALE[unit]))


class Take(Struct, frozen=True, kw_only=True, gc=False):
    """What one request takes of budgets: expected while it is live, then as it came."""

    tokens: Tokens = Tokens(0)
    work_ns: WorkNs = WorkNs(0)
    micro_usd: MicroUsd = MicroUsd(0)

    def of(self, unit: Unit) -> int:
        """Return the amount in the books' whole units; a request is one."""
        match unit:
            case Unit.REQUESTS:
                return 1
            case Unit.TOKENS:
                return self.tokens
            case Unit.WORK:
                return self.work_ns
            case Unit.USD:
                return self.micro_usd


NOTHING = Take()
