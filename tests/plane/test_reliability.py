"""How much of a prefix that is believed cached is counted on: as much as has held there of late."""

from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.model.decision import Admit, Gate, Reason, Reject
from headrace.model.deployment import ClassSpec
from headrace.model.engine import Usage
from headrace.model.evidence import ReplicaView
from headrace.model.ids import ReplicaName
from headrace.model.slo import Outcome
from headrace.plane.core import Plane
from headrace.plane.fleet import MEMORY, Replica
from headrace.policy.routing.seconds import Seconds
from headrace.units import BLOCK_TOKENS, MICRO, InstantNs, Tokens
from tests.plane.scenes import H100, MODEL, MS, Driver, S, config, usage

PREFIX: dict[str, Any] = {"prefix": (1, 2), "prefix_tokens": 4_000}
GIVEN, CACHED = 8_100, 8_000
START = round(Seconds().prefix_reliability * MICRO)


def warm(*, routing: Seconds | None = None, **changes: Any) -> Driver:
    """Return a plane whose one replica is believed to hold the prefix."""
    made = Driver(config(routing=routing or Seconds(), **changes))
    again(made, 0, told=False)
    return made


def again(made: Driver, cached: int, *, told: bool = True) -> None:
    """Ask for the prefix once more; the engine finds so much of it."""
    attempt = made.live(made.arrive(tokens=GIVEN, **PREFIX)).attempt
    made.now = InstantNs(made.now + S)
    made.first(attempt)
    used = replace(usage(GIVEN, 10, cached), tells_cached=told)
    made.end(attempt, usage=used, timing=made.timing(10))


def replica(made: Driver) -> Replica:
    return made.known.fleet.replicas[ReplicaName("r0")]


def seen(made: Driver) -> ReplicaView:
    """Return the replica as admission sees it for one more such request, which leaves again."""
    request = made.arrive(tokens=GIVEN, **PREFIX)
    (view,) = made.entries()[-1].evidence.replicas
    made.leave(request)
    return view


