"""The decision log: one JSON line per decision, from which every decision can be made again.

A line opens with the agreed header (OBS-1) and then holds the evidence and what was decided in
full. The configuration of each policy revision stands before the first decision under it. No prompt
text and no prompt hash ever occurs: evidence carries counts.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import msgspec
from msgspec import UNSET, Struct, UnsetType

from headrace.model.decision import Admit, Decision, Degrade, Placement, Reason, Reject
from headrace.model.demand import Demand
from headrace.model.evidence import (
    DecisionRecord,
    EntryEvidence,
    EntryRecord,
    LadderRecord,
    RouteEvidence,
    RouteRecord,
)
from headrace.model.ids import ClassName, DecisionId, ReplicaName, RequestId, TenantId
from headrace.policy.catalog import PlaneConfig, decode
from headrace.report.again import decided_again
from headrace.report.stats import ratio
from headrace.units import DurationNs, InstantNs, mib_ceil, to_ms


class Header(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line of a log."""

    format: Literal["headrace.decisions"]
    version: Literal[1]


class SloMs(Struct, frozen=True, kw_only=True, gc=False):
    """The bounds that were decided by, in ms."""

    ttft: float | None
    """None: judged by completion alone."""
    itl: float


class DemandHeader(Struct, frozen=True, kw_only=True, gc=False):
    """The demand that was decided by, for people and scripts."""

    input_tokens: int
    predicted_output_p90: int
    kv_mib_reserved: int
    """Prompt plus p90 output, rounded up to MiB (EX-9)."""
    work_ms_p90: float


class AdmissionHeader(Struct, frozen=True, kw_only=True, gc=False):
    """How admission answered."""

    result: Literal["admit", "degrade", "reject"]
    slack_ms: float
    reason: Reason | None
    """Why it was refused, or is served in a lesser form; None there: its class is at that level."""


class RouteHeader(Struct, frozen=True, kw_only=True, gc=False):
    """Where the request was sent."""

    replica_group: ReplicaName
    prefix_hit: float | None
    """Share of the prompt expected in its prefix cache."""


class ConfigLine(Struct, frozen=True, kw_only=True):
    """The configuration that decisions of one revision were made under."""

    kind: Literal["config"] = "config"
    revision: int
    config: str
    """Canonical bytes, as text."""


class EntryLine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One admission decision."""

    request_id: RequestId
    decision_id: DecisionId
    tenant_class: ClassName
    policy_revision: int
    slo_ms: SloMs
    demand: DemandHeader
    admission: AdmissionHeader
    route: None = None
    kind: Literal["entry"] = "entry"
    at_ns: InstantNs
    tenant: TenantId
    evidence: EntryEvidence
    decision: Decision
    ladder: LadderRecord | UnsetType = UNSET
    """Absent: nothing less than what was asked for was agreed to."""
    observed: Literal[True] | UnsetType = UNSET
    """It had no effect: it is what would have been decided."""
    crc: str = ""
    """CRC-32 of the line before it: finds what recomputing cannot, a changed name or an input that
    decided nothing. It guards against accidents, not against who writes a new one."""


class RouteLine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One dispatch."""

    request_id: RequestId
    decision_id: DecisionId
    tenant_class: ClassName
    policy_revision: int
    slo_ms: SloMs
    demand: DemandHeader
    admission: AdmissionHeader
    route: RouteHeader
    kind: Literal["route"] = "route"
    at_ns: InstantNs
    tenant: TenantId
    slack_ns: int
    ttft_ns: DurationNs | None
    full_demand: Demand
    evidence: RouteEvidence
    placement: Placement
    observed: Literal[True] | UnsetType = UNSET
    crc: str = ""


Line = ConfigLine | EntryLine | RouteLine


class Verified(Struct, frozen=True, kw_only=True):
    """Every decision of a log was made again and came out the same."""

    count: int


class Differs(Struct, frozen=True, kw_only=True):
    """The first line that does not follow from its own evidence."""

    line: int
    """From 1."""
    decision_id: DecisionId | None
    field: str
    """Path of the first difference, such as `decision.slack_ns`."""
    recorded: Any
    recomputed: Any


class BadLog(Exception):  # noqa: N818 - what it is about, not that it is one
    """A file that is no decision log, or a line that cannot be read."""


_ENCODER = msgspec.json.Encoder()
_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    "config": msgspec.json.Decoder(ConfigLine),
    "entry": msgspec.json.Decoder(EntryLine),
    "route": msgspec.json.Decoder(RouteLine),
}
_HEADER = msgspec.json.Decoder(Header)


class _Kind(Struct):
    kind: str


_KIND = msgspec.json.Decoder(_Kind)


def header_line() -> bytes:
    """Return a log's first line."""
    return _ENCODER.encode(Header(format="headrace.decisions", version=1)) + b"\n"


