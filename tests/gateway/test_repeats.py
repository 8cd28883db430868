"""What is read of a repeat: what clients and proxies say, and nothing that is not plainly said."""

import asyncio

import pytest

from headrace.gateway.repeats import is_repeat
from tests.gateway.scenes import Gateway, ObedientEngine, reach


@pytest.mark.parametrize(
    ("told", "repeat"),
    [
        ({}, False),
        ({b"x-stainless-retry-count": b"0"}, False),
        ({b"x-stainless-retry-count": b"1"}, True),
        ({b"x-envoy-attempt-count": b"1"}, False),
        ({b"x-envoy-attempt-count": b"2"}, True),
        ({b"x-stainless-retry-count": b"0", b"x-envoy-attempt-count": b"3"}, True),
    ],
)
def test_a_repeat_is_what_its_headers_say_is_one(told: dict[bytes, bytes], *, repeat: bool) -> None:
    assert is_repeat(told) is repeat


@pytest.mark.parametrize(
    "value", [b"", b"-1", b"+2", b" 2", b"1.5", b"2,3", b"two", b"0x2", b"\xb2", b"9" * 5_000]
)
def test_what_cannot_be_read_is_a_first_try(value: bytes) -> None:
    assert not is_repeat({b"x-stainless-retry-count": value, b"x-envoy-attempt-count": value})


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_the_plane_is_told_of_repeats_and_nobody_is_refused_for_a_header() -> None:
    gateway = Gateway(lambda clock: [ObedientEngine(clock)])
    (engine,) = gateway.engines
    assert isinstance(engine, ObedientEngine)
    for count in ("0", "2", "often"):
        gateway.ask(headers={"x-stainless-retry-count": count})
        await reach(gateway.clock, asyncio.get_running_loop().time() * 1_000 + 1)
    assert [call.request.repeat for call in engine.calls] == [False, True, False]
    gateway.finish()
