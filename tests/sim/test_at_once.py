"""Whoever need not wait is sent as if it had queued: the same journal, to the byte."""

import pytest

from headrace.plane import entry
from headrace.sim.faults import Crash, Leavers
from headrace.sim.swarm import draw
from headrace.sim.world import World
from tests.sim.scenes import profile, run, scenario, source


def always_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "at_once", lambda *_: False)


@pytest.mark.parametrize("rate", [2.0, 20.0, 200.0])
def test_the_short_way_changes_nothing(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    one = scenario(
        source(rate=rate),
        source("b", rate / 2, slo_class="batch"),
        faults=(Crash(replica=0, at_s=2.0, back_after_s=1.0), Leavers(share=0.2, within_s=1.0)),
    )
    short = run(one, 5)
    always_queued(monkeypatch)
    assert run(one, 5).journal == short.journal


@pytest.mark.parametrize("seed", range(200, 212))
def test_nor_in_any_world(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, rows = draw(seed, profile())
    quiet = scenario(config=drawn.scenario.deployment)

    def digests() -> list[bytes]:
        seen: list[bytes] = []
        World(quiet, rows, seed, sink=lambda frame, _: seen.append(frame)).run()
        return seen

    short = digests()
    always_queued(monkeypatch)
    assert digests() == short
