"""The prompts in front, as a policy sees them, are those that the next step computes."""

from random import Random

from msgspec import Struct

from headrace.config.profiles import load_profile
from headrace.model.engine import Preemption
from headrace.model.profile import Profile
from headrace.policy.batching import ChunkedPrefill, PacedPrefill
from headrace.policy.batching.knobs import (
    FRONT_PROMPTS,
    BatchingPolicy,
    BatchView,
    Entry,
    Key,
    Knobs,
)
from headrace.policy.batching.preemption import RECOMPUTE_ONLY, Offers
from headrace.policy.batching.steps import Steps
from headrace.policy.ordering.orders import EarliestDeadline, TenantFirst
from headrace.replica.core import Replica
from headrace.replica.yielding import Yielding
from headrace.units import NS_PER_MS, NS_PER_S, PS_PER_NS, InstantNs
from tests.replica.scenes import (
    CHUNK,
    TABLE,
    ByDeadline,
    Silent,
    drain,
    engine,
    first_tokens,
    host,
    job,
    ns,
    small,
)
from tests.replica.test_exact import act, draw


class Witness(Struct):
    """Asks another policy and remembers what it saw and said."""

    policy: BatchingPolicy
    asked: list[tuple[BatchView, Knobs]] = []
    yielding: Yielding | None = None
    preemptions: int = 0

    def knobs(self, view: BatchView) -> Knobs:
        """Return the other's answer."""
        if self.yielding is not None:
            self.preemptions = self.yielding.preemptions
        knobs = self.policy.knobs(view)
        self.asked.append((view, knobs))
        return knobs

    def victim_key(self, entry: Entry) -> Key:
        """Return the other's."""
        return self.policy.victim_key(entry)


def walked(view: BatchView, knobs: Knobs) -> int:
    """Return the time in ps of the step that a view and knobs foretell."""
    steps = Steps(view, knobs.chunk_limit)
    tokens = min(max(knobs.token_budget - view.decodes, 0), steps.tokens)
    if not tokens:
        return view.profile.step_ps(view.decodes, view.context, 0, 0)
    return steps.step_ps(tokens)


def lengths(
    profile: Profile, policy: BatchingPolicy, seed: int, offers: Offers = RECOMPUTE_ONLY
) -> list[tuple[BatchView, Knobs, int]]:
    """Return each step of a drawn day, one by one: what was seen, said, and how long it took in ns.

    Steps without a prompt, and those that preempted somebody, are left out.
    """
    witness = Witness(policy)
    replica = engine(profile, witness, jumps=False, offers=offers)
    yielding = witness.yielding = replica._batch.yielding
    steps: list[tuple[BatchView, Knobs, int]] = []
    now = 0

    def pass_to(instant: int) -> None:
        while (due := replica.next_event()) is not None and due <= instant:
            view, knobs = witness.asked[-1]
            tells = replica._batch.plan and yielding.preemptions == witness.preemptions
            replica.advance(due)
            if tells:
                steps.append((view, knobs, due - view.now))

    for nth, (what, wait, argument) in enumerate(draw(Random(seed))):
        now += wait
        pass_to(now)
        act(replica, what, argument, nth, InstantNs(now), [])
    pass_to(1 << 60)
    return steps


POLICIES: list[BatchingPolicy] = [PacedPrefill(step_ms=7.0), Silent(), ByDeadline()]
PROFILES = [small(200, running=20), small(60, running=20), small(200, running=20, table=TABLE)]
OFFERS = [
    RECOMPUTE_ONLY,
    host(60, Preemption.SWAP, Preemption.RECOMPUTE, us=20, by_cost=False),
    host(60, us=20),
]


def test_a_step_takes_what_the_view_foretells() -> None:
    seen = short = resumed = brought = 0
    for seed in range(300):
        rng = Random(seed)
        profile, policy, offers = rng.choice(PROFILES), rng.choice(POLICIES), rng.choice(OFFERS)
        for view, knobs, took in lengths(profile, policy, seed, offers):
            step = walked(view, knobs)
            known = knobs.token_budget - view.decodes <= Steps(view, knobs.chunk_limit).tokens
            if known or len(view.fronts) == view.prefills + view.waiting:
                # Blocks or slots may be short: then it computes less, never more or other things.
                assert took <= step // PS_PER_NS + 1, f"{seed=}"
                seen += 1
                short += took < step // PS_PER_NS
                exact = took >= step // PS_PER_NS
                resumed += exact and any(front.resumes for front in view.fronts)
                brought += exact and any(front.transfer_ps for front in view.fronts)
    assert seen > 3_000
    assert min(resumed, brought) > 20, f"nobody came back: {resumed=} {brought=}"
    assert short < seen // 4


