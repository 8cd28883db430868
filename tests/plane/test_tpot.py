"""A class may be promised a mean time per token that is tighter than each gap: at the door and in dispatch."""

from typing import Any

import pytest

from headrace.model.decision import Admit, Reason, Reject
from headrace.model.deployment import ClassSpec
from headrace.model.evidence import ReplicaView
from headrace.model.ids import Incarnation
from headrace.plane.core import Plane
from headrace.units import DurationNs, Tokens
from tests.plane import invariants
from tests.plane.scenes import H100, MS, Driver, S, config

GIVEN, OUT = 200, 100
SLOW = ClassSpec(name="slow", ttft_ms=8_000.0, itl_ms=400.0)


def after(streams: int) -> int:
    """Return the pure decode step with one more stream than there are, as a newcomer is told."""
    context = streams * (GIVEN + 1) + GIVEN + OUT
    return H100.decode_step_ns(streams + 1, context)


def brisk(tpot_ms: float, **more: Any) -> ClassSpec:
    given: dict[str, Any] = {"ttft_ms": 8_000.0, "itl_ms": 400.0, "tpot_ms": tpot_ms} | more
    return ClassSpec(name="brisk", **given)


def busy(streams: int, *classes: ClassSpec, slo_class: str = "slow", replicas: int = 1) -> Driver:
    """Return a plane with so many streams past their first tokens on each replica."""
    made = Driver(config(classes=classes), replicas=replicas)
    for _ in range(streams * replicas):
        request = made.arrive(tokens=GIVEN, max_output=OUT, slo_class=slo_class)
        made.first(made.live(request).attempt)
    return made


def ask(made: Driver, slo_class: str, **more: Any) -> tuple[Reason | None, ReplicaView]:
    """Ask once more; return what refuses it, and the replica as it was seen."""
    made.arrive(tokens=GIVEN, max_output=OUT, slo_class=slo_class, **more)
    entry = made.entries()[-1]
    reason = entry.decision.reason if isinstance(entry.decision, Reject) else None
    return reason, entry.evidence.replicas[0]


def test_a_class_that_asks_for_no_more_than_its_gaps_is_held_to_those_alone() -> None:
    made = busy(8, SLOW)
    reason, view = ask(made, "slow")
    assert reason is None
    assert (view.mean_step_ns, view.mean_bound_ns) == (0, 0)


def test_a_newcomer_whose_tokens_would_come_too_slowly_is_refused() -> None:
    streams = 40
    step = after(streams)
    tight, loose = brisk((step - 1) / MS), brisk((step + MS) / MS)
    made = busy(streams, SLOW, tight)
    reason, view = ask(made, "brisk")
    assert reason is Reason.TPOT_BOUND
    assert view.step_ns <= 400 * MS, "each gap would hold"
    assert (view.mean_step_ns, view.mean_bound_ns) == (step, step - 1)
    decision = made.entries()[-1].decision
    assert isinstance(decision, Reject)
    assert (decision.verdicts[-1].measured, decision.verdicts[-1].threshold) == (step, step - 1)
    assert decision.retry_after_ns is not None
    assert decision.retry_after_ns >= S
    assert ask(busy(streams, SLOW, loose), "brisk")[0] is None


def test_a_newcomer_that_would_slow_down_those_who_are_promised_more_is_refused() -> None:
    streams = 40
    step = after(streams)
    made = busy(streams, SLOW, brisk((step - 1) / MS), slo_class="brisk")
    assert not made.refused(), "so many kept it among themselves"
    reason, view = ask(made, "slow")
    assert reason is Reason.TPOT_BOUND
    assert view.mean_bound_ns == step - 1
    for live in list(made.plane.state.live.values()):
        made.end(live.attempt)
    reason, view = ask(made, "slow")
    assert (reason, view.mean_bound_ns) == (None, 0), "with them goes what they were promised"
    invariants.hold(made.plane, made.now)


def test_whoever_is_refused_by_one_replica_goes_to_another() -> None:
    streams = 40
    made = busy(streams, SLOW, brisk((after(streams) - 1) / MS), slo_class="brisk")
    made.up("idle")
    request = made.arrive(tokens=GIVEN, max_output=OUT, slo_class="brisk")
    assert isinstance(made.entries()[-1].decision, Admit)
    assert made.live(request).replica == "idle"


def test_prefill_counts_into_the_mean_as_far_as_the_window_is_full_of_it() -> None:
    made = busy(8, SLOW, brisk(399.0))
    alone = ask(made, "brisk")[1]
    assert alone.mean_step_ns == after(8)
    made = busy(8, SLOW, brisk(399.0))
    made.arrive(tokens=4_000, max_output=OUT, slo_class="slow")
    half = ask(made, "brisk")[1]
    assert 0 < half.pending_prefill_ns < half.window_ns
    more = (half.step_ns - after(8)) * half.pending_prefill_ns // half.window_ns
    assert half.mean_step_ns == after(8) + more
    made = busy(8, SLOW, brisk(399.0))
    made.arrive(tokens=16_000, max_output=OUT, slo_class="slow")
    full = ask(made, "brisk")[1]
    assert full.pending_prefill_ns > full.window_ns
    assert full.mean_step_ns == full.step_ns, "no more than each of its steps"


def test_dispatch_holds_what_the_door_let_in_to_the_same_promise() -> None:
    """Who can wait is let in, and does, until one more does no harm."""
    streams = 40
    batch = ClassSpec(name="batch", ttft_ms=None, itl_ms=400.0, expire=False)
    made = busy(streams, batch, brisk((after(streams) - 1) / MS), slo_class="brisk")
    request = made.arrive(tokens=GIVEN, max_output=OUT, slo_class="batch")
    assert made.live(request).attempt is None, "it can wait, and does"
    made.end(next(iter(made.plane.state.live.values())).attempt)
    assert made.live(request).attempt is not None


@pytest.mark.parametrize("own", [None, 1])
def test_a_mean_that_no_engine_keeps_even_alone_is_impossible(own: int | None) -> None:
    least = H100.decode_step_ns(1, GIVEN)
    spec = brisk(least / MS / 2) if own is None else brisk(300.0)
    made = Driver(config(classes=(spec,)))
    gap = None if own is None else DurationNs(least // 2)
    made.arrive(tokens=GIVEN, max_output=OUT, gap_ns=gap)
    assert [one.rejection.reason for one in made.refused()] == [Reason.DEADLINE_IMPOSSIBLE]


def test_the_books_of_means_are_kept_over_a_restart() -> None:
    made = busy(3, SLOW, brisk(300.0), slo_class="brisk")
    thawed = Plane.thaw(made.plane.freeze())
    load = thawed.state.ledger.loads[Incarnation(1)]
    assert (load.means, load.tightest_mean) == ({DurationNs(300 * MS): 3}, 300 * MS)


def test_a_completion_that_cannot_be_met_is_refused_at_the_door() -> None:
    """What decoding takes of it is no longer there for the first token."""
    step = H100.reference_step_ns
    for room_ms, reason in ((2_000.0, None), (-100.0, Reason.DEADLINE_IMPOSSIBLE)):
        whole = ClassSpec(
            name="whole", ttft_ms=None, itl_ms=400.0, completion_ms=OUT * step / MS + room_ms
        )
        made = Driver(config(classes=(whole,)))
        made.arrive(tokens=GIVEN, max_output=Tokens(OUT))
        entry = made.entries()[-1]
        told = entry.decision.reason if isinstance(entry.decision, Reject) else None
        assert told is reason
