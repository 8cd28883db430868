"""The decision log of a live run can be recomputed, across restarts and full disks."""

import os
from pathlib import Path

import pytest

from headrace.gateway.decisions import DecisionLog
from headrace.gateway.driver import Driver
from headrace.gateway.server import REVISION
from headrace.policy.catalog import canonical
from headrace.report.decisions import Verified, verify_decisions
from tests.gateway.scenes import Gateway, ask, request

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


def logged(path: Path) -> tuple[Gateway, DecisionLog]:
    gateway = Gateway()
    log = DecisionLog(path)
    log.configured(REVISION, canonical(gateway.config))
    gateway.driver = Driver(gateway.clock, gateway.engines, decided=log.decided)
    gateway.driver.start(gateway.config, REVISION)
    return gateway, log


async def test_a_log_goes_on_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    for _ in range(2):
        gateway, log = logged(path)
        gateway.driver.offer(request(1), ask())
        gateway.driver.offer(request(2, "stranger"), ask())
        gateway.driver.stop()
        log.close()
        assert log.dropped == 0
    assert verify_decisions(path) == Verified(count=6)  # entry, route, entry: twice


async def test_a_full_disk_costs_lines_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "decisions.jsonl"
    gateway, log = logged(path)
    real = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, content: real(file, content[:10]))
        gateway.driver.offer(request(1), ask())
    gateway.driver.offer(request(2), ask())
    gateway.driver.stop()
    log.close()
    assert log.dropped == 2
    assert verify_decisions(path) == Verified(count=2)
