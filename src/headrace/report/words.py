"""Figures as people read them; `-` where there is none. The same in the terminal and in HTML."""

from headrace.units import NS_PER_S, to_ms, to_seconds

NONE = "-"
"""What stands where a figure is undefined."""
_THOUSAND = 1_000.0
_MILLION = 1_000_000.0


def count(value: float | None) -> str:
    """Return a whole number with thousands set apart."""
    return NONE if value is None else f"{round(value):,}"


def big(value: float | None) -> str:
    """Return a large number of tokens in thousands or millions, three digits."""
    if value is None:
        return NONE
    if abs(value) >= _MILLION:
        return f"{three(value / _MILLION)} M"
    return f"{three(value / _THOUSAND)} k" if abs(value) >= 10 * _THOUSAND else count(value)


def three(value: float | None) -> str:
    """Return a number with about three digits."""
    if value is None:
        return NONE
    for least, digits in ((100, 0), (10, 1), (1, 2)):
        if abs(value) >= least:
            return f"{value:,.{digits}f}"
    return "0" if value == 0 else f"{value:.3f}"


def percent(share: float | None) -> str:
    """Return a share in percent; only all is 100.0 %, only none is 0.0 %."""
    if share is None:
        return NONE
    shown = f"{share * 100:.1f}"
    if shown == "100.0" and share < 1:
        shown = "> 99.9"
    elif shown == "0.0" and share > 0:
        shown = "< 0.1"
    return f"{shown} %"


def signed(value: float | None, digits: int = 3) -> str:
    """Return a difference with its sign."""
    return NONE if value is None else f"{value:+,.{digits}f}"


def relative(share: float | None) -> str:
    """Return a relative difference with its sign; a manifold as a factor."""
    if share is None:
        return NONE
    return f"{share * 100:+.1f} %" if share < _MANIFOLD - 1 else f"{three(share + 1)} times"


_MANIFOLD = 5


def tick(value: float) -> str:
    """Return the number at a tick of an axis, without needless zeros."""
    return f"{value:,.6g}"


def duration(nanoseconds: int | None) -> str:
    """Return a duration in ms below a second, else in s."""
    if nanoseconds is None:
        return NONE
    if nanoseconds < NS_PER_S:
        return f"{three(to_ms(nanoseconds))} ms"
    return f"{three(to_seconds(nanoseconds))} s"


def reason(name: str) -> str:
    """Return a reason or outcome in plain words."""
    return name.replace("_", " ")


def plural(number: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def milliseconds(nanoseconds: float) -> str:
    """Return a time in ms, one digit after the point."""
    return f"{to_ms(round(nanoseconds)):,.1f}"


def taken(nanoseconds: int) -> str:
    """Return a time in ms that is taken off."""
    return milliseconds(-nanoseconds) if nanoseconds else milliseconds(0)


def yes(holds: bool) -> str:
    """Return yes or no."""
    return "yes" if holds else "no"
