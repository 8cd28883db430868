"""Rate headers show this very reservation, on success and on rejection (trap 6)."""

import pytest

from headrace.gateway.durations import read, written
from headrace.model.deployment import TenantSpec
from headrace.units import NS_PER_MS, NS_PER_S, DurationNs
from tests.gateway.scenes import Caller, Gateway, deployment, reach


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0s"),
        (1, "1ms"),
        (250_000_000, "250ms"),
        (999_000_001, "1s"),
        (1_000_000_000, "1s"),
        (1_000_000_001, "2s"),
        (60_000_000_000, "1m0s"),
        (360_000_000_000, "6m0s"),
        (3_600_000_000_000, "1h0m0s"),
    ],
)
def test_a_wait_is_written_as_go_does(ns: int, text: str) -> None:
    assert written(DurationNs(ns)) == text


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        (b"2s", 2 * NS_PER_S),
        (b"1m30s", 90 * NS_PER_S),
        (b"250ms", 250 * NS_PER_MS),
        (b"1.5h", 5_400 * NS_PER_S),
        (b"0.000001ms", 1),
        (b"1h0m0s", 3_600 * NS_PER_S),
        (b"7us3ns", 7_003),
        (b"999999999h", 365 * 24 * 3_600 * NS_PER_S),
        *(
            (text, None)
            for text in (b"", b"0", b"0s", b"0.0000000001s", b"2", b"s", b"-1s", b"+1s")
        ),
        *((text, None) for text in (b"1 s", b"1s ", b".5s", b"1.s", b"1e3s", b"2S", b"1d", b"1s1")),
        (b"\xd9\xa2s", None),
        (b"1s" * 17, None),
    ],
)
def test_a_duration_is_read_as_go_does(text: bytes, ns: int | None) -> None:
    assert read(text) == ns


def told(caller: Caller) -> dict[str, str]:
    prefix = "x-ratelimit-"
    return {
        name.removeprefix(prefix): value
        for name, value in caller.headers.items()
        if name.startswith(prefix)
    }


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_headers_move_with_each_reservation_and_refill_with_time() -> None:
    tenants = (TenantSpec(name="free", rpm_limit=2, tpm_limit=60_000),)
    gateway = Gateway(config=deployment(tenants=tenants))
    first = await gateway.ask(max_tokens=1_000).done()
    assert first.status == 200
    needed = 60_000 - int(told(first)["remaining-tokens"])
    assert needed >= 1_000, "the answer's reserve counts from the start"
    assert told(first) == {
        "limit-requests": "2",
        "remaining-requests": "1",
        "reset-requests": "30s",
        "limit-tokens": "60000",
        "remaining-tokens": str(60_000 - needed),
        "reset-tokens": "2s",
    }
    second = await gateway.ask(max_tokens=1_000, stream=True).done()
    assert (second.status, told(second)["remaining-requests"]) == (200, "0")
    refused = await gateway.ask().done()
    assert refused.status == 429
    assert (told(refused)["limit-requests"], told(refused)["remaining-requests"]) == ("2", "0")
    used = int(told(refused)["remaining-tokens"])
    assert used > 0
    await reach(gateway.clock, 60_000)
    later = await gateway.ask(model="nope").done()
    assert later.status == 404
    assert told(later)["remaining-requests"] == "2", "refilled, and the refusal cost nothing"
    gateway.finish()


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_no_limit_has_no_header_and_an_unused_one_is_full() -> None:
    gateway = Gateway(config=deployment(tenants=(TenantSpec(name="free", rpm_limit=3),)))
    caller = await gateway.ask(model="nope").done()
    assert told(caller) == {
        "limit-requests": "3",
        "remaining-requests": "3",
        "reset-requests": "0s",
    }
    assert told(await gateway.ask(key="sk-unknown").done()) == {}
    gateway.finish()
    gateway = Gateway()
    assert told(await gateway.ask(max_tokens=1).done()) == {}
    gateway.finish()