def config_line(revision: int, config: bytes) -> bytes:
    """Return the line of a configuration's canonical bytes; it precedes their decisions."""
    return _ENCODER.encode(ConfigLine(revision=revision, config=config.decode())) + b"\n"


def to_line(record: DecisionRecord, *, observed: bool = False) -> bytes:
    """Return a decision's line, newline included: equal records, equal bytes.

    `observed` marks one that had no effect.
    """
    line = _entry_line(record) if isinstance(record, EntryRecord) else _route_line(record)
    if observed:
        line = msgspec.structs.replace(line, observed=True)
    return _sealed(line) + b"\n"


def to_record(line: EntryLine | RouteLine) -> DecisionRecord:
    """Return the record a line was made of; its header is derived and left out."""
    if isinstance(line, EntryLine):
        return EntryRecord(
            request_id=line.request_id,
            decision_id=line.decision_id,
            at=line.at_ns,
            tenant=line.tenant,
            tenant_class=line.tenant_class,
            policy_revision=line.policy_revision,
            evidence=line.evidence,
            decision=line.decision,
            ladder=None if line.ladder is UNSET else line.ladder,
        )
    return RouteRecord(
        request_id=line.request_id,
        decision_id=line.decision_id,
        at=line.at_ns,
        tenant=line.tenant,
        tenant_class=line.tenant_class,
        policy_revision=line.policy_revision,
        slack_ns=line.slack_ns,
        demand=line.full_demand,
        ttft_ns=line.ttft_ns,
        evidence=line.evidence,
        placement=line.placement,
    )


def read(path: Path) -> Iterator[Line]:
    """Yield a log's lines after the header; raises `BadLog` with the line's number."""
    for _, line, _ in _numbered(path):
        yield line


def verify_decisions(path: Path) -> Verified | Differs:
    """Make every decision of a log again from its evidence; stop at the first that differs.

    Entry decisions are made again by the policies of their revision, placements by those in force
    where they stand (a change moves what still waits), header fields from the evidence; then the
    line's own check. Decisions are numbered without a gap: one that is missing, doubled or out of
    place differs in its `decision_id`. A driver that came back repeats its configuration, and
    counts from its checkpoint. Raises `BadLog` where a line cannot be read.
    """
    configs: dict[int, PlaneConfig] = {}
    in_force: PlaneConfig | None = None
    count = revision = 0
    due: int | None = None
    for number, line, content in _numbered(path):
        if isinstance(line, ConfigLine):
            try:
                in_force = configs[line.revision] = decode(line.config.encode())
            except msgspec.MsgspecError as error:
                raise BadLog(f"line {number}: configuration: {error}") from error
            due = due if line.revision > revision else None
            revision = line.revision
            continue
        if due is not None and line.decision_id != due:
            return _differs(number, line, ("decision_id", line.decision_id, due))
        due = line.decision_id + 1
        config = configs.get(line.policy_revision)
        if config is None or in_force is None:
            known = sorted(configs)
            return _differs(number, line, ("policy_revision", line.policy_revision, known))
        found = _check(line, content, config if isinstance(line, EntryLine) else in_force)
        if found is not None:
            return _differs(number, line, found)
        count += 1
    return Verified(count=count)


ABSENT = "(absent)"
"""What stands for a key that one side lacks."""
Difference = tuple[str, Any, Any]


def _check(line: EntryLine | RouteLine, content: bytes, config: PlaneConfig) -> Difference | None:
    """Return the first difference between a line and what follows from its evidence."""
    if isinstance(line, EntryLine):
        entry = to_record(line)
        assert isinstance(entry, EntryRecord)
        record: DecisionRecord = decided_again(entry, config)
    else:
        if (broken := _inconsistent(line)) is not None:
            return broken
        placement = config.routing.choose(line.evidence, config.stale_after_ns())
        if placement is None:
            return "placement", msgspec.to_builtins(line.placement), None
        record = msgspec.structs.replace(to_record(line), placement=placement)
    again = to_line(record, observed=line.observed is True).rstrip(b"\n")
    if again == content:
        return None
    recorded, recomputed = msgspec.json.decode(content), msgspec.json.decode(again)
    return first_difference(recorded, recomputed) or ("bytes", _text(content), _text(again))


def _inconsistent(line: RouteLine) -> Difference | None:
    """Return where a route's evidence is not about its demand."""
    evidence, demand = line.evidence, line.full_demand
    if evidence.blocks != demand.kv_blocks:
        return "evidence.blocks", evidence.blocks, demand.kv_blocks
    if evidence.output_p50 != demand.output_p50:
        return "evidence.output_p50", evidence.output_p50, demand.output_p50
    return None


