"""What one request of a trace is, and when are two traces the same?

Knows no file format and no policy. A row holds the true output length, so it belongs to the
oracle: drivers keep rows, policies never see one.
"""

from collections.abc import Iterable
from hashlib import sha256
from typing import Annotated

from msgspec import Meta, Struct, json

from headrace.model.ids import ClassName, ModelName, TenantId
from headrace.model.ladder import LEVEL_MAX
from headrace.units import NS_PER_S, InstantNs, Tokens

TOKENS_MAX = 2**31 - 1
"""Most tokens a row may hold on either side, so that sums over a trace stay in 64 bits."""
ID_MAX = 2**63 - 1
"""Largest chunk id: what every JSON reader of 64-bit integers takes."""
AT_MAX = 10 * 366 * 86_400 * NS_PER_S
"""Latest arrival, ten years in: what is later is a unit mistaken, not a trace."""

_Count = Annotated[Tokens, Meta(ge=1, le=TOKENS_MAX)]
_ChunkId = Annotated[int, Meta(ge=0, le=ID_MAX)]
_HASH_DOMAIN = b"headrace.trace/1\n"


class TraceRow(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    rename={"at": "at_ns"},
):
    """One offered request. Bounds hold for rows read from files; code must keep them itself."""

    at: Annotated[InstantNs, Meta(ge=0, le=AT_MAX)]
    """Arrival in ns from the start of the trace; in a file that has dates, from its first row."""
    input_tokens: _Count
    """Prompt tokens, shared prefix included."""
    output_tokens: _Count
    """True output length: what the model writes under `max_tokens`. For the oracle only."""
    max_tokens: _Count | None = None
    """The output bound the caller declares, never below `output_tokens`; None: not told."""
    tenant: TenantId | None = None
    slo_class: ClassName | None = None
    model: ModelName | None = None
    prefix: tuple[_ChunkId, ...] = ()
    """Ids of the leading prompt chunks, chained: equal leading ids are equal leading tokens.

    The prompt may go on beyond the last chunk; that rest is shared with no other row.
    """
    prefix_tokens: Annotated[int, Meta(ge=0, le=TOKENS_MAX)] = 0
    """Tokens in each chunk of `prefix`, the last of which may be partial; 0 without a prefix."""
    session: str | None = None
    """Requests of one conversation or agent; None: stands alone."""
    optional: tuple[_Count, ...] = ()
    """Prompt tokens of each part that may be left out, the most useful first; they stand at its end."""
    lowest: Annotated[int, Meta(ge=0, le=LEVEL_MAX)] = LEVEL_MAX
    """How far down a ladder of lesser forms its caller agrees to go."""

    def __post_init__(self) -> None:
        """Refuse what no request can be, with ValueError."""
        if self.max_tokens is not None and self.max_tokens < self.output_tokens:
            raise ValueError(
                f"output_tokens {self.output_tokens} exceeds max_tokens {self.max_tokens}"
            )
        if sum(self.optional) >= self.input_tokens:
            raise ValueError(
                f"optional parts of {sum(self.optional)} tokens leave nothing of {self.input_tokens}"
            )
        chunks = len(self.prefix)
        if bool(chunks) != bool(self.prefix_tokens):
            raise ValueError(
                f"prefix of {chunks} chunks of {self.prefix_tokens} tokens: give both or neither"
            )
        if chunks and (chunks - 1) * self.prefix_tokens >= self.input_tokens:
            raise ValueError(
                f"an input of {self.input_tokens} tokens holds no {chunks} chunks"
                f" of {self.prefix_tokens}"
            )


def too_late(at: int) -> str | None:
    """Return what is wrong with an arrival beyond `AT_MAX`, or None."""
    if at <= AT_MAX:
        return None
    return f"arrives {at / NS_PER_S:.6g} s in; expected ten years at most"


def trace_hash(rows: Iterable[TraceRow]) -> str:
    """Return the sha256 (hex) of the offered population, every field of every row in order.

    Two runs may be compared only if theirs are equal. Depends on nothing but the rows: equal in
    every process, for every way they were made or stored.
    """
    digest = sha256(_HASH_DOMAIN)
    encode = json.Encoder().encode
    for row in rows:
        fields: tuple[object, ...] = (
            row.at,
            row.input_tokens,
            row.output_tokens,
            row.max_tokens,
            row.tenant,
            row.slo_class,
            row.model,
            row.prefix_tokens,
            row.prefix,
            row.session,
        )
        if row.optional or row.lowest != LEVEL_MAX:  # traces from before there were any keep theirs
            fields += (row.optional, row.lowest)
        digest.update(encode(fields))
        digest.update(b"\n")
    return digest.hexdigest()
