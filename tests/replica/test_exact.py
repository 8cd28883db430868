"""Jumping over many steps and taking them one by one give the same results, to the picosecond."""

from collections import Counter
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace

from headrace.model.engine import Preemption
from headrace.model.ids import AttemptId
from headrace.model.profile import Profile
from headrace.policy.batching import (
    ChunkedPrefill,
    DecodeFirst,
    DynamicChunk,
    PacedPrefill,
    PrefillFirst,
)
from headrace.policy.batching.knobs import BatchingPolicy
from headrace.policy.batching.preemption import RECOMPUTE_ONLY, Offers, Victims, Whole
from headrace.policy.ordering.orders import (
    EarliestDeadline,
    Fifo,
    LeastSlack,
    Niyama,
    Ordering,
    Score,
    ShortestFirst,
    TenantFirst,
    VtcOrder,
)
from headrace.replica.core import Replica
from headrace.replica.rules import NO_RULES, Reserve, Rules
from headrace.units import InstantNs, Tokens
from tests.replica.scenes import (
    FLAT_DECODE,
    FLAT_MIXED,
    MIXED,
    SLOW_GROWTH,
    TABLE,
    ByDeadline,
    ByHour,
    Fair,
    Moody,
    Silent,
    drain,
    engine,
    host,
    job,
    run_to,
    small,
)

PROFILES = [
    small(),
    small(24, budget=48),
    small(40, budget=24, running=3),
    small(30, decode=FLAT_DECODE, mixed=FLAT_MIXED),
    small(200, budget=100, decode=SLOW_GROWTH, mixed=MIXED),
    small(40, table=TABLE),
]
ORDERS: list[Ordering] = [
    Score(),
    Score(candidates=2, aging=3.0),
    Fifo(),
    ShortestFirst(),
    EarliestDeadline(),
    LeastSlack(),
    Niyama(),
    VtcOrder(),
    TenantFirst(lend_after_ms=20.0),
    TenantFirst(lend_after_ms=None),
]
POLICIES: list[BatchingPolicy] = [
    PacedPrefill(),
    PacedPrefill(step_ms=6.8, least_tokens=1, lend_gap_ms=15.0, token_budget_max=90),
    DecodeFirst(token_budget=100),
    DynamicChunk(running_limit=5),
    ChunkedPrefill(),
    ChunkedPrefill(chunk_limit=20),
    ByDeadline(),
    ByHour(),
    Silent(),
    PrefillFirst(token_budget=100),
    PrefillFirst(token_budget=300, running_limit=3),
    Moody(),
    Fair(),
    Fair(running=2),
]
KEEP, SWAP, RECOMPUTE = Preemption
OFFERS = [
    RECOMPUTE_ONLY,
    host(40, SWAP, RECOMPUTE, us=30),
    host(9, SWAP, RECOMPUTE, us=1_000, by_cost=False),
    host(0, KEEP, RECOMPUTE),
    host(12),
    host(200, us=0.37),
    replace(host(60, us=200), victims=Victims.FAIR),
]
RULES = [
    NO_RULES,
    NO_RULES,
    NO_RULES,
    Rules(reserve=Reserve.WHOLE, capacity=Tokens(500)),
    Rules(reserve=Reserve.PEAK, capacity=Tokens(420)),
    Rules(reserve=Reserve.PEAK, capacity=Tokens(320), admit_every=10),
    Rules(admit_every=4),
]
SORTS = [
    (replace(offers, whole=which), rules)
    for offers in OFFERS
    for which in Whole
    for rules in RULES
    if rules == NO_RULES or KEEP not in offers.mechanisms
]
WAITS = st.one_of(
    st.sampled_from([0, 0, 1, 5_000_000, 10_000_000, 40_000_000]),
    st.integers(0, 30_000_000),
    st.integers(0, 600_000_000),
)
JOBS = st.fixed_dictionaries(
    {
        "prompt": st.integers(1, 220),
        "output": st.one_of(st.integers(1, 4), st.integers(1, 90)),
        "family": st.sampled_from([None, None, 0, 1]),
        "common": st.sampled_from([0, 32, 64, 128, 220]),
        "bound_ms": st.sampled_from([6, 7, 20]),
        "deadline": st.one_of(st.integers(0, 9), st.integers(0, 900_000_000)),
        "relegated": st.booleans(),
        "tenant": st.sampled_from("tuv"),
        "weight": st.integers(1, 3),
        "counter": st.sampled_from([None, None, 0, 50_000_000, 20_000_000_000]),
    }
)
ACTIONS = st.one_of(
    st.tuples(st.just("submit"), WAITS, JOBS),
    st.tuples(st.just("submit"), WAITS, JOBS),
    st.tuples(st.just("abort"), WAITS, st.integers(0, 12)),
    st.tuples(
        st.sampled_from(["progress", "prompts", "report", "totals", "yielded"]), WAITS, st.none()
    ),
    st.tuples(st.just("reprice"), WAITS, st.sampled_from([0.5, 1.0, 3.0])),
    st.tuples(st.just("reprice"), WAITS, st.sampled_from([1, 16, 512])),
    st.tuples(st.just("forget"), WAITS, st.none()),
)


