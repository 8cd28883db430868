"""Every line of the decision log follows from its own evidence, and an edit does not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.config.profiles import load_profile
from headrace.model.decision import Reject
from headrace.model.deployment import ModelSpec, PoolSpec, TenantSpec
from headrace.model.effect import Decided
from headrace.model.event import ConfigChanged, ReplicaUp, RequestArrived
from headrace.model.evidence import DecisionRecord, EntryRecord, RouteRecord
from headrace.model.ids import Incarnation, ModelName, PoolName, ReplicaName, RequestId, TenantId
from headrace.model.request import Request
from headrace.plane.core import Plane
from headrace.policy.admission.gates import Gates
from headrace.policy.catalog import PlaneConfig, canonical
from headrace.policy.routing.seconds import Seconds
from headrace.report.decisions import (
    BadLog,
    ConfigLine,
    Differs,
    EntryLine,
    RouteLine,
    Verified,
    config_line,
    first_difference,
    header_line,
    read,
    to_line,
    to_record,
    verify_decisions,
)
from headrace.units import Bytes, InstantNs, Tokens, blocks_for, ms

CONFIG = PlaneConfig(
    models=(ModelSpec(name="llama"),),
    pools=(PoolSpec(name="p", model="llama", profile=load_profile("a100-8b-tp1")),),
    tenants=(TenantSpec(name="a"), TenantSpec(name="b", rpm_limit=2)),
)
OTHER = replace(CONFIG, admission=Gates(margin_ms=120.0), routing=Seconds(stale_ms=900.0))


def decided() -> list[DecisionRecord]:
    """Return what a plane decides about requests of every fate."""
    plane, found = Plane(), []
    events: list[tuple[int, Any]] = [(0, ConfigChanged(revision=1, config=canonical(CONFIG)))]
    events += [
        (1, ReplicaUp(replica=ReplicaName(f"r{i}"), incarnation=Incarnation(i), pool=PoolName("p")))
        for i in range(2)
    ]
    for number in range(40):
        request = Request(
            id=RequestId(number + 1),
            tenant=TenantId("ab?"[number % 3]),
            model=ModelName("llama"),
            input_tokens=Tokens(500 * (number % 7) + 1),
            max_output=Tokens(300) if number % 2 else None,
        )
        events.append((2 + number, RequestArrived(request)))
    for at, event in events:
        effects = plane.handle(event, now=InstantNs(int(ms(at))))
        found += [effect.record for effect in effects if isinstance(effect, Decided)]
    return found


RECORDS = decided()


def log_of(*lines: bytes, config: PlaneConfig = CONFIG) -> bytes:
    return header_line() + config_line(1, canonical(config)) + b"".join(lines)


def written(path: Path, *lines: bytes, config: PlaneConfig = CONFIG) -> Path:
    path = path / "decisions.jsonl"
    path.write_bytes(log_of(*lines, config=config))
    return path


def test_the_log_holds_every_kind_of_decision() -> None:
    entries = [record for record in RECORDS if isinstance(record, EntryRecord)]
    assert len(entries) == 40
    assert 0 < sum(isinstance(record.decision, Reject) for record in entries) < 40
    assert any(isinstance(record, RouteRecord) for record in RECORDS)


def test_what_was_decided_is_verified(tmp_path: Path) -> None:
    path = written(tmp_path, *map(to_line, RECORDS))
    assert verify_decisions(path) == Verified(count=len(RECORDS))


def test_what_was_only_observed_is_marked_and_verified_alike(tmp_path: Path) -> None:
    lines = [to_line(record, observed=True) for record in decided()]
    assert all(b'"observed":true' in line for line in lines)
    assert verify_decisions(written(tmp_path, *lines)) == Verified(count=len(lines))
    assert not any(b"observed" in to_line(record) for record in decided())
    bare = [line.replace(b'"observed":true,', b"") for line in lines]
    assert isinstance(verify_decisions(written(tmp_path, *bare)), Differs)


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    lines = list(read(written(tmp_path, *map(to_line, RECORDS))))
    assert isinstance(lines[0], ConfigLine)
    assert lines[0].config.encode() == canonical(CONFIG)
    back = [to_record(line) for line in lines[1:] if isinstance(line, EntryLine | RouteLine)]
    assert back == RECORDS


def test_a_line_opens_with_the_agreed_header() -> None:
    for record in RECORDS:
        line = msgspec.json.decode(to_line(record))
        assert list(line)[:8] == [
            "request_id",
            "decision_id",
            "tenant_class",
            "policy_revision",
            "slo_ms",
            "demand",
            "admission",
            "route",
        ]
        assert set(line["slo_ms"]) == {"ttft", "itl"}
        assert list(line["demand"]) == [
            "input_tokens",
            "predicted_output_p90",
            "kv_mib_reserved",
            "work_ms_p90",
        ]
        assert list(line["admission"]) == ["result", "slack_ms", "reason"]
        if isinstance(record, RouteRecord):
            assert list(line["route"]) == ["replica_group", "prefix_hit"]


def test_reserved_kv_is_the_demand_rounded_up_to_mib() -> None:
    record = next(record for record in RECORDS if isinstance(record, EntryRecord))
    demand = replace(record.evidence.demand, kv_bytes=Bytes((8_200 + 480) * 131_072))
    record = replace(record, evidence=replace(record.evidence, demand=demand))
    assert msgspec.json.decode(to_line(record))["demand"]["kv_mib_reserved"] == 1085
    assert blocks_for(8_200 + 480) * 16 * 131_072 == 1086 << 20


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every value in a decoded line."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from leaves(inner, (*path, key))
    else:
        yield path


def edited(value: Any) -> Any:
    """Return another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return f"{value}x" if isinstance(value, str) else 7


