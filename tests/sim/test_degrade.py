"""Overload with consent in simulated time: served to the letter of it, to the byte, and verified."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.model.deployment import ClassSpec, ModelSpec, PoolSpec, TenantSpec
from headrace.model.evidence import EntryRecord
from headrace.model.ids import ModelName
from headrace.model.ladder import LadderSpec, Lesser
from headrace.plane.journal import Verified as Replayed
from headrace.plane.journal import verify
from headrace.policy.catalog import PlaneConfig, canonical
from headrace.policy.degrade.level import Degrading
from headrace.report.decisions import (
    Differs,
    Verified,
    config_line,
    header_line,
    to_line,
    verify_decisions,
)
from headrace.report.groups import EntryResult
from headrace.report.summary import summarise
from headrace.report.tables import render_summary
from headrace.sim.engines import kept_chunks, prompt_of
from headrace.sim.experiment import record
from headrace.sim.faults import Crash, Leavers, Restart
from headrace.sim.scenario import Scenario
from headrace.trace.mix import OptionalParts, Ramp, Segment
from headrace.trace.row import TraceRow
from headrace.units import InstantNs, Tokens
from tests.sim.scenes import CHAT, Ran, profile, run, scenario, source

LADDER = LadderSpec(level=3, keep=1, model="small", defer=True)


LONG = replace(CHAT, input_median=2_500, input_max=9_000)


def consenting(ladder: LadderSpec = LADDER, **more: Any) -> PlaneConfig:
    """Return a class with a ladder, tenants that agreed to more and to less, and a smaller model."""
    given: dict[str, Any] = {
        "models": (ModelSpec(name="m"), ModelSpec(name="small")),
        "pools": (
            PoolSpec(name="main", model="m", profile=profile()),
            PoolSpec(name="less", model="small", profile=profile(), classes=("chat",)),
        ),
        "tenants": tuple(TenantSpec(name=f"t{level}", degrade=level) for level in range(4)),
        "classes": (ClassSpec(name="chat", ttft_ms=400.0, degrade=ladder),),
    }
    return PlaneConfig(**(given | more))


def overload(config: PlaneConfig | None = None, **more: Any) -> Scenario:
    """Return a stretch of far more than can be done between two of little."""
    segments = tuple(Segment(at, rate) for at, rate in ((4.0, 1.0), (16.0, 12.0), (85.0, 0.3)))
    sources = [
        replace(
            source(tenant.name, lengths=LONG),
            arrivals=Ramp(segments),
            optional=OptionalParts(share=0.5, parts=3),
            model=ModelName("m"),
        )
        for tenant in (config or consenting()).tenants
    ]
    return scenario(*sources, config=config or consenting(), rows=5_000, **more)


@pytest.fixture(scope="module")
def ran() -> Ran:
    """Return the run that most tests look at, every invariant checked on the way."""
    return run(overload())


def entries(ran: Ran) -> list[EntryRecord]:
    return [one for one in ran.decisions if isinstance(one, EntryRecord)]


def test_every_level_is_used_by_those_who_agreed_to_it(ran: Ran) -> None:
    for level in range(4):
        rows = ran.rows(tenant=f"t{level}", admitted=True)
        levels = {row.level for row in rows}
        assert max(levels) == level
        assert {row.model for row in rows if row.level == 3} <= {"small"}
    refused = [len(ran.rows(tenant=f"t{level}", admitted=False)) for level in range(4)]
    assert refused == sorted(refused, reverse=True)  # the more one agrees to, the more is served
    assert refused[0] > refused[2]


def test_a_class_comes_back_after_the_overload_and_stays(ran: Ran) -> None:
    late = [one for one in entries(ran) if one.ladder is not None and one.at > 75 * 10**9]
    assert late
    assert {one.ladder.base for one in late if one.ladder is not None} == {0}


def test_what_is_put_off_is_told_only_of_those_who_agreed_to_all(ran: Ran) -> None:
    put_off = [one for one in entries(ran) if getattr(one.decision, "defer", False)]
    assert {one.tenant for one in put_off} <= {"t3"}


def test_it_is_the_same_step_by_step_and_replays(ran: Ran) -> None:
    slow = run(overload(), check=False, fast_forward=False)
    assert slow.journal == ran.journal
    assert [one.past for one in slow.world.nodes] == [one.past for one in ran.world.nodes]
    assert isinstance(verify(ran.segments), Replayed)


@pytest.mark.parametrize(
    "faults",
    [
        (Leavers(share=0.5, within_s=3.0), Crash(replica=0, at_s=8.0, back_after_s=4.0)),
        (Restart(at_s=10.0, checkpoint_age_s=2.0),),
    ],
    ids=["crash", "restart"],
)
def test_faults_under_overload_break_nothing(faults: Any) -> None:
    found = run(overload(faults=faults))
    assert {row.level for row in found.rows(admitted=True)} == {0, 1, 2, 3}
    assert not found.world.plane.state.ledger.holds


def log(path: Path, ran: Ran, lines: list[bytes]) -> Path:
    file = path / "decisions.jsonl"
    config = canonical(ran.world.scenario.deployment)
    file.write_bytes(header_line() + config_line(1, config) + b"".join(lines))
    return file


def test_every_form_and_every_level_is_decided_again(ran: Ran, tmp_path: Path) -> None:
    lines = [to_line(one) for one in ran.decisions]
    assert verify_decisions(log(tmp_path, ran, lines)) == Verified(count=len(lines))


def altered(found: EntryRecord, what: str) -> EntryRecord:
    """Return a record with one thing of its ladder changed."""
    ladder = found.ladder
    assert ladder is not None
    first, last = ladder.tried[0], ladder.tried[-1]
    match what:
        case "base":
            ladder = replace(ladder, base=ladder.base - 1)
        case "level before":
            ladder = replace(ladder, pressure=replace(ladder.pressure, level=0))
        case "consent":
            ladder = replace(ladder, facts=replace(ladder.facts, caller=0))
        case "optional parts":
            parts = replace(ladder.facts, optional=ladder.facts.optional[1:])
            ladder = replace(ladder, facts=parts)
        case "evidence of another form":
            ladder = replace(ladder, tried=(first, replace(last, evidence=first.evidence)))
        case "a form left out":
            ladder = replace(ladder, tried=(last,))
        case "a form too many":
            ladder = replace(ladder, tried=(*ladder.tried, last))
        case _:
            return replace(found, ladder=None)
    return replace(found, ladder=ladder)


@pytest.mark.parametrize(
    "what",
    [
        *("base", "level before", "consent", "optional parts", "evidence of another form"),
        *("a form left out", "a form too many", "all of it"),
    ],
)
def test_an_altered_ladder_does_not_follow(ran: Ran, tmp_path: Path, what: str) -> None:
    found = next(
        one
        for one in entries(ran)
        if one.ladder is not None
        and one.ladder.base == one.ladder.pressure.level == 2
        and one.tenant == "t2"
        and [tried.level for tried in one.ladder.tried] == [0, 2]
    )
    path = log(tmp_path, ran, [to_line(altered(found, what))])
    assert isinstance(verify_decisions(path), Differs)
    assert verify_decisions(log(tmp_path, ran, [to_line(found)])) == Verified(count=1)


def test_reports_tell_the_degraded_apart_and_count_them_among_the_admitted(ran: Ran) -> None:
    summary = summarise(record(ran.world, [], "one"))
    total = summary.total
    rows = ran.rows(admitted=True)
    levels = {f"level {n}": sum(row.level == n for row in rows) for n in (1, 2, 3)}
    assert total.degraded_by == levels
    assert total.entry[EntryResult.DEGRADED] == sum(levels.values())
    assert total.admitted == len(rows)
    mine = {one.tenant: one.entry[EntryResult.DEGRADED] for one in summary.by_tenant}
    assert mine == {
        f"t{n}": len([r for r in rows if r.tenant == f"t{n}" and r.level]) for n in range(4)
    }
    assert total.met_work_ns < total.admitted_work_ns <= total.work_ns
    assert "degraded: level 2" in render_summary(summary)


def test_a_step_takes_longer_to_come_back_where_it_is_told_to(ran: Ran) -> None:
    slow = run(overload(consenting(degrading=Degrading(recover_s=20.0))), check=False)
    last = [
        max(one.at for one in entries(each) if one.ladder is not None and one.ladder.base)
        for each in (ran, slow)
    ]
    assert last[0] < last[1]


@pytest.mark.parametrize(
    ("kept", "tokens", "chunks"),
    [(None, 1_000, 3), (0, 400, 1), (1, 700, 1), (2, 1_000, 3), (9, 1_000, 3)],
)
def test_an_engine_gets_the_prompt_without_the_parts_of_lower_rank(
    kept: int | None, tokens: int, chunks: int
) -> None:
    row = TraceRow(
        at=InstantNs(0),
        input_tokens=Tokens(1_000),
        output_tokens=Tokens(9),
        prefix=(1, 2, 3),
        prefix_tokens=256,
        optional=(Tokens(300), Tokens(300)),
    )
    assert kept_chunks(row) == 1
    lesser = Lesser(level=2, model=ModelName("m"), kept=kept)
    assert prompt_of(row, lesser) == (tokens, (1, 2, 3)[:chunks])
    assert prompt_of(row, None) == (1_000, (1, 2, 3))
