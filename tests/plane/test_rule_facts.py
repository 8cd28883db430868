"""What the rules of other autoscalers go by is counted from the plane's own books, and only for them."""

from typing import Any

import pytest

from headrace.model.deployment import ClassSpec, PoolSpec
from headrace.model.effect import Decided
from headrace.model.scaling import RuleFacts, ScaleEvidence, ScaleRecord
from headrace.model.scaling_spec import By, Scaling
from headrace.plane.busy import Busy
from headrace.policy.catalog import Window
from headrace.units import BLOCK_TOKENS, InstantNs
from tests.plane.scenes import H100, Driver, S, config, patient


def pool(by: By, *, unbounded: bool = False) -> Driver:
    """Return a pool of two ready groups that goes by a rule, and decides every 15 s."""
    scaling = Scaling(by=by, max=4, forecast=None)
    settings = config(
        pools=(PoolSpec(name="p", model="m", profile=H100, scaling=scaling),),
        classes=(ClassSpec(name="chat"), patient()),
        window=Window(unbounded=unbounded),
    )
    return Driver(settings, replicas=2)


def seen(made: Driver) -> ScaleEvidence:
    """Return the newest decision's evidence."""
    found = [one.record for one in made.seen if isinstance(one, Decided)]
    records = [one for one in found if isinstance(one, ScaleRecord)]
    return records[-1].evidence


def facts(made: Driver) -> RuleFacts:
    found = seen(made).rule
    assert found is not None
    return found


def test_ours_asks_for_none_of_it() -> None:
    made = pool(By.SLO)
    made.arrive()
    made.wait(16 * S)
    assert seen(made).rule is None


@pytest.mark.parametrize("unbounded", [False, True])
def test_what_waits_is_counted_wherever_it_waits(*, unbounded: bool) -> None:
    made = pool(By.QUEUE, unbounded=unbounded)
    made.wait(15 * S - 1)
    for slo_class in ("chat", "patient"):
        for _ in range(15):
            made.arrive(tokens=4_000, slo_class=slo_class)
    made.wait(1)
    found = facts(made)
    # Whatever was refused waits for nothing; of what is in an engine one prompt is at its front.
    waiting = [one for one in made.plane.state.live.values() if one.attempt is None]
    sent = [one for one in made.plane.state.live.values() if one.attempt is not None]
    assert bool(waiting) is not unbounded
    assert found.waiting == len(waiting) + len(sent) - 2 > 5
    assert found.backlog_tokens == 4_000 * found.waiting


def test_tokens_are_those_offered_since_the_last_tick_refused_ones_included() -> None:
    made = pool(By.TOKENS)
    for slo_class in ("chat", "patient", "chat"):
        made.arrive(tokens=1_000, slo_class=slo_class)
    made.arrive(tokens=100_000, slo_class="chat")  # longer than its bound leaves time for
    made.wait(15 * S)
    found = facts(made)
    assert (found.input_tokens, found.span_ns) == (103_000, 15 * S)
    assert found.output_tokens > 0
    made.wait(15 * S)
    assert (facts(made).input_tokens, facts(made).output_tokens, facts(made).span_ns) == (
        0,
        0,
        15 * S,
    )


def test_reserved_tokens_are_those_of_all_that_was_sent() -> None:
    made = pool(By.TOKENS)
    sent = [made.arrive(tokens=1_000), made.arrive(tokens=1_000)]
    made.first(made.live(sent[0]).attempt)
    blocks = sum(made.live(one).demand.kv_blocks for one in sent)
    made.wait(15 * S)
    assert facts(made).reserved_tokens == blocks * BLOCK_TOKENS


def test_a_group_is_busy_for_as_long_as_anything_runs_there() -> None:
    made = pool(By.UTILIZATION)
    made.wait(15 * S)
    one = made.arrive()
    made.first(made.live(one).attempt)
    made.wait(3 * S)
    made.end(made.live(one).attempt)
    made.wait(12 * S)
    assert sorted(_busy(made)) == [0, 200_000]
    made.arrive()
    made.wait(15 * S)
    assert sorted(_busy(made)) == [0, 1_000_000]


def test_a_younger_group_is_judged_by_its_life() -> None:
    made = pool(By.UTILIZATION)
    made.wait(10 * S)
    made.up("late")
    for _ in range(3):
        made.arrive()
    made.wait(5 * S)
    assert _busy(made) == [333_333, 333_333, 1_000_000]


def _busy(made: Driver) -> list[Any]:
    return [one.utilization_ppm for one in seen(made).samples]


def test_busy_time_is_that_of_no_attempt_twice() -> None:
    books = Busy()
    for now, change in ((1, books.enter), (2, books.enter), (5, books.leave), (7, books.leave)):
        change(InstantNs(now))
    books.enter(InstantNs(10))
    assert books.take_busy(InstantNs(11)) == 7
    assert books.take_busy(InstantNs(15)) == 4
    books.leave(InstantNs(16))
    assert books.take_busy(InstantNs(20)) == 1
    assert books.take_busy(InstantNs(30)) == 0