@pytest.mark.parametrize("kind", [EntryRecord, RouteRecord])
def test_any_edited_field_is_caught(tmp_path: Path, kind: type[DecisionRecord]) -> None:
    records = [record for record in RECORDS if isinstance(record, kind)]
    record = records[len(records) // 2]
    line = to_line(record)
    paths = list(leaves(msgspec.json.decode(line)))
    assert len(paths) > 60
    for path in paths:
        told = msgspec.json.decode(line)
        inner = told
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = edited(inner[path[-1]])
        edit = written(tmp_path, msgspec.json.encode(told) + b"\n")
        try:
            found = verify_decisions(edit)
        except BadLog:  # no such kind, reason or type: it cannot even be read
            continue
        assert isinstance(found, Differs), path
        assert found.line == 3


def test_the_first_difference_is_named(tmp_path: Path) -> None:
    record = next(record for record in RECORDS if isinstance(record, EntryRecord))
    changed = replace(record.decision, slack_ns=record.decision.slack_ns + 1_000_000)
    found = verify_decisions(written(tmp_path, to_line(replace(record, decision=changed))))
    assert isinstance(found, Differs)
    assert (found.line, found.decision_id) == (3, record.decision_id)
    assert found.field == "admission.slack_ms"
    assert found.recorded == pytest.approx(found.recomputed + 1)


def test_a_placement_that_no_policy_would_choose_is_named(tmp_path: Path) -> None:
    record = next(record for record in RECORDS if isinstance(record, RouteRecord))
    closed = tuple(replace(view, slots=0) for view in record.evidence.replicas)
    record = replace(record, evidence=replace(record.evidence, replicas=closed))
    found = verify_decisions(written(tmp_path, to_line(record)))
    assert isinstance(found, Differs)
    assert (found.field, found.recomputed) == ("placement", None)


@pytest.mark.parametrize("name", ["blocks", "output_p50"])
def test_a_placement_must_be_about_its_own_demand(tmp_path: Path, name: str) -> None:
    record = next(record for record in RECORDS if isinstance(record, RouteRecord))
    other = replace(record.evidence, **{name: 3})
    found = verify_decisions(written(tmp_path, to_line(replace(record, evidence=other))))
    assert isinstance(found, Differs)
    assert found.field == f"evidence.{name}"


def test_decisions_are_judged_by_the_policies_of_their_revision(tmp_path: Path) -> None:
    lines = list(map(to_line, RECORDS))
    found = verify_decisions(written(tmp_path, *lines, config=OTHER))
    assert isinstance(found, Differs)
    path = written(tmp_path, *lines, config_line(2, canonical(OTHER)))
    assert verify_decisions(path) == Verified(count=len(RECORDS))
    path = written(tmp_path, config_line(2, canonical(OTHER)), lines[0])
    assert verify_decisions(path) == Verified(count=1)


def test_a_revision_without_a_configuration_is_named(tmp_path: Path) -> None:
    line = to_line(replace(RECORDS[0], policy_revision=9))
    found = verify_decisions(written(tmp_path, line))
    assert isinstance(found, Differs)
    assert (found.field, found.recorded, found.recomputed) == ("policy_revision", 9, [1])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no decision log of version 1"),
        (b"{}\n", "no decision log of version 1"),
        (b'{"format":"headrace.decisions"}\n', "no decision log of version 1"),
        (b'{"format":"headrace.decisions","version":2}\n', "no decision log of version 1"),
        (b'{"format":"headrace.decisions","version":1,"a":0}\n', "no decision log of version 1"),
        (header_line() + b"{}\n", "line 2: "),
        (header_line() + b'{"kind":"poem"}\n', "line 2: unknown kind 'poem'"),
        (header_line() + b'{"kind":"config","revision":1,"config":"{}"}\n', "line 2: configur"),
        (log_of(to_line(RECORDS[0])[:200]), "line 3: "),
    ],
    ids=["empty", "bare", "half", "version", "more", "no kind", "kind", "config", "torn"],
)
def test_a_file_that_cannot_be_read_says_where(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadLog, match=why):
        verify_decisions(path)