def test_before_anything_is_told_the_configured_share_is_counted_on() -> None:
    made = warm()
    view = seen(made)
    assert (view.cached_tokens, view.believed_tokens) == (CACHED, CACHED * START // MICRO)
    rest = GIVEN - view.believed_tokens
    assert view.prefill_ns == H100.prefill_ns(rest, view.believed_tokens, 0, 0, 512)
    assert view.prefix_credit_ns == H100.prefill_ns(GIVEN, 0, 0, 0, 512) - view.prefill_ns
    none = warm(routing=Seconds(prefix_reliability=0.0))
    assert (seen(none).believed_tokens, seen(none).prefix_credit_ns) == (0, 0)


def test_a_cache_that_thrashes_loses_its_credit_and_gets_it_back() -> None:
    made = warm()
    believed = [seen(made).believed_tokens]
    for _ in range(3 * MEMORY):
        again(made, 0)
        believed.append(seen(made).believed_tokens)
    assert all(after < before for before, after in pairwise(believed))
    assert believed[-1] < CACHED // 20, "three times the memory leaves a twentieth of it"
    assert seen(made).cached_tokens == CACHED, "what is expected is still told, and measured"
    for _ in range(3 * MEMORY):
        again(made, CACHED)
        believed.append(seen(made).believed_tokens)
    assert believed[-1] > CACHED * 19 // 20


@pytest.mark.parametrize("part", [0, 100, CACHED // 2, CACHED, GIVEN])
def test_it_settles_at_the_share_that_is_there(part: int) -> None:
    made = warm()
    for _ in range(10 * MEMORY):
        again(made, part)
    share = replica(made).reliability
    assert share is not None
    assert abs(share - min(part, CACHED) * MICRO // CACHED) < MICRO // 100
    assert 0 <= share <= MICRO, "more than was expected is no more than all of it"


def test_an_engine_that_never_tells_is_unknown_and_not_empty() -> None:
    made = warm()
    for _ in range(MEMORY):
        again(made, 0, told=False)
    assert replica(made).reliability is None
    assert seen(made).believed_tokens == CACHED * START // MICRO
    assert replica(made).cached_expected == 0, "nor does it count as one that tells of none"


def test_an_engine_that_tells_of_hits_alone_means_none_by_silence() -> None:
    made = warm()
    again(made, CACHED)
    after_hit = replica(made).reliability
    again(made, 0, told=False)
    after_silence = replica(made).reliability
    assert after_hit is not None
    assert after_silence is not None
    assert after_silence < after_hit


@pytest.mark.parametrize("how", ["forgot", "reset", "restarted"])
def test_a_replica_that_lost_its_cache_starts_anew(how: str) -> None:
    made = warm()
    made.report("r0", 1, prefix_tokens_queried=10_000, prefix_tokens_hit=8_000)
    for _ in range(MEMORY):
        again(made, 0)
    sent = made.live(made.arrive(tokens=GIVEN, **PREFIX)).attempt
    match how:
        case "forgot":
            made.forget("r0", 1)
        case "reset":
            made.report("r0", 1, prefix_tokens_queried=10, prefix_tokens_hit=0)
        case _:
            made.up("r0")
    assert replica(made).reliability is None
    made.now = InstantNs(made.now + S)
    if how != "restarted":  # with whose life the attempt ended
        made.end(sent, usage=usage(GIVEN, 1), timing=made.timing(1))
    assert replica(made).reliability is None, "what was sent before says nothing of what it holds"
    made.serve(made.arrive(tokens=GIVEN, **PREFIX))
    again(made, CACHED)
    share = replica(made).reliability
    assert share is not None
    assert share > START


def test_what_failed_or_expected_nothing_teaches_nothing() -> None:
    made = warm()
    made.end(made.live(made.arrive(tokens=GIVEN, **PREFIX)).attempt, Outcome.ERROR)
    made.serve(made.arrive(tokens=GIVEN))
    assert replica(made).reliability is None


def test_it_is_frozen_and_thawed_with_the_plane() -> None:
    made = warm()
    again(made, 100)
    thawed = Plane.thaw(made.plane.freeze())
    kept = thawed.state.models[MODEL].fleet.replicas[ReplicaName("r0")]
    assert kept == replica(made)


def test_the_gates_count_on_no_more_than_that() -> None:
    """A bound that only a cached prompt can keep: with the credit gone, it is refused at the door."""
    alone = H100.prefill_ns(GIVEN, 0, 0, 0, 512)
    tight = ClassSpec(name="interactive", ttft_ms=alone / MS / 2)
    cold = Driver(config(classes=(tight,)))
    cold.arrive(tokens=GIVEN, **PREFIX)
    assert cold.refused(), "nothing is cached for the first one"
    loose = replace(tight, ttft_ms=10 * alone / MS)
    made = warm(classes=(loose, replace(tight, name="tight")))
    request = made.arrive(tokens=GIVEN, slo_class="tight", **PREFIX)
    entry = made.entries()[-1]
    assert isinstance(entry.decision, Admit)
    assert entry.evidence.demand.cached_tokens == CACHED * START // MICRO
    made.leave(request)
    for _ in range(2 * MEMORY):
        again(made, 0)
    made.arrive(tokens=GIVEN, slo_class="tight", **PREFIX)
    entry = made.entries()[-1]
    assert isinstance(entry.decision, Reject)
    assert entry.decision.reason is Reason.DEADLINE_IMPOSSIBLE
    assert entry.evidence.demand.cached_tokens < CACHED // 5
    for _ in range(2 * MEMORY):
        again(made, CACHED)
    made.arrive(tokens=GIVEN, slo_class="tight", **PREFIX)
    assert isinstance(made.entries()[-1].decision, Admit)


def test_memory_is_reserved_as_if_nothing_were_cached() -> None:
    """Cached blocks lie in the pool as any others: a hit makes no room."""
    made = warm()
    made.arrive(tokens=GIVEN, max_output=Tokens(60), **PREFIX)
    entry = made.entries()[-1]
    assert entry.evidence.demand.cached_tokens > 0
    (verdict,) = (one for one in entry.decision.verdicts if one.gate is Gate.MEMORY)
    assert verdict.measured == -(-(GIVEN + 60) // BLOCK_TOKENS)


def test_a_usage_tells_unless_it_says_that_it_does_not() -> None:
    given = Usage(input_tokens=Tokens(1), cached_tokens=Tokens(0), output_tokens=Tokens(1))
    assert given.tells_cached
