"""Live runs compare where their mixes agree and their clients kept up, and not otherwise (SLO-5)."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from headrace.cli import main
from headrace.report.client_table import client_table
from headrace.report.compare import NotComparable, Verdict, compare
from headrace.report.live import Client, Report, Window, decoded, difference, report_of
from headrace.report.summary import summarise
from headrace.report.tables import render, render_comparison
from headrace.units import ms
from tests.report.making import refused, run, served

CLIENT = Client(
    url="http://h",
    trusted=False,
    speed=1.0,
    profile="p",
    trace_rows=400,
    sent=400,
    answers={"200": 400},
    usage_input_tokens=1,
    usage_output_tokens=1,
    lateness=None,
    loop_lag_p99_ns=ms(1),
    loop_lag_limit_ns=ms(20),
)


def report(*, trace: str = "a", refuse_every: int = 4, long: bool = False) -> Report:
    """Return a live run in which every so-and-so-manieth request was refused."""
    pairs = [
        refused(nth, at_s=nth / 40, input_tokens=100 + nth % 50)
        if nth % refuse_every == 0
        else served(
            nth,
            at_s=nth / 40,
            gaps_ms=(20,) * 9,
            input_tokens=(900 if long else 100) + nth % 50,
        )
        for nth in range(1, 401)
    ]
    return report_of(run(pairs, trace_hash=trace * 64), CLIENT)


def test_the_same_mix_compares_though_the_requests_differ() -> None:
    found = compare(report(trace="a"), report(trace="b", refuse_every=2))

    assert found.verdict is Verdict.WORSE
    assert found.interval is not None
    assert found.interval[1] < 0
    assert "different requests of one mix" in render_comparison(found)


def test_a_difference_within_chance_is_no_verdict() -> None:
    one, two = report(trace="a"), report(trace="b")
    noisy = tuple(Window(work_ns=100, met_work_ns=met) for met in (60, 90) * 5)
    other = tuple(Window(work_ns=100, met_work_ns=met) for met in (95, 60) * 5)

    found = compare(replace(one, windows=noisy), replace(two, windows=other))

    assert found.verdict is Verdict.UNCLEAR
    assert difference(noisy, noisy) is not None
    assert difference(noisy[:1], other) is None


def test_another_mix_is_not_comparable() -> None:
    with pytest.raises(NotComparable, match=r"different mixes.*input lengths differ by"):
        compare(report(trace="a"), report(trace="b", long=True))


def test_a_live_run_does_not_compare_with_a_simulated_one_of_other_requests() -> None:
    simulated = summarise(run([served(1)], trace_hash="c" * 64))

    with pytest.raises(NotComparable, match="different offered requests"):
        compare(report(), simulated)


def test_a_client_that_lagged_is_not_comparable() -> None:
    late = replace(report(), client=replace(CLIENT, loop_lag_p99_ns=ms(21)))

    with pytest.raises(NotComparable, match="measured itself"):
        compare(report(), late)
    assert late.client is not None
    assert "INVALID" in render(client_table(late.client, 400))


def test_work_priced_differently_is_not_comparable() -> None:
    with pytest.raises(NotComparable, match="priced by p and by q"):
        compare(report(), replace(report(), client=replace(CLIENT, profile="q")))


def test_a_live_run_equals_itself() -> None:
    assert compare(report(), report()).verdict is Verdict.EQUAL


def test_a_report_reads_as_it_was_written() -> None:
    written = msgspec.json.encode(report())

    assert decoded(written) == [report()]
    assert decoded(msgspec.json.encode([summarise(run([served(1)]))]))[0].client is None


def test_the_command_refuses_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name, one in (
        ("before", report(trace="a")),
        ("after", report(trace="b", refuse_every=2)),
        ("other", report(trace="c", long=True)),
    ):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_bytes(msgspec.json.encode(one))
    before, after, other = map(str, files)

    assert main(["compare", before, after]) == 0
    assert "is worse than" in capsys.readouterr().out
    assert main(["compare", before, other]) == 1
    assert "not comparable: different mixes were offered: input" in capsys.readouterr().err
