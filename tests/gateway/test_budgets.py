"""Budgets from outside: what a caller is told of them, before and after they are spent."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.gateway.errors import Fault
from headrace.model.budget import Per, Unit, WindowSpec
from headrace.model.deployment import ModelSpec, TenantSpec
from headrace.model.ids import TenantId
from headrace.model.price import PriceSpec
from headrace.policy.catalog import PlaneConfig
from headrace.units import NS_PER_S
from tests.gateway.managed import Managed
from tests.gateway.scenes import MODEL, Caller, Gateway, deployment, reach
from tests.gateway.test_past import Life

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]
HOUR_S = 3_600


def limited(*budgets: WindowSpec, **more: Any) -> PlaneConfig:
    price = PriceSpec(input=1_000.0, output=1_000.0)
    models = (ModelSpec(name=MODEL, price=price), ModelSpec(name="other", price=price))
    tenants = (TenantSpec(name="free", budgets=budgets, **more),)
    return replace(deployment(tenants=tenants), models=models)


def budget(unit: Unit, per: Per, **limits: float) -> WindowSpec:
    return WindowSpec(unit=unit, per=per, **limits)


def refusal(caller: Caller) -> tuple[int | None, str, str, str | None]:
    error = caller.error
    return caller.status, error["type"], error["code"], caller.headers.get("x-should-retry")


async def test_a_quota_that_refills_in_an_hour_says_so_and_not_to_repeat() -> None:
    gateway = Gateway(config=limited(budget(Unit.REQUESTS, Per.HOUR, hard=1)))
    assert (await gateway.ask(max_tokens=1).done()).status == 200
    refused = await gateway.ask(max_tokens=1).done()
    assert refusal(refused) == (429, "insufficient_quota", "insufficient_quota", "false")
    assert "requests/hour" in refused.error["message"]
    assert int(refused.headers["retry-after"]) >= HOUR_S - 1, "never shortened"
    detail = refused.error["headrace"]
    assert (detail["gate"], detail["reason"], detail["measured"]) == ("budget", "quota_spent", 1)
    await reach(gateway.clock, (HOUR_S - 20) * 1_000)
    soon = await gateway.ask(max_tokens=1).done()
    assert refusal(soon) == (429, "insufficient_quota", "insufficient_quota", None)
    assert 1 <= int(soon.headers["retry-after"]) <= 30
    await reach(gateway.clock, (HOUR_S + 1) * 1_000)
    assert (await gateway.ask(max_tokens=1).done()).status == 200
    gateway.finish()


async def test_a_budget_in_money_is_exceeded_and_one_of_a_minute_is_a_rate() -> None:
    for per, told in (
        (Per.DAY, (429, "insufficient_quota", "budget_exceeded", "false")),
        (Per.MINUTE, (429, "rate_limit_error", "rate_limit_exceeded", None)),
    ):
        gateway = Gateway(config=limited(budget(Unit.USD, per, hard=0.05)))
        statuses = [(await gateway.ask(max_tokens=9).done()).status for _ in range(4)]
        assert statuses[0] == 200
        refused = await gateway.ask(max_tokens=9).done()
        wait = int(refused.headers["retry-after"])
        expected = told if per is Per.DAY or wait <= 60 else (*told[:3], "false")
        assert refusal(refused) == expected
        gateway.finish()


async def test_the_headers_show_the_limit_that_leaves_least_after_this_very_reservation() -> None:
    """A window and a bucket of one unit: one count each, read after the decision (trap 6)."""
    budgets = (
        budget(Unit.REQUESTS, Per.DAY, hard=3),
        budget(Unit.TOKENS, Per.HOUR, hard=5_000),
    )
    gateway = Gateway(config=limited(*budgets, rpm_limit=100, tpm_limit=4_000))
    left = []
    for _ in range(3):
        told = (await gateway.ask(max_tokens=1_000).done()).headers
        left.append((told["x-ratelimit-remaining-requests"], told["x-ratelimit-limit-tokens"]))
        assert told["x-ratelimit-limit-requests"] == "3"
        assert told["x-ratelimit-reset-requests"].startswith(("24h", "23h"))
    assert [requests for requests, _ in left] == ["2", "1", "0"]
    assert left[0][1] == "4000", "the bucket leaves less at first"
    gateway.finish()


async def test_a_soft_limit_is_told_in_a_header_and_costs_nothing_else() -> None:
    soft = budget(Unit.REQUESTS, Per.DAY, soft=1, hard=9)
    gateway = Gateway(config=limited(soft, budget(Unit.USD, Per.MONTH, soft=0.0001)))
    first = await gateway.ask(max_tokens=1).done()
    second = await gateway.ask(max_tokens=1, stream=True).done()
    assert (first.status, second.status) == (200, 200)
    name = "x-headrace-budget-warning"
    assert first.headers[name].startswith("usd/month ")
    assert second.headers[name].startswith("requests/day 2 of 1, usd/month ")
    gateway.finish()


async def test_sessions_are_told_apart_by_their_header_and_kept_by_a_keyed_hash() -> None:
    gateway = Gateway(config=limited(max_parallel_sessions=1))
    one = gateway.ask(max_tokens=50, stream=True, headers={"x-session-id": "alpha"})
    await one.moved()
    same = await gateway.ask(max_tokens=1, headers={"session_id": "alpha"}).done()
    other = await gateway.ask(max_tokens=1, headers={"x-session-id": "beta"}).done()
    assert (same.status, other.status) == (200, 429)
    assert other.error["code"] == "concurrency_limit_exceeded"
    assert "alpha" not in str(gateway.driver.plane.state.ledger.quotas[TenantId("free")].sessions)
    await one.done()
    assert (await gateway.ask(max_tokens=1, headers={"x-session-id": "beta"}).done()).status == 200
    gateway.finish()


async def test_a_budget_outlives_the_process_and_its_window_goes_on(tmp_path: Path) -> None:
    config = limited(budget(Unit.REQUESTS, Per.HOUR, hard=1))
    life = Life(tmp_path, config=config)

    def refused(life: Life) -> bool:
        return isinstance(life.offer("free")._end, Fault)

    assert not refused(life)
    assert refused(life)
    life.stop()
    second = life.next(away_ns=20 * 60 * NS_PER_S, config=config)
    assert refused(second), "what was spent is spent"
    second.die()
    third = second.next(away_ns=41 * 60 * NS_PER_S, config=config)
    assert not refused(third), "an hour has passed on the wall"
    third.die()


async def test_operators_see_what_is_taken_of_each_budget() -> None:
    money = budget(Unit.USD, Per.MONTH, hard=0.5, soft=0.25)
    gateway = Managed(config=limited(budget(Unit.REQUESTS, Per.DAY, hard=9), money))
    assert (await gateway.ask(max_tokens=1).done()).status == 200
    (row,) = (await gateway.look("/tenants")).json["tenants"]
    requests, spent = row["spent"]
    assert (requests["budget"], requests["taken"]) == ("requests/day", "1")
    assert 0 < float(spent["taken"]) < 0.25
    assert row["budgets"][1]["hard"] == 0.5
    gateway.finish()
