"""Pools that go by another autoscaler's rule, in virtual time, on the requests that ours is given."""

from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.model.scaling import Signal
from headrace.model.scaling_spec import By
from headrace.plane.journal import Verified, verify
from headrace.policy.catalog import canonical, passing
from headrace.report.decisions import Verified as Recomputed
from headrace.report.decisions import (
    config_line,
    header_line,
    to_line,
    verify_decisions,
)
from headrace.sim.experiment import describe
from tests.sim.scaled import records, run, scaled, starts, steady
from tests.sim.scenes import Ran
from tests.sim.test_groups import QUICK

CROWD = ((0.0, 20.0, 1.0), (20.0, 40.0, 14.0), (40.0, 200.0, 0.1))
RULES = pytest.mark.parametrize("by", [By.UTILIZATION, By.QUEUE, By.TOKENS])


@cache
def crowd(by: By) -> Ran:
    """Return a run with a crowd of 20 s before an open door, under one rule."""
    settings = replace(QUICK, by=by, times=starts(10), in_window_s=45.0)
    scenario = scaled(settings)
    return run(replace(scenario, deployment=passing(scenario.deployment)), rows=steady(CROWD))


@RULES
def test_a_crowd_brings_groups_by_every_rule_and_its_end_takes_them_away(by: By) -> None:
    ran = crowd(by)
    ready = [one.decision.supply.ready for one in records(ran)]
    assert max(ready) > 1
    assert ready[-1] < max(ready)
    assert {one.decision.winner for one in records(ran)} - {None} == {Signal(by)}
    assert isinstance(verify(ran.segments), Verified)


@RULES
def test_its_decisions_are_made_again_from_their_log(by: By, tmp_path: Path) -> None:
    ran = crowd(by)
    config = canonical(ran.world.scenario.deployment)
    path = tmp_path / "log"
    path.write_bytes(header_line() + config_line(1, config) + b"".join(map(to_line, ran.decisions)))
    assert isinstance(verify_decisions(path), Recomputed)


@RULES
def test_a_fast_forward_is_exact_for_what_it_goes_by(by: By) -> None:
    rows = steady(((0.0, 16.0, 4.0), (16.0, 46.0, 0.5)))
    scenario = scaled(replace(QUICK, by=by, times=starts(10)))
    jumps, steps = (
        run(scenario, rows=rows, fast_forward=one, check=False) for one in (True, False)
    )
    assert jumps.journal == steps.journal


def test_a_report_says_by_which_rule_it_came_to_be() -> None:
    ours = describe(scaled(QUICK))
    assert describe(scaled(replace(QUICK, by=By.QUEUE))) == f"{ours}, scaled by queue"