def act(  # noqa: PLR0911 - one for each thing
    replica: Replica, what: str, argument: Any, nth: int, now: InstantNs
) -> object:
    """Do one thing to an engine and return its answer."""
    match what:
        case "submit":
            return replica.submit(job(nth, **argument), now)
        case "abort":
            return replica.abort(AttemptId(argument), now)
        case "reprice":
            old, faster = replica.profile, isinstance(argument, float)
            replica.reprice(
                old.paced(argument) if faster else replace(old, token_budget=argument), now
            )
            return None
        case "forget":
            replica.forget_prefixes(now)
            return None
        case "progress":
            return replica.progress(now)
        case "prompts":
            return replica.prompts(now)
        case "report":
            return replica.report(now)
        case "yielded":
            return replica.yielded(now)
        case _:
            return replica.totals(now)


def play(replica: Replica, script: list[tuple[str, int, Any]], *, late: bool = False) -> list[Any]:
    """Return everything an engine says over a script.

    `late`: call it at the script's instants only; events then come in other calls, but the same.
    """
    log: list[Any] = []
    now = 0
    for nth, (what, wait, argument) in enumerate(script):
        now += wait
        if not late:
            log += [(at, event) for at, event in run_to(replica, now)]
        answer = act(replica, what, argument, nth, InstantNs(now))
        replica.check()
        if late:
            log += [(None, event) for event in replica.advance(InstantNs(now))]
        log.append((now, answer))
    log += drain(replica)
    replica.check()
    end = InstantNs(1 << 60)
    return [
        *log,
        list(replica.gave_way()),
        replica.yielded(end),
        replica.progress(end),
        replica.report(end),
        replica.totals(end),
    ]


@given(
    profile=st.sampled_from(PROFILES),
    policy=st.sampled_from(POLICIES),
    ordering=st.sampled_from(ORDERS),
    sort=st.sampled_from(SORTS),
    noise_ppm=st.sampled_from([0, 0, 80_000]),
    script=st.lists(ACTIONS, min_size=1, max_size=24),
)
@settings(max_examples=400)
def test_jumps_equal_steps(
    profile: Profile,
    policy: BatchingPolicy,
    ordering: Ordering,
    sort: tuple[Offers, Rules],
    noise_ppm: int,
    script: list[tuple[str, int, Any]],
) -> None:
    told: dict[str, Any] = {
        "noise_ppm": noise_ppm, "ordering": ordering, "offers": sort[0], "rules": sort[1]
    }  # fmt: skip
    stepped = play(engine(profile, policy, jumps=False, **told), script)
    jumped = play(engine(profile, policy, **told), script)
    assert jumped == stepped


def events(log: list[Any]) -> list[Any]:
    """Return the events of a log without the instants of the calls that brought them."""
    kinds = {"FirstTokenMade", "Finished"}
    pairs = (item for item in log if isinstance(item, tuple))
    return [event for _, event in pairs if type(event).__name__ in kinds]


