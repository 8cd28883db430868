"""Reads small CSV tables: the VTC arena trace and lists of lengths.

Columns are found by the names in the header, so further ones do no harm.
"""

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

from headrace.model.ids import TenantId
from headrace.trace.lines import TraceError, numbered
from headrace.trace.row import TraceRow, too_late
from headrace.units import NS_PER_S, InstantNs, Tokens

_COUNT = re.compile(r"\d{1,9}")
_DECIMAL = re.compile(r"\d{1,12}(\.\d{1,20})?([eE][+-]?\d{1,2})?")


def _records(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, the named columns' cells) below the header; no quoting."""
    lines = numbered(path)
    line, header = next(lines, (1, b""))
    names = header.decode("utf-8", "replace").split(",")
    if missing := [column for column in columns if column not in names]:
        raise TraceError(path, line, f"expected a header with {','.join(missing)}")
    places = [names.index(column) for column in columns]
    for line, text in lines:
        cells = text.decode("utf-8", "replace").split(",")
        if len(cells) != len(names):
            raise TraceError(path, line, f"expected {len(names)} cells, not {len(cells)}")
        yield line, [cells[place] for place in places]


def _count(path: Path, line: int, text: str) -> Tokens:
    """Return a token count; 0 counts as 1."""
    if not _COUNT.fullmatch(text):
        raise TraceError(path, line, f"expected a count of tokens, not {text!r}")
    return Tokens(int(text) or 1)


def read_arena(path: Path) -> list[TraceRow]:
    """Return the rows of `arrival_s,tenant,input_length,output_length`, the first at 0.

    Times are rounded once to whole ns. Lengths of 0 count as 1. Raises TraceError.
    """
    rows: list[TraceRow] = []
    first = last = 0
    columns = ("arrival_s", "tenant", "input_length", "output_length")
    for line, (arrival, tenant, given, made) in _records(path, columns):
        if not _DECIMAL.fullmatch(arrival):
            raise TraceError(path, line, f"expected arrival_s in seconds, not {arrival!r}")
        now = round(Fraction(arrival) * NS_PER_S)
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
                input_tokens=_count(path, line, given),
                output_tokens=_count(path, line, made),
                tenant=TenantId(tenant),
            )
        )
    return rows


def read_lengths(path: Path) -> list[tuple[int, int]]:
    """Return the (input, output) tokens of a table `input_length,output_length`, in its order.

    Lengths of 0 count as 1. Raises TraceError.
    """
    return [
        (_count(path, line, given), _count(path, line, made))
        for line, (given, made) in _records(path, ("input_length", "output_length"))
    ]