def first_difference(recorded: Any, recomputed: Any, path: str = "") -> Difference | None:
    """Return the first (path, recorded, recomputed) at which two JSON values differ."""
    if isinstance(recorded, dict) and isinstance(recomputed, dict):
        keys = [*recorded, *(key for key in recomputed if key not in recorded)]
        for key in keys:
            below = f"{path}.{key}" if path else key
            if key not in recorded or key not in recomputed:
                return below, recorded.get(key, ABSENT), recomputed.get(key, ABSENT)
            found = first_difference(recorded[key], recomputed[key], below)
            if found is not None:
                return found
        return None
    if isinstance(recorded, list) and isinstance(recomputed, list):
        if len(recorded) == len(recomputed):
            for index, pair in enumerate(zip(recorded, recomputed, strict=True)):
                found = first_difference(*pair, f"{path}[{index}]")
                if found is not None:
                    return found
            return None
    elif recorded == recomputed and type(recorded) is type(recomputed):
        return None
    return path, recorded, recomputed


def _differs(number: int, line: EntryLine | RouteLine, found: Difference) -> Differs:
    return Differs(
        line=number,
        decision_id=line.decision_id,
        field=found[0],
        recorded=found[1],
        recomputed=found[2],
    )


def _numbered(path: Path) -> Iterator[tuple[int, Line, bytes]]:
    """Yield (number, line, bytes) of every line after the header."""
    with path.open("rb") as file:
        first = file.readline()
        try:
            _HEADER.decode(first)
        except msgspec.MsgspecError as error:
            raise BadLog(f"{path.name} is no decision log of version 1: {error}") from error
        for number, content in enumerate(file, start=2):
            try:
                yield number, _decoded(content), content.rstrip(b"\n")
            except msgspec.MsgspecError as error:
                raise BadLog(f"line {number}: {error}") from error


def _decoded(content: bytes) -> Line:
    kind = _KIND.decode(content).kind
    if kind not in _DECODERS:
        raise msgspec.ValidationError(f"unknown kind {kind!r}, not one of {', '.join(_DECODERS)}")
    line: Line = _DECODERS[kind].decode(content)
    return line


def _sealed(line: EntryLine | RouteLine) -> bytes:
    unsealed = _ENCODER.encode(line)
    assert unsealed.endswith(_OPEN), "the check is the last field"
    return unsealed[: -len(_CLOSE)] + f"{crc32(unsealed):08x}".encode() + _CLOSE


_CLOSE = b'"}'
_OPEN = b'"crc":"' + _CLOSE


def _entry_line(record: EntryRecord) -> EntryLine:
    evidence, decision = record.evidence, record.decision
    return EntryLine(
        request_id=record.request_id,
        decision_id=record.decision_id,
        tenant_class=record.tenant_class,
        policy_revision=record.policy_revision,
        slo_ms=_slo_ms(evidence.ttft_ns, evidence.gap_ns),
        demand=_demand_header(evidence.demand),
        admission=_admission_header(decision),
        at_ns=record.at,
        tenant=record.tenant,
        evidence=evidence,
        decision=decision,
        ladder=UNSET if record.ladder is None else record.ladder,
    )


def _route_line(record: RouteRecord) -> RouteLine:
    placement, demand = record.placement, record.demand
    return RouteLine(
        request_id=record.request_id,
        decision_id=record.decision_id,
        tenant_class=record.tenant_class,
        policy_revision=record.policy_revision,
        slo_ms=_slo_ms(record.ttft_ns, record.evidence.gap_ns),
        demand=_demand_header(demand),
        admission=AdmissionHeader(result="admit", slack_ms=to_ms(record.slack_ns), reason=None),
        route=RouteHeader(
            replica_group=placement.replica,
            prefix_hit=ratio(placement.cached_tokens, demand.input_tokens),
        ),
        at_ns=record.at,
        tenant=record.tenant,
        slack_ns=record.slack_ns,
        ttft_ns=record.ttft_ns,
        full_demand=demand,
        evidence=record.evidence,
        placement=placement,
    )


def _slo_ms(ttft_ns: DurationNs | None, gap_ns: DurationNs) -> SloMs:
    return SloMs(ttft=None if ttft_ns is None else to_ms(ttft_ns), itl=to_ms(gap_ns))


def _demand_header(demand: Demand) -> DemandHeader:
    return DemandHeader(
        input_tokens=demand.input_tokens,
        predicted_output_p90=demand.output_p90,
        kv_mib_reserved=mib_ceil(demand.kv_bytes),
        work_ms_p90=to_ms(demand.work_p90_ns),
    )


def _admission_header(decision: Decision) -> AdmissionHeader:
    match decision:
        case Admit():
            return AdmissionHeader(result="admit", slack_ms=to_ms(decision.slack_ns), reason=None)
        case Degrade():
            result: Literal["degrade", "reject"] = "degrade"
        case Reject():
            result = "reject"
    return AdmissionHeader(result=result, slack_ms=to_ms(decision.slack_ns), reason=decision.reason)


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")
