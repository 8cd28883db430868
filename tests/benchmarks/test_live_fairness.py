"""What the benchmark of live fairness reads off scrapes, and how it judges."""

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client import generate_latest

from benchmarks import live_fairness
from benchmarks.live_fairness import (
    LARGE,
    QUICK,
    SMALL,
    Look,
    Seen,
    configured,
    deviation,
    gap,
    judged,
    look,
    spans,
    told_apart,
)
from headrace.config.profiles import load_profile
from headrace.config.schema import Settings
from headrace.gateway.metrics import Sheet, _Fixed
from headrace.model.ids import TenantId

EVEN = {SMALL: 1, LARGE: 1}


def seen_at(at: float, small: float, large: float, *, waits: float = 1, emptied: float = 0) -> Look:
    return Look(
        at,
        {"small": small, "large": large},
        {"small": waits, "large": 2},
        {"small": emptied, "large": 0},
        output=10 * at,
        held=40_000,
    )


def served(small: float, large: float) -> list[Look]:
    """Return looks at tenants who are served at steady rates."""
    return [seen_at(nth / 10, small * nth, large * nth) for nth in range(140)]


def run_of(looks: list[Look], lag_ms: float = 1.0) -> Seen:
    return Seen(looks=looks, lag_ms=1.0, gateway_ms=lag_ms)


def test_a_scrape_is_read_as_the_gateway_writes_it() -> None:
    sheet = Sheet()
    sheet.put("service", 7e9, "m", "small", "tokens-1")
    sheet.put("service", 1.0, "m", "large", "tokens-1")
    sheet.put("served_output_tokens", 30, "m", "small")
    sheet.put("served_output_tokens", 12, "m", "large")
    sheet.put("tenant_queued_requests", 3, "m", "small")
    sheet.put("tenant_queue_emptied", 2, "m", "small")
    sheet.put("replica_kv_blocks_used", 5, "m", "p", "p-0")
    found = look(1.5, generate_latest(_Fixed(sheet.metrics())))
    assert found == Look(1.5, {"small": 7e9, "large": 1}, {"small": 3}, {"small": 2}, 42, 80)


def test_a_stretch_ends_where_a_queue_was_empty_at_a_scrape_or_between_two() -> None:
    looks = [
        seen_at(0, 0, 0),
        seen_at(1, 1, 1),
        seen_at(2, 2, 2, emptied=1),
        seen_at(3, 3, 3, emptied=1),
        seen_at(4, 4, 4, waits=0, emptied=1),
        seen_at(5, 5, 5, emptied=1),
    ]
    assert [[one.at for one in span] for span in spans(looks)] == [[0, 1], [2, 3], [5]]


def test_the_difference_is_the_largest_of_any_interval() -> None:
    span = [seen_at(nth, had, 10) for nth, had in enumerate((10, 30, 5, 25))]
    assert gap(span, EVEN) == 25
    assert gap(span, {SMALL: 5, LARGE: 1}) == 5


def test_shares_are_taken_over_windows_of_the_stretch() -> None:
    span = [seen_at(nth, small, 10 * nth) for nth, small in enumerate((0, 10, 20, 50, 60, 70))]
    assert deviation(span, EVEN, 1.0) == pytest.approx(30 / 40 - 1 / 2)
    assert deviation(span, EVEN, 5.0) == pytest.approx(70 / 120 - 1 / 2)
    assert deviation(span, EVEN, 6.0) == 0, "no window is as long"


def test_equal_shares_hold_every_claim_and_a_hog_does_not() -> None:
    claims, told = judged(run_of(served(1e8, 1e8)), QUICK, EVEN, 100)
    assert [claim.claim for claim in claims if not claim.holds] == []
    assert told["both_backlogged_s"] == pytest.approx(13.9)
    fifo = run_of(served(1e9, 3e9))
    claims, told = judged(fifo, QUICK, EVEN, 100)
    assert [claim.claim for claim in claims if not claim.holds] == [
        "largest difference in service by weight",
        "share deviation over 7 s",
    ]
    assert all(claim.holds for claim in told_apart(fifo, QUICK, told))


def test_without_a_backlog_nothing_is_claimed_to_hold() -> None:
    looks = [replace(one, waiting={"large": 3.0}) for one in served(1, 1)]
    claims, _ = judged(run_of(looks), QUICK, EVEN, 100)
    assert "longest time both are backlogged, of what is offered" in [
        claim.claim for claim in claims if not claim.holds
    ]


def test_a_run_on_a_busy_machine_claims_nothing_but_that() -> None:
    seen = run_of(served(1, 1), lag_ms=25.0)
    [claim], told = judged(seen, QUICK, EVEN, 100)
    assert not claim.holds
    assert "invalid" in claim.claim
    assert told_apart(seen, QUICK, told) == []


@pytest.mark.parametrize("ordering", ["tenant_first", "fifo"])
def test_the_configuration_is_one_that_a_gateway_takes(ordering: str) -> None:
    keys = {SMALL: "sk-a", TenantId("large"): "sk-b"}
    config = configured(keys, 100, 3, ordering)
    config["deployment"]["pools"][0]["profile"] = msgspec.to_builtins(
        load_profile(live_fairness.PROFILE)
    )
    taken = msgspec.convert(config, Settings)
    assert [tenant.weight for tenant in taken.deployment.tenants] == [3, 1]
