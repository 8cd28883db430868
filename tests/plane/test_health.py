"""What a group does of its envelope: as it is told, and as its replica is seen beside the others."""

import pytest

from headrace.model.group import Ail, GroupStep
from headrace.model.scaling import Standing
from headrace.plane.ledger import Load
from headrace.plane.speed import Speed, part, usual
from headrace.units import MICRO, InstantNs, Tokens
from tests.plane.scenes import H100, MS, Driver, S
from tests.plane.test_groups import P, records, scaled, standing, told


def does(made: Driver) -> dict[str, int | None]:
    """Return what the next decision takes each group for."""
    made.wait(15 * S)
    return {one.group: one.effective_ppm for one in records(made)[-1].evidence.groups}


def test_what_nobody_tells_and_nobody_saw_is_unknown() -> None:
    assert does(scaled(2)) == {"r0": None, "r1": None}


@pytest.mark.parametrize("ail", [Ail.KERNEL_FALLBACK, Ail.SLOW_COLLECTIVE])
def test_a_group_that_is_told_to_be_slow_counts_at_a_part_until_it_is_told_to_be_well(
    ail: Ail,
) -> None:
    made = scaled(2)
    made.wait(60 * S)
    told(made, "r0", GroupStep.READY, ails=(ail,))
    told(made, "r0", GroupStep.READY)
    assert does(made) == {"r0": MICRO // 2, "r1": None}
    assert (
        records(made)[-1].decision.supply.now_micro < 2 * records(made)[-1].evidence.declared_micro
    )
    told(made, "r0", GroupStep.READY, ails=())
    assert does(made) == {"r0": None, "r1": None}


def test_the_part_that_is_told_counts_as_it_is() -> None:
    made = scaled(2)
    told(made, "r1", GroupStep.READY, ails=(), does_ppm=100_000)
    assert does(made) == {"r0": None, "r1": 100_000}


def test_a_group_with_a_bad_rank_serves_nothing_until_that_is_well_again() -> None:
    made = scaled(2)
    told(made, "r0", GroupStep.READY, ails=(Ail.BAD_RANK,))
    assert standing(made, "r0") is Standing.COMING
    sent = [made.plane.state.live[made.arrive(slo_class="chat")].replica for _ in range(2)]
    assert sent == ["r1", "r1"]
    told(made, "r0", GroupStep.READY, ails=())
    assert standing(made, "r0") is Standing.READY


def test_what_was_told_of_a_life_says_nothing_of_the_next_one() -> None:
    made = scaled(2)
    told(made, "r0", GroupStep.READY, ails=(Ail.KERNEL_FALLBACK,), does_ppm=200_000)
    told(made, "r0", GroupStep.LOST, gpus=0)
    told(made, "r0", GroupStep.READY)
    assert does(made) == {"r0": None, "r1": None}


def seen(*, step_part: float, ticks: int, decodes: int = 8, warming: bool = False) -> Speed:
    """Return what is seen of a replica whose steps take so many times what they should."""
    speed, load = Speed(), Load()
    load.attempts, load.decodes, load.context_tokens = decodes, decodes, Tokens(1_000 * decodes)
    step = H100.decode_step_ns(decodes, load.context_tokens) * step_part
    for nth in range(ticks):
        now = InstantNs(nth * 100 * MS)
        load.tokens_made = decodes * int(now / step)
        speed.tick(H100, load, now, warming=warming)
    return speed


def test_a_pace_is_what_steps_should_have_taken_of_the_time_that_passed() -> None:
    for slower in (1.0, 2.0, 5.0):
        pace = seen(step_part=slower, ticks=200).ppm()
        assert pace == pytest.approx(MICRO / slower, rel=0.03)


def test_what_is_hardly_loaded_or_has_just_come_is_not_known() -> None:
    assert seen(step_part=2.0, ticks=40).ppm() is None
    assert seen(step_part=2.0, ticks=400, decodes=0).ppm() is None
    assert seen(step_part=2.0, ticks=400, warming=True).ppm() is None


def test_an_engine_that_stands_still_does_nothing() -> None:
    assert seen(step_part=1e6, ticks=200).ppm() == 0


def test_a_wrong_profile_condemns_nobody_and_one_of_two_may_be_slow() -> None:
    assert [part(one, usual((500_000, 480_000, 520_000))) for one in (500_000, 480_000)] == [
        MICRO
    ] * 2
    assert part(400_000, usual((400_000, 800_000))) == MICRO // 2
    assert part(500_000, usual((500_000,))) is None
    assert part(None, usual((500_000, 500_000))) is None


def test_where_hardly_any_token_is_seen_no_pace_is_usual() -> None:
    assert usual((20_000, 40_000, 60_000)) is None


def test_what_a_new_group_does_at_first_teaches_nothing_of_the_rate_that_work_drains_at() -> None:
    made = scaled(1, min=2)
    made.wait(31 * S)
    told(made, "r1", GroupStep.READY)
    made.up("r1")
    assert learnt(made) == {"r0": True, "r1": False}
    made.wait(31 * S)
    assert learnt(made) == {"r0": True, "r1": True}


def learnt(made: Driver) -> dict[str, bool]:
    """Return of which replicas a first token counts as work that drained."""
    rate, found = made.known.rates[P], {}
    for request in [made.arrive(slo_class="chat") for _ in range(2)]:
        live, before = made.live(request), rate.fresh_ns
        assert live.replica is not None
        made.serve(request)
        found[str(live.replica)] = rate.fresh_ns > before
    return found