def test_no_step_of_an_engine_that_is_paced_exceeds_the_bound() -> None:
    policy = PacedPrefill(step_ms=6.7, margin_percent=2.0, least_tokens=1, lend_gap_ms=1_000.0)
    seen = tight = 0
    for seed in range(160):
        rng = Random(seed)
        profile, offers = rng.choice(PROFILES), rng.choice(OFFERS)
        for view, knobs, took in lengths(profile, policy, seed, offers):
            if view.tightest_gap_ns is None or knobs.token_budget == view.decodes + 1:
                continue
            assert took * 100 <= view.tightest_gap_ns * 98 + 100, f"{seed=}"
            seen += 1
            tight += took * 100 > view.tightest_gap_ns * 90
    assert seen > 1_000
    assert tight > 100, "the bound is never met"


def fronts(replica: Replica, witness: Witness) -> list[tuple[int, int]]:
    """Return position and tokens left of the prompts in front at the next step."""
    due = replica.next_event()
    assert due is not None
    replica.advance(due)
    return [(one.position, one.left) for one in witness.asked[-1][0].fronts]


def test_unfinished_prompts_come_first_then_waiting_ones_in_key_order() -> None:
    witness = Witness(ByDeadline())
    replica = engine(small(1_000), witness, ordering=EarliestDeadline())
    for attempt, (prompt, deadline) in enumerate([(100, 5), (300, 9), (200, 1), (250, 4)]):
        replica.submit(job(attempt, prompt, 9, deadline=deadline), InstantNs(0))
    # The first had the whole step for itself.
    assert fronts(replica, witness) == [(32, 68), (0, 200), (0, 250), (0, 300)]


def test_a_cached_prefix_is_where_a_prompt_begins() -> None:
    witness = Witness(Silent())
    replica = engine(small(1_000), witness)
    replica.submit(job(0, 3 * CHUNK, 1, family=1, common=3 * CHUNK), InstantNs(0))
    drain(replica)
    now = InstantNs(1 << 50)
    for attempt in (1, 2):
        replica.submit(job(attempt, 5 * CHUNK, 9, family=1, common=3 * CHUNK), now)
    replica.advance(now)
    assert witness.asked[-1][0].fronts[0].position == 3 * CHUNK
    assert fronts(replica, witness)[-1] == (3 * CHUNK, 2 * CHUNK)


def test_a_prompt_whose_start_hangs_on_another_is_not_foretold() -> None:
    witness = Witness(Silent())
    replica = engine(small(1_000), witness)
    for attempt in range(3):
        common = 4 * CHUNK if attempt else 0
        replica.submit(job(attempt, 5 * CHUNK, 9, family=1, common=common), InstantNs(0))
    shown = fronts(replica, witness)
    assert len(shown) == 2, "the third will find what the second computes"


def test_no_more_prompts_are_told_than_steps_compute() -> None:
    witness = Witness(Silent())
    replica = engine(small(60_000, running=2), witness)
    for attempt in range(1_000):
        replica.submit(job(attempt, 9, 500), InstantNs(0))
    assert len(fronts(replica, witness)) == FRONT_PROMPTS
    replica = engine(small(60_000, running=2), witness)
    for attempt in range(20):
        replica.submit(job(attempt, 9_000, 500), InstantNs(0))
    assert len(fronts(replica, witness)) == FRONT_PROMPTS, "none hides what is behind it"


def test_an_urgent_prompt_overtakes_a_relegated_one_that_has_its_slot() -> None:
    def took(policy: BatchingPolicy) -> tuple[int, int]:
        replica = engine(load_profile("a100-8b-tp1"), policy)
        replica.submit(job(0, 64_000, 9, relegated=True, bound_ms=80), InstantNs(0))
        replica.submit(job(1, 400, 200, deadline=2 * NS_PER_S, bound_ms=80), ns(200))
        replica.submit(job(2, 4_000, 9, deadline=3 * NS_PER_S, bound_ms=80), ns(700))
        first = first_tokens(drain(replica))
        return first[1].at, first[2].at

    paced, chunked = took(PacedPrefill()), took(ChunkedPrefill())
    assert paced[0] < 500 * NS_PER_MS < chunked[0]
    assert paced[1] < 1_700 * NS_PER_MS < chunked[1]


def test_whose_turn_it_is_is_told_by_what_was_served_up_to_the_step() -> None:
    """Two tenants in turns on two slots: tokens made since the last start decide who is in front."""
    witness = Witness(ChunkedPrefill())
    replica = engine(
        small(1_000, running=2), witness, jumps=False, ordering=TenantFirst(lend_after_ms=None)
    )
    far = 1 << 50
    draw = Random(1)
    for nth in range(60):
        tenant = "a" if nth % 2 else "b"
        made = draw.randint(1, 40)
        replica.submit(job(nth, 10 + nth, made, tenant=tenant, deadline=far), InstantNs(nth))
    seen = 0
    while (due := replica.next_event()) is not None:
        replica.advance(due)
        begun = [plan for plan in replica.prompts(due) if not plan[1]]
        if begun and len(begun[0]) and len(witness.asked) > 2:
            front = next(one for one in witness.asked[-1][0].fronts if not one.position)
            assert front.left == 10 + begun[0][0]
            seen += 1
    assert seen > 40