def test_equal_records_give_equal_bytes_and_one_line_each() -> None:
    assert list(map(to_line, RECORDS)) == list(map(to_line, decided()))
    assert all(to_line(record).count(b"\n") == 1 for record in RECORDS)


@pytest.mark.parametrize("change", ["dropped", "doubled", "swapped"])
@pytest.mark.parametrize("at", range(1, len(RECORDS) - 1, 7))
def test_a_line_out_of_its_place_is_named(tmp_path: Path, change: str, at: int) -> None:
    lines = list(map(to_line, RECORDS))
    match change:
        case "dropped":
            del lines[at]
        case "doubled":
            lines.insert(at, lines[at])
        case _:
            lines[at], lines[at + 1] = lines[at + 1], lines[at]
    found = verify_decisions(written(tmp_path, *lines))
    assert isinstance(found, Differs)
    assert found.field == "decision_id"
    assert found.line == 3 + at + (change == "doubled")
    assert found.recomputed == RECORDS[at].decision_id + (change == "doubled")


def test_a_driver_that_comes_back_counts_from_its_checkpoint(tmp_path: Path) -> None:
    lines, again = list(map(to_line, RECORDS)), config_line(1, canonical(CONFIG))
    path = written(tmp_path, *lines, again, *lines[10:])
    assert verify_decisions(path) == Verified(count=2 * len(lines) - 10)
    newer = config_line(2, canonical(CONFIG))
    found = verify_decisions(written(tmp_path, *lines, newer, *lines[10:]))
    assert isinstance(found, Differs)  # a change of configuration starts nothing anew


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=8,
)


@given(JSON, JSON)
def test_two_values_differ_somewhere_or_are_equal(one: Any, two: Any) -> None:
    assert first_difference(one, one) is None
    same = msgspec.json.encode(one, order="sorted") == msgspec.json.encode(two, order="sorted")
    assert (first_difference(one, two) is None) is same


def test_lines_are_typed() -> None:
    for record in RECORDS:
        kind = EntryLine if isinstance(record, EntryRecord) else RouteLine
        line = msgspec.json.decode(to_line(record), type=kind)
        assert isinstance(line, EntryLine | RouteLine)
        assert to_record(line) == record
