"""The benchmark of overload: doors count what they say, cells add up, and tenths are by length."""

from itertools import pairwise
from typing import Any

import pytest

from benchmarks import cells, doors, mixes, overload, overload_table
from benchmarks.doors import Room, bucket, inside_below, open_door, stand, waiting_below
from benchmarks.overload import shorter
from headrace.policy.admission.gates import Length
from headrace.policy.catalog import Window
from headrace.report.run import RunRecord
from headrace.sim.experiment import simulate
from headrace.sim.faults import Repeaters
from headrace.sim.scenario import Scenario
from headrace.trace.builtin import AZURE_CONV
from headrace.trace.row import TraceRow
from headrace.units import InstantNs, Tokens, seconds


def row(at_s: float, given: int = 500, made: int = 20) -> TraceRow:
    return TraceRow(
        at=InstantNs(seconds(at_s)), input_tokens=Tokens(given), output_tokens=Tokens(made)
    )


def test_an_open_door_lets_all_in_and_what_comes_in_time_is_met() -> None:
    rows = [row(nth) for nth in range(3)] + [row(5.0, 60_000)]
    found = stand(mixes.ENGINE, rows, open_door())
    assert found.admitted == [True] * 4
    assert found.met == [True, True, True, False]


def test_caps_hold() -> None:
    rows = [row(0.001 * nth) for nth in range(20)]
    for most in (1, 4):
        for door in (inside_below(most), waiting_below(most)):
            found = stand(mixes.ENGINE, rows, door)
            assert found.admitted == [True] * most + [False] * (20 - most)


def test_a_bucket_refills_by_the_second() -> None:
    door, room = bucket(100.0, 1_000.0), Room(mixes.ENGINE.start())
    given = [door(row(0, 600), InstantNs(seconds(at)), room) for at in (0, 0, 1, 2, 20)]
    assert given == [True, False, False, True, True]


def test_who_is_refused_comes_again_as_often_as_it_would() -> None:
    rows = [row(0.0), row(0.0), row(0.001)]
    once = stand(mixes.ENGINE, rows, inside_below(1))
    again = stand(mixes.ENGINE, rows, inside_below(1), repeaters=Repeaters(times=2))
    assert sum(once.admitted) == 1
    assert sum(again.admitted) > 1
    assert once.tries == 3
    assert 5 <= again.tries <= 7


def test_settings_rise_by_a_quarter_at_most_or_by_one() -> None:
    by_kind: dict[str, list[float]] = {}
    for kind, setting in cells.settings():
        by_kind.setdefault(kind, []).append(setting)
    assert set(by_kind) == set(cells.KINDS)
    for found in by_kind.values():
        for less, more in pairwise(found):
            assert less < more <= max(1.25 * less + 1, less + 1)


def test_tenths_are_by_length_and_shares_of_all() -> None:
    rows = [row(nth / 100, given=1 + nth) for nth in range(100)]
    let = [nth >= 90 or nth % 2 == 0 for nth in range(100)]
    came = mixes.Came(span_s=1.0, rows=rows, admitted=let, met=[False] * 100)
    assert came.deciles() == [0.5] * 9 + [1.0]
    assert came.longest() == pytest.approx(1.0 / 0.55)
    assert came.work() == came.attainment() == 0.0


def test_what_comes_before_the_span_does_not_count() -> None:
    load = shorter(mixes.mixes()["chat"])
    rows = load.rows(5.0, 0)
    came = mixes.came(load, rows, [True] * len(rows), [True] * len(rows))
    assert 0 < len(came.rows) < len(rows)
    assert came.rows[0].at >= load.warm_s * 1e9
    assert came.work() == pytest.approx(came.offered_work())


def test_a_cell_has_ours_and_the_best_of_each_kind() -> None:
    load = mixes.Load(lengths=mixes.mixes()["chat"].lengths, warm_s=1.0, span_s=4.0)
    few = dict(list(cells.settings(12).items()))
    cell = cells.measure(load, 2.0, 20.0, (100, 101), few)
    assert set(cell.ours) == set(Length)
    assert set(cell.best) == set(cells.KINDS)
    assert set(cell.swept) == set(few)
    assert cell.work(Length.FAIR) > 0
    assert cell.best_work(*cells.KINDS) >= cell.best_work("inside")
    assert all(len(each) == 2 for each in cell.ours.values())


def test_the_published_door_that_knows_what_it_let_in_lets_in_less() -> None:
    rows = [row(0.001 * nth, 2_000) for nth in range(40)]
    stale, local = (
        sum(stand(mixes.ENGINE, rows, doors.Forecast(mixes.ENGINE, local=local)).admitted)
        for local in (False, True)
    )
    assert 0 < local < stale == 40


def test_fair_lets_long_prompts_in_and_greedy_does_not() -> None:
    load = mixes.Load(lengths=AZURE_CONV, warm_s=10.0, span_s=40.0)
    fair, greedy = (cells.ours_came(load, 60.0, 7, length, None) for length in Length)
    assert fair.longest() >= 0.4
    assert greedy.longest() < 0.1
    assert fair.work() >= 0.85 * greedy.work()


def test_each_setting_has_its_worst_cell_in_the_table() -> None:
    nothing = mixes.Came(span_s=1.0, rows=[row(0.0)], admitted=[False], met=[False])
    few = {(kind, nth): open_door for kind in cells.KINDS for nth in (1.0, 2.0, 3.0)}

    def cell(load: float, first: float, second: float) -> cells.Cell:
        return cells.Cell(
            load=load,
            ours={length: [nothing] for length in Length},
            swept={(kind, nth): first if nth == 1.0 else second for kind, nth in few},
            best={kind: (2.0, [nothing]) for kind in cells.KINDS} | {"tokens": (3.0, [nothing])},
        )

    table = {"conv": [cell(1.0, 0.4, 0.2), cell(10.0, 0.3, 0.6)], "chat": [cell(2.0, 0.4, 0.4)]}
    worst = overload_table.worst_cells(table, few)
    assert [(one.of_best, one.cell) for one in worst.values()] == [
        (0.5, "conv 10x"),
        (0.5, "conv 1x"),
        (0.5, "conv 1x"),
    ] * 3
    shown = overload_table.text({"once": table}, few)
    assert all(f"\n{place}" in shown for place in ("conv 1x ", "conv 10x ", "chat 2x "))
    assert "\ninside 1        0.50  conv 10x" in shown
    assert shown.count("(3*)") == 3
    assert "(2*)" not in shown, "those on either side were tried"


def test_tenants_and_mixes_are_under_the_same_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def simulated(scene: Scenario, seed: int, rows: list[TraceRow], **more: Any) -> RunRecord:
        seen.append(scene.deployment)
        return simulate(scene, seed, rows[:1], **more)

    monkeypatch.setattr(cells, "simulate", simulated)
    cells.ours_came(mixes.mixes()["chat"], 1.0, 0, Length.FAIR, None)
    overload.beside_hog(2.0, (0,))
    assert len(seen) == 2
    assert seen[0] is seen[1]
    assert seen[0].window == Window()
