"""The KV pool: whole blocks are reserved, a part is kept for answers that outgrow their forecast."""

import pytest

from headrace.model.decision import Admit, Gate, Reason
from headrace.model.deployment import PoolSpec
from headrace.model.ids import Incarnation
from headrace.policy.catalog import PlaneConfig, Window
from headrace.units import BLOCK_TOKENS
from tests.plane import invariants
from tests.plane.scenes import Driver, config, patient, small

POOL = 16_000
"""A thousand blocks."""
BLOCKS = POOL // BLOCK_TOKENS


def of(reserve: float) -> PlaneConfig:
    return config(
        pools=(PoolSpec(name="p", model="m", profile=small(POOL)),),
        classes=(patient(),),
        window=Window(kv_reserve=reserve),
    )


def booked(made: Driver) -> int:
    return made.plane.state.ledger.loads[Incarnation(1)].blocks


@pytest.mark.parametrize("reserve", [0.0, 0.05, 0.5])
def test_what_is_kept_for_growth_is_promised_to_nobody(reserve: float) -> None:
    room = BLOCKS - round(BLOCKS * reserve)
    made = Driver(of(reserve))
    made.arrive(tokens=room * BLOCK_TOKENS - 16, max_output=16)
    made.arrive(tokens=room * BLOCK_TOKENS - 16, max_output=17)
    fits, not_ = (one.decision for one in made.entries())
    assert isinstance(fits, Admit)
    if reserve:
        assert [one.rejection.reason for one in made.refused()] == [Reason.KV_TOO_LARGE]
        assert made.refused()[0].rejection.retry_after_ns is None
    else:  # it is cut where the pool ends
        assert isinstance(not_, Admit)
    verdicts = [one for one in (*fits.verdicts, *not_.verdicts) if one.gate is Gate.MEMORY]
    assert [one.threshold for one in verdicts] == [room, room]
    assert verdicts[0].measured == room, "part of a block is a whole one"


def test_an_answer_that_outgrows_its_reserve_draws_on_what_was_kept() -> None:
    made = Driver(of(0.1))
    room = BLOCKS - BLOCKS // 10
    first = made.arrive(tokens=room * BLOCK_TOKENS - 32 - 1_600)
    live = made.live(first)
    assert live.demand.output_p90 > 32, "nothing is known of its length"
    reserved = booked(made)
    made.first(live.attempt)
    made.tick((live.attempt, live.demand.output_p90))
    assert booked(made) == reserved, "up to there nothing changes"
    grown = (room + 50) * BLOCK_TOKENS - live.request.input_tokens
    made.tick((live.attempt, grown))
    assert booked(made) == room + 50, "beyond what anybody is promised"
    waits = made.arrive(tokens=10, max_output=1)
    (view,) = made.plane.views_for(made.live(waits), made.now)
    assert view.blocks_reserved > view.blocks_total == room
    assert made.live(waits).attempt is None, "nobody else is sent there meanwhile"
    made.end(live.attempt)
    assert made.live(waits).attempt is not None
    assert booked(made) == 1
    made.serve(waits, 1)
    invariants.over(made.plane)
