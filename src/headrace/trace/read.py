"""Which reader does a trace file need?

One config struct a format, one `match`: the union is the registry.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, assert_never

from msgspec import Meta, Struct, ValidationError, convert

from headrace.trace.azure import read_azure
from headrace.trace.jsonl import read_jsonl
from headrace.trace.lines import TraceError
from headrace.trace.mooncake import BLOCK_TOKENS, read_mooncake
from headrace.trace.row import TraceRow
from headrace.trace.tables import read_arena
from headrace.units import ms


class Own(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="headrace"):
    """Our own JSON lines, as `write_jsonl` writes them."""


class Azure(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="azure"):
    """Azure LLM inference traces of 2023 and 2024, CSV."""


class Arena(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="arena"):
    """The VTC authors' LMSYS arena trace, CSV with tenants."""


class Mooncake(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="mooncake"):
    """Mooncake JSON lines with prefix blocks."""

    block_tokens: Annotated[int, Meta(ge=1, le=1_048_576)] = BLOCK_TOKENS
    """Tokens a hash id stands for. 512: the public traces."""
    spread_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0
    """Tick over which rows of one timestamp are spread evenly, in ms; 0: as written.

    3000 undoes the quantisation of the public conversation trace.
    """


Format = Own | Azure | Arena | Mooncake


def read_trace(
    kind: str, path: Path, options: Mapping[str, object] | None = None
) -> list[TraceRow]:
    """Return a trace's rows, by time, of the format named `kind` with that format's options.

    Raises TraceError for an unknown kind or option and for whatever the file has wrong.
    """
    try:
        how = convert({**(options or {}), "kind": kind}, Format)
    except ValidationError as error:
        raise TraceError(path, None, f"trace kind {kind!r}: {error}") from error
    return read_as(how, path)


def read_as(how: Format, path: Path) -> list[TraceRow]:
    """Return a trace's rows, by time. Raises TraceError."""
    match how:
        case Own():
            return read_jsonl(path)
        case Azure():
            return read_azure(path)
        case Arena():
            return read_arena(path)
        case Mooncake():
            spread_ns = ms(how.spread_ms) if how.spread_ms else None
            return read_mooncake(path, block_tokens=how.block_tokens, spread_ns=spread_ns)
        case _:
            assert_never(how)
