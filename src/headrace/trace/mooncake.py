"""Reads Mooncake traces: JSON lines with lengths and the chained ids of prompt blocks.

Takes the open-loop form, where every row has a timestamp. The agentic forms, whose rows start when
others complete, are another kind of load and are refused. `priority` and `delay` are not used.
"""

from pathlib import Path
from typing import Annotated

from msgspec import UNSET, DecodeError, Meta, Struct, UnsetType, json

from headrace.model.ids import ModelName
from headrace.trace.lines import TraceError, numbered
from headrace.trace.reshape import spread
from headrace.trace.row import ID_MAX, TOKENS_MAX, TraceRow, too_late
from headrace.units import DurationNs, InstantNs, Tokens, ceil_div, ms

BLOCK_TOKENS = 512
"""Tokens in one block of the public Mooncake traces."""


_MS_MAX = 9_000_000_000_000
"""Largest timestamp taken, in ms: the year 2255 if counted from 1970, and in ns still 64 bits."""
_Ms = (
    Annotated[int, Meta(ge=-_MS_MAX, le=_MS_MAX)] | Annotated[float, Meta(ge=-_MS_MAX, le=_MS_MAX)]
)
_Count = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]


class _Line(Struct):
    """A line as written; fields not named here are ignored, as the format grows."""

    timestamp: _Ms | None = None
    created_time: _Ms | None = None
    input_length: _Count | None = None
    input_tokens: _Count | None = None
    output_length: _Count | None = None
    output_tokens: _Count | None = None
    hash_ids: tuple[Annotated[int, Meta(ge=0, le=ID_MAX)], ...] = ()
    session_id: str | int | None = None
    model: str | None = None
    schema: str | UnsetType = UNSET
    wait_for: list[str | int] | UnsetType | None = UNSET
    dependencies: list[dict[str, object]] | UnsetType | None = UNSET


def _either(first: int | None, second: int | None, names: str) -> int:
    """Return the field by whichever name it was given."""
    value = second if first is None else first
    if value is None:
        raise ValueError(f"expected {names}")
    return value


def _started(line: _Line) -> InstantNs:
    """Return the arrival in ns, on the file's own clock."""
    if line.schema is not UNSET or line.wait_for is not UNSET or line.dependencies is not UNSET:
        raise ValueError("agentic Mooncake, whose rows wait for each other: not supported")
    at_ms = line.created_time if line.timestamp is None else line.timestamp
    if at_ms is None:
        raise ValueError("expected timestamp or created_time, in ms")
    return InstantNs(ms(at_ms))


def _row(line: _Line, at: InstantNs, block_tokens: int) -> TraceRow:
    """Return the row; ValueError says what was expected."""
    given = _either(line.input_length, line.input_tokens, "input_length or input_tokens")
    made = _either(line.output_length, line.output_tokens, "output_length or output_tokens")
    if len(line.hash_ids) > ceil_div(given or 1, block_tokens):
        raise ValueError(
            f"expected at most {ceil_div(given or 1, block_tokens)} hash_ids for {given} input"
            f" tokens in blocks of {block_tokens}, not {len(line.hash_ids)}: another block size?"
        )
    return TraceRow(
        at=at,
        input_tokens=Tokens(given or 1),
        output_tokens=Tokens(made or 1),
        model=None if line.model is None else ModelName(line.model),
        prefix=line.hash_ids,
        prefix_tokens=block_tokens if line.hash_ids else 0,
        session=None if line.session_id is None else str(line.session_id),
    )


def read_mooncake(
    path: Path, *, block_tokens: int = BLOCK_TOKENS, spread_ns: DurationNs | None = None
) -> list[TraceRow]:
    """Return the rows, the first at 0.

    `block_tokens`: tokens a hash id stands for; the file does not tell. `spread_ns`: the tick to
    which arrivals were quantised (3 s in the public conversation trace), over which rows of one
    timestamp are then spread evenly; None: as written. Lengths of 0 count as 1. Rows out of order,
    and everything else unexpected, raise TraceError.
    """
    decode = json.Decoder(_Line).decode
    rows: list[TraceRow] = []
    first = last = InstantNs(0)
    for number, text in numbered(path):
        try:
            line = decode(text)
            now = _started(line)
            if not rows:
                first = last = now
            if now < last:
                raise ValueError("arrives before the row above it; expected rows by time")  # noqa: TRY301
            if late := too_late(now - first):
                raise ValueError(late)  # noqa: TRY301
            last = now
            rows.append(_row(line, InstantNs(now - first), block_tokens))
        except (DecodeError, ValueError) as error:
            raise TraceError(path, number, str(error)) from error
    if spread_ns is None:
        return rows
    return spread(rows, spread_ns)
