"""Garbage is collected between events, and by Python again once the gateway has gone."""

import asyncio
import gc
from collections.abc import Iterator

import pytest

from headrace.gateway.collector import YOUNG_S, Collector

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    yield
    gc.enable()
    gc.unfreeze()


async def test_it_collects_from_the_loop_and_hands_back_what_it_took() -> None:
    collector = Collector(asyncio.get_running_loop())
    assert not gc.isenabled(), "no collection in the midst of an event"
    before = gc.get_stats()[0]["collections"]

    await asyncio.sleep(YOUNG_S * 3.5)

    assert gc.get_stats()[0]["collections"] == before + 3
    collector.stop()
    assert gc.isenabled()
