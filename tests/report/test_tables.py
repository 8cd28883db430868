"""A person at three in the morning sees goodput, denominators, reasons and who suffers, in that order."""

from collections.abc import Callable

import pytest

from headrace.model.decision import Reason
from headrace.model.ids import PoolName, ReplicaName
from headrace.model.slo import Indicator, Objective, Slo
from headrace.report import words
from headrace.report.beside import latencies_beside, reasons_beside, side_by_side, tenants_beside
from headrace.report.run import ReplicaTotals
from headrace.report.summary import summarise
from headrace.report.tables import TOP, Column, Table, render, render_summary, sufferers
from headrace.units import Tokens, ms
from tests.report.making import Pair, lost, refused, run, served


def pairs() -> list[Pair]:
    return [
        served(0),
        served(1, prefill_ms=3_000, tenant="b"),
        lost(2, tenant="b"),
        refused(3, tenant="b", work_ms=500),
        refused(4, tenant="b", reason=Reason.TOKEN_RATE),
        refused(5, tenant="b", reason=Reason.TOKEN_RATE),
    ]


def test_a_table_is_fixed_width_text() -> None:
    table = Table(
        title="t",
        columns=(Column("name", right=False), Column("n")),
        rows=(("a", "1"), ("longer", "1,000")),
        note="n",
    )
    assert render(table) == ("t\n  name        n\n  a           1\n  longer  1,000\n  n\n")


@pytest.mark.parametrize("evil", ["\x1b[2J", "\n", "\r", "\x9b2J", "\x7f", "\u202e", "\x00"])
def test_no_name_moves_a_terminal(evil: str) -> None:
    columns = (Column("name", right=False), Column("n"))
    plain = evil.replace(evil[0], "?")
    tables = [
        Table(title=f"t{x}", columns=columns, rows=((f"é{x}", "1"),), note=f"n{x}")
        for x in (evil, plain)
    ]
    assert render(tables[0]) == render(tables[1])


def test_the_first_lines_say_goodput_attainment_and_denominators() -> None:
    lines = render_summary(summarise(run(pairs()))).splitlines()
    assert lines[0] == "tenant_first  (by hand, seed 1)"
    assert [line.split()[0] for line in lines[1:9]] == [
        "GOODPUT",
        "ATTAINED",
        "OFFERED",
        "SERVED",
        "ENTERED",
        "ENDED",
        "MISSED",
        "RETRIES",
    ]
    assert "33.3 % of 3 admitted, 16.7 % of 6 offered" in lines[2]
    assert "3 admitted, 0 degraded, 0 deferred, 3 rejected, 0 left before" in lines[5]
    assert "1 ttft" in lines[7]


def test_reasons_come_next_the_most_frequent_first() -> None:
    text = render_summary(summarise(run(pairs())))
    at = text.index("Degraded, refused and lost")
    assert text.index("token rate") > at
    assert text.index("token rate") < text.index("deadline queue") < text.index("Who suffers")


def test_who_suffers_most_stands_first_and_the_rest_is_counted() -> None:
    many = [refused(i, tenant=f"t{i:02}", work_ms=i + 1) for i in range(TOP + 3)]
    table = sufferers(summarise(run(many)))
    assert [row[0] for row in table.rows][:2] == ["t10", "t09"]
    assert len(table.rows) == TOP
    assert table.note == "and 3 more rows"


def test_no_line_ends_in_blanks_and_every_section_has_rows() -> None:
    slos = (Slo(name="s", objectives=(Objective(indicator=Indicator.TTFT, threshold_ms=9),)),)
    totals = ReplicaTotals(
        name=ReplicaName("r"),
        pool=PoolName("p"),
        up_ns=ms(10),
        busy_ns=ms(5),
        steps=1,
        prefill_tokens=Tokens(1),
        output_tokens=Tokens(1),
        preemptions=0,
        prefix_tokens_queried=Tokens(0),
        prefix_tokens_hit=Tokens(0),
    )
    text = render_summary(summarise(run(pairs(), slos=slos, replicas=[totals])))
    assert all(line == line.rstrip() for line in text.splitlines())
    for title in ("Objectives", "Latency", "By prompt length", "Work by tenant", "Engines"):
        assert title in text
    assert "Objectives" not in render_summary(summarise(run(pairs())))


def test_a_run_of_nobody_has_a_report() -> None:
    assert "- of 0 admitted, - of 0 offered" in render_summary(summarise(run([])))


def test_several_runs_stand_side_by_side_by_reason_and_latency() -> None:
    told = [summarise(run(pairs())), summarise(run(pairs()[:1], label="other"))]
    reasons = render(reasons_beside(told))
    assert "rejected: token rate" in reasons
    assert "missed bound: ttft" in reasons
    assert "<= 20.0 ms" in render(latencies_beside(told))
    assert "left before" in render(side_by_side(told))
    rows = {row[0]: row[1:] for row in tenants_beside(told).rows}
    assert rows == {"a": ("100.0 %", "100.0 %"), "b": ("0.0 %", "-")}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (words.percent(1.0), "100.0 %"),
        (words.percent(0.99999), "> 99.9 %"),
        (words.percent(0.00001), "< 0.1 %"),
        (words.percent(0.0), "0.0 %"),
        (words.three(0), "0"),
        (words.three(0.12345), "0.123"),
        (words.three(1234.5), "1,234"),
        (words.big(9_999), "9,999"),
        (words.big(12_345), "12.3 k"),
        (words.big(1_234_567), "1.23 M"),
        (words.duration(ms(999)), "999 ms"),
        (words.duration(ms(1_500)), "1.50 s"),
        (words.signed(-0.5), "-0.500"),
        (words.relative(0.125), "+12.5 %"),
        (words.relative(27), "28.0 times"),
        (words.plural(1, "row"), "1 row"),
        (words.tick(0.30000000000000004), "0.3"),
    ],
)
def test_figures_read_well(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize(
    "show",
    [
        words.percent,
        words.three,
        words.big,
        words.count,
        words.duration,
        words.signed,
        words.relative,
    ],
)
def test_what_is_undefined_is_a_dash(show: Callable[[None], str]) -> None:
    assert show(None) == "-"
