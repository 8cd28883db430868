"""Reads the public Azure LLM inference traces: CSV of arrival time and lengths.

Format: `TIMESTAMP,ContextTokens,GeneratedTokens` (Azure/AzurePublicDataset, 2023 and 2024), times
of day with up to nine decimals, without a zone or in UTC.
"""

import re
from datetime import date
from functools import lru_cache
from pathlib import Path

from headrace.trace.lines import TraceError, numbered
from headrace.trace.row import TraceRow, too_late
from headrace.units import NS_PER_S, InstantNs, Tokens

HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"
_ROW = re.compile(
    rb"(\d{4}-\d\d-\d\d)[ T]([01]\d|2[0-3]):([0-5]\d):([0-5]\d)(?:\.(\d{1,9}))?(?:\+00:00|Z)?"
    rb",(\d{1,9}),(\d{1,9})"
)
_EXPECTED = (
    "expected TIMESTAMP,ContextTokens,GeneratedTokens such as 2023-11-16 18:15:46.68059,374,44"
)
_HOURS_A_DAY, _MINUTES_AN_HOUR, _SECONDS_A_MINUTE, _DECIMALS = 24, 60, 60, 9


@lru_cache(maxsize=64)
def _day(text: bytes) -> int:
    """Return the days from the beginning of the calendar; ValueError: no such day."""
    return date.fromisoformat(text.decode()).toordinal()


def read_azure(path: Path) -> list[TraceRow]:
    """Return the rows, the first at 0; times are exact to the last decimal given.

    Lengths of 0 count as 1: every request has a prompt and costs at least a token. Rows out of
    order, and everything else unexpected, raise TraceError.
    """
    lines = numbered(path)
    line, header = next(lines, (1, b""))
    if header != HEADER:
        raise TraceError(path, line, f"expected the header {HEADER.decode()}")
    rows: list[TraceRow] = []
    first = last = 0
    for line, text in lines:
        found = _ROW.fullmatch(text)
        if found is None:
            raise TraceError(path, line, _EXPECTED)
        day, hour, minute, second, decimals, given, made = found.groups()
        try:
            hours = _day(day) * _HOURS_A_DAY + int(hour)
        except ValueError:
            raise TraceError(path, line, f"no such day: {day.decode()}") from None
        whole = (hours * _MINUTES_AN_HOUR + int(minute)) * _SECONDS_A_MINUTE + int(second)
        now = whole * NS_PER_S + int((decimals or b"").ljust(_DECIMALS, b"0"))
        if not rows:
            first = last = now
        if now < last:
            raise TraceError(path, line, "arrives before the row above it; expected rows by time")
        if late := too_late(now - first):
            raise TraceError(path, line, late)
        last = now
        rows.append(
            TraceRow(
                at=InstantNs(now - first),
                input_tokens=Tokens(int(given) or 1),
                output_tokens=Tokens(int(made) or 1),
            )
        )
    return rows