@given(
    profile=st.sampled_from(PROFILES),
    policy=st.sampled_from(POLICIES),
    ordering=st.sampled_from(ORDERS),
    offers=st.sampled_from(OFFERS),
    script=st.lists(
        st.tuples(st.just("submit"), WAITS, JOBS)
        | st.tuples(st.just("progress"), WAITS, st.none()),
        min_size=1,
        max_size=16,
    ),
)
@settings(max_examples=100)
def test_late_driver_delays_delivery_only(
    profile: Profile,
    policy: BatchingPolicy,
    ordering: Ordering,
    offers: Offers,
    script: list[tuple[str, int, Any]],
) -> None:
    told: dict[str, Any] = {"ordering": ordering, "offers": offers}
    prompt = play(engine(profile, policy, **told), script)
    late = play(engine(profile, policy, **told), script, late=True)
    assert events(late) == events(prompt)
    assert late[-5:] == prompt[-5:]


def draw(rng: Random) -> list[tuple[str, int, Any]]:
    """Return a long script: hypothesis prefers short ones, which seldom fill a pool."""
    script: list[tuple[str, int, Any]] = []
    for nth in range(rng.randint(20, 60)):
        wait = rng.choice(
            [0, 1, 5_000_000, rng.randint(0, 30_000_000), rng.randint(0, 500_000_000)]
        )
        kind = rng.random()
        if kind < 0.7:
            shape = {
                "prompt": rng.randint(1, 220),
                "output": rng.choice([1, 2, rng.randint(1, 90), rng.randint(1, 90)]),
                "family": rng.choice([None, 0, 1, 1]),
                "common": rng.choice([0, 32, 64, 128, 220]),
                "bound_ms": rng.choice([6, 7, 20]),
                "deadline": rng.choice([rng.randint(0, 9), rng.randint(0, 900_000_000)]),
                "relegated": rng.random() < 0.2,
                "tenant": rng.choice("tuv"),
                "weight": rng.randint(1, 3),
                "counter": rng.choice([None, None, 0, rng.randint(0, 20_000_000_000)]),
            }
            script.append(("submit", wait, shape))
        elif kind < 0.8:
            script.append(("abort", wait, rng.randint(0, nth)))
        else:
            what = rng.choice(["progress", "prompts", "report", "totals", "yielded"])
            script.append((what, wait, None))
    return script


def test_jumps_equal_steps_on_long_days_with_preemptions() -> None:
    seen: Counter[str] = Counter()
    for seed in range(340):
        rng = Random(seed)
        profile, policy, (offers, rules) = (
            rng.choice(PROFILES), rng.choice(POLICIES), rng.choice(SORTS)
        )  # fmt: skip
        told: dict[str, Any] = {
            "noise_ppm": rng.choice([0, 80_000]),
            "ordering": rng.choice(ORDERS),
            "offers": offers,
            "rules": rules,
        }
        script = draw(rng)
        stepped = play(engine(profile, policy, jumps=False, **told), script)
        jumped = play(engine(profile, policy, **told), script)
        assert jumped == stepped, f"{seed=}"
        *_, yielded, _, report, totals = jumped
        seen["preemptions"] += totals.preemptions
        seen["hits"] += report.prefix_tokens_hit
        seen.update(structs.asdict(yielded))
        assert not yielded.on_host
        assert yielded.kept + yielded.swapped + yielded.recomputed == totals.preemptions
    assert seen["preemptions"] > 1_000, "the scripts no longer fill the pools"
    assert seen["hits"] > 20_000, "the scripts no longer share prefixes"
    assert min(seen["kept"], seen["swapped"], seen["recomputed"]) > 100, f"{seen=}"
    assert 0 < seen["bytes_in"] < seen["bytes_out"], "none came back to blocks still cached"


def test_hundred_thousand_tokens_take_a_handful_of_calls() -> None:
    replica = engine(small(8_000, budget=512), ChunkedPrefill())
    replica.submit(job(1, 20_000, 100_000), InstantNs(0))
    calls = 0
    while (due := replica.next_event()) is not None:
        replica.advance(due)
        calls += 1
    assert calls == 3
    assert replica.totals(InstantNs(1 << 60)).tokens_made == 100_000
