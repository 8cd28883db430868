"""Budgets in money, as LiteLLM's callers name them: `max_budget`, `soft_budget`, `budget_duration`.

Each is the hard or soft limit of a tenant's one budget in dollars. A budget without an end is none of
ours: whatever is given must last for a while that the books keep.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.gateway.audit import written
from headrace.model.budget import Per, Unit, WindowSpec
from headrace.model.deployment import TenantSpec
from headrace.model.evidence import WindowFacts
from headrace.units import MICRO, NS_PER_S, ceil_div

NAMES = ("max_budget", "soft_budget", "budget_duration")
_SPELLED = {Per.MINUTE: "1m", Per.HOUR: "1h", Per.DAY: "1d", Per.MONTH: "30d"}
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800, "mo": 30 * 86_400}
_DURATION = re.compile(r"([0-9]{1,9})(s|m|h|d|w|mo)")
_DURATIONS = {per.ns // NS_PER_S: per for per in Per}


def shown(tenant: TenantSpec) -> dict[str, Any]:
    """Return a tenant's budget in dollars by LiteLLM's names; null where it has none."""
    found = _budget(tenant)
    if found is None:
        return dict.fromkeys(NAMES)
    return dict(zip(NAMES, (found.hard, found.soft, _SPELLED[found.per]), strict=True))


def spending(facts: tuple[WindowFacts, ...], wall: int) -> dict[str, Any]:
    """Return what is spent of a budget in dollars, live requests' estimates included, and its end.

    `wall`: seconds since the epoch. Null where there is no such budget: then no money is counted.
    """
    one = next((each for each in facts if each.unit is Unit.USD), None)
    if one is None:
        return {"spend": None, "budget_reset_at": None}
    ends = wall + ceil_div(one.wait_ns, NS_PER_S)
    return {"spend": one.taken / MICRO, "budget_reset_at": written(ends)}


def budgets(tenant: TenantSpec, told: Mapping[str, Any]) -> tuple[WindowSpec, ...]:
    """Return a tenant's budgets with what is told of money in their place; null takes a limit away.

    Raises ValueError, saying what is wrong.
    """
    others = tuple(one for one in tenant.budgets if one.unit is not Unit.USD)
    kept = shown(tenant)
    hard, soft, duration = (told.get(name, kept[name]) for name in NAMES)
    if hard is None and soft is None:
        if told.get("budget_duration") is not None:
            raise ValueError("`budget_duration` needs `max_budget` or `soft_budget`.")
        return others
    money = {"unit": Unit.USD, "per": _per(duration), "hard": hard, "soft": soft}
    try:
        return (*others, msgspec.convert(money, WindowSpec))
    except msgspec.ValidationError as error:
        message = str(error).replace("$.hard", "$.max_budget").replace("$.soft", "$.soft_budget")
        raise ValueError(message) from None


def _budget(tenant: TenantSpec) -> WindowSpec | None:
    return next((one for one in tenant.budgets if one.unit is Unit.USD), None)


def _per(duration: object) -> Per:
    """Return the while that a duration spells (`1d`, `24h`), if the books keep it."""
    match = _DURATION.fullmatch(duration) if isinstance(duration, str) else None
    if match is not None:
        per = _DURATIONS.get(int(match[1]) * _SECONDS[match[2]])
        if per is not None:
            return per
    known = ", ".join(f"`{spelled}` ({per})" for per, spelled in _SPELLED.items())
    raise ValueError(f"`budget_duration` must be one of {known}, however it is spelt.")
