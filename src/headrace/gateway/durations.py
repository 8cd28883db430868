"""Durations as Go writes and reads them: what routers and SDKs of our neighbourhood speak."""

import re

from headrace.units import NS_PER_MS, NS_PER_S, NS_PER_US, DurationNs, ceil_div

_MINUTE, _HOUR = 60, 3_600
_UNITS = {
    b"ns": 1,
    b"us": NS_PER_US,
    b"ms": NS_PER_MS,
    b"s": NS_PER_S,
    b"m": _MINUTE * NS_PER_S,
    b"h": _HOUR * NS_PER_S,
}
_LONGEST = 32
"""Bytes of one that is read."""
_YEAR_NS = 365 * 24 * _HOUR * NS_PER_S
_TERM = rb"([0-9]{1,9})(?:\.([0-9]{1,9}))?(ns|us|ms|s|m|h)"
_EACH, _WHOLE = re.compile(_TERM), re.compile(rb"(?:" + _TERM + rb")+")


def written(wait: DurationNs) -> str:
    """Return a wait as Go writes it (`250ms`, `1s`, `6m0s`), rounded up, never too short."""
    millis = ceil_div(wait, NS_PER_MS)
    if 0 < millis < NS_PER_S // NS_PER_MS:
        return f"{millis}ms"
    whole = ceil_div(wait, NS_PER_S)
    hours, rest = divmod(whole, _HOUR)
    minutes, secs = divmod(rest, _MINUTE)
    if hours:
        return f"{hours}h{minutes}m{secs}s"
    return f"{minutes}m{secs}s" if minutes else f"{secs}s"


def read(text: bytes) -> DurationNs | None:
    """Return what Go would read (`2s`, `1m30s`, `0.25s`); None unless it is above zero.

    More than a year is a year.
    """
    if len(text) > _LONGEST or not _WHOLE.fullmatch(text):
        return None
    total = 0
    for whole, part, unit in _EACH.findall(text):
        scale = _UNITS[unit]
        total += int(whole) * scale
        if part:
            total += int(part) * scale // 10 ** len(part)
    return DurationNs(min(total, _YEAR_NS)) if total else None
