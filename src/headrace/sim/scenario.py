"""What is simulated: a deployment, a trace and what goes wrong."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from headrace.model.ids import ClassName, TenantId
from headrace.model.stages import StageTimes
from headrace.policy.batching import Batching
from headrace.policy.batching.chunked import ChunkedPrefill
from headrace.policy.batching.preemption import RECOMPUTE_ONLY, Offers
from headrace.policy.catalog import PlaneConfig
from headrace.policy.ordering.orders import Fifo, Ordering
from headrace.replica.moving import Migration
from headrace.sim.faults import Fault
from headrace.trace.generate import generate
from headrace.trace.lines import TraceError
from headrace.trace.mix import Mix
from headrace.trace.read import Format, Own, read_as
from headrace.trace.reshape import assign, cap_lengths, head, scale
from headrace.trace.row import TraceRow, too_late
from headrace.units import BLOCK_TOKENS

LOAD_MIN, LOAD_MAX = 0.001, 1_000.0
"""How much slower and faster than its own a trace may be offered."""


class TraceFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trace on disk and how it is reshaped before it is offered."""

    path: str
    """Absolute, or relative to the scenario's file, or to HEADRACE_DATA."""
    format: Format = Own()
    first: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    """Offer only the first so many rows."""
    input_max: Annotated[int, Meta(ge=1)] | None = None
    output_max: Annotated[int, Meta(ge=1)] | None = None
    """Cap lengths, for models whose context is shorter than the trace's."""


class Assignment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tenants and classes drawn by weight for rows that have none."""

    tenants: dict[TenantId, Annotated[float, Meta(gt=0)]] = {}
    classes: dict[ClassName, Annotated[float, Meta(gt=0)]] = {}


class Scenario(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One experiment but for its seed."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    deployment: PlaneConfig
    trace: TraceFile | None = None
    mix: Mix | None = None
    """A generated trace instead of a file."""
    load: Annotated[float, Meta(ge=LOAD_MIN, le=LOAD_MAX)] = 1.0
    """Offered rate as a multiple of the trace's own: the same requests come so much faster."""
    assign: Assignment = Assignment()
    batching: Batching = ChunkedPrefill()
    """Token scheduling inside the replicas."""
    engine_ordering: Ordering = Fifo()
    """Who starts first inside the replicas; by share, on counters of weighted tokens. In order of arrival:
    what engines do."""
    noise_percent: Annotated[float, Meta(ge=0, le=50)] = 2.0
    """Step times vary by at most this, in percent. 2: what one engine shows from run to run."""
    preemption: Offers = RECOMPUTE_ONLY
    """How requests give way in the replicas when memory or slots run out."""
    migration: Migration | None = None
    """How running requests get from a replica that drains to others. None: they do not, as in vLLM."""
    starts: StageTimes | None = None
    """How long the stages of a start really take, in all pools that scale. None: as long as is declared."""
    faults: tuple[Fault, ...] = ()
    drain_s: Annotated[float, Meta(ge=0, le=86_400)] = 3_600.0
    """How long after the last arrival the run may go on; what has not ended then is cut off."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a scenario that offers nothing, or two things."""
        if (self.trace is None) is (self.mix is None):
            raise ValueError("expected either trace or mix")


def rows_of(scenario: Scenario, seed: int, folders: tuple[Path, ...] = ()) -> list[TraceRow]:
    """Return what a scenario offers; `folders` are searched for a relative trace path, in order.

    The seed draws generated arrivals and lengths, and tenants and classes of rows without them.
    Raises TraceError, also if there is no such file.
    """
    if scenario.mix is not None:
        rows = generate(scenario.mix, seed)
    else:
        assert scenario.trace is not None
        rows = _read(scenario.trace, folders)
    if scenario.load != 1.0:
        rows = scale(rows, scenario.load)
    named = f"{scenario.name} (generated)" if scenario.trace is None else scenario.trace.path
    for problem in _unfit(rows):
        raise TraceError(Path(named), None, problem)
    given = scenario.assign
    return assign(rows, tenants=given.tenants, classes=given.classes, seed=seed)


def _unfit(rows: list[TraceRow]) -> Iterator[str]:
    """Yield what of a trace cannot be simulated, by any replica."""
    if rows and (late := too_late(rows[-1].at)):
        yield f"the last request {late}"
    chunks = {row.prefix_tokens: None for row in rows if row.prefix}
    if len(chunks) > 1:
        several = " and of ".join(str(tokens) for tokens in sorted(chunks))
        yield f"prefixes in chunks of {several} tokens: a replica knows one size"
    for tokens in chunks:
        if tokens % BLOCK_TOKENS:
            yield f"prefixes in chunks of {tokens} tokens: expected a multiple of {BLOCK_TOKENS}"


def _read(wanted: TraceFile, folders: tuple[Path, ...]) -> list[TraceRow]:
    path = Path(wanted.path)
    tried = [path] if path.is_absolute() else [folder / path for folder in folders]
    found = next((one for one in tried if one.exists()), None)
    if found is None:
        places = " or ".join(str(one.parent) for one in tried) or "any folder"
        problem = f"no such trace in {places}; HEADRACE_DATA names the folder of public traces"
        raise TraceError(path, None, problem)
    rows = read_as(wanted.format, found)
    if wanted.first is not None:
        rows = head(rows, wanted.first)
    if wanted.input_max is not None or wanted.output_max is not None:
        rows = cap_lengths(rows, input_max=wanted.input_max, output_max=wanted.output_max)
    return rows
