"""Jobs fill what live traffic leaves over, and it does not notice: emulated engines in virtual time."""

import pytest

from headrace.units import NS_PER_MS
from tests.gateway.leftover import run

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime, pytest.mark.slow]
SPAN_S = 50
WINDOW_NS = 150 * NS_PER_MS


async def test_idle_capacity_is_filled_and_live_traffic_does_not_notice() -> None:
    alone = await run(1, SPAN_S, live=True, jobs=False)
    full = await run(1, SPAN_S, live=False, jobs=True)
    both = await run(1, SPAN_S, live=True, jobs=True)
    assert alone.offered == both.offered
    assert alone.work_ns < 0.4 * full.work_ns, "there is capacity left over"
    assert both.work_ns >= 0.9 * full.work_ns
    assert both.busy >= 0.9
    assert both.attainment >= alone.attainment - 0.01
    firsts = both.first_dispatches_ns()
    assert len(firsts) == 2
    assert all(first is not None and first <= WINDOW_NS for first in firsts)
    assert both.jobs_sent
    assert both.jobs_in_the_way(WINDOW_NS) == 0
