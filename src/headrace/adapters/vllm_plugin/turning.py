"""From what vLLM's scheduler holds to what a policy sees, and from its knobs to vLLM's fields.

The knobs' contract (`policy/batching/knobs`) is vLLM's own scheduling under other limits: decodes come
first because they are put first in `running`, a budget is never less than they need, and whoever is to
give way has the largest `priority` for the length of a step in which blocks may run out.
"""

from collections.abc import Iterable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from headrace.adapters.vllm_plugin.guests import EngineRequest, Guest, Guests
from headrace.adapters.vllm_plugin.queue import Queue
from headrace.model.profile import Profile
from headrace.policy.batching.knobs import (
    FRONT_PROMPTS,
    BatchingPolicy,
    BatchView,
    Break,
    Front,
    Key,
    Knobs,
)
from headrace.policy.batching.preemption import (
    RECOMPUTE_ONLY,
    Held,
    Victims,
    choose,
    gives_way,
    giving_way,
)
from headrace.units import BLOCK_TOKENS, Blocks, DurationNs, InstantNs, Tokens, blocks_for

VICTIMS = 32
"""Requests that are ranked for giving way: more than a step takes from."""
LOOKUPS = 4
"""Waiting prompts whose cached part is looked up for a view: each costs a walk over its blocks. Those behind
count as not cached, so that a step is rather shorter than foreseen."""
_PRIORITY = 1 << 62
"""Beyond any priority that a caller may give."""


class Sizes(Struct, frozen=True, kw_only=True):
    """How vLLM was set up."""

    budget: int
    """Tokens of a step."""
    slots: int
    chunk: int
    """Its own limit to a prompt's chunk; 0: none."""
    adaptive: bool
    """Whether it raises that where few requests are there."""
    cuts: bool
    """Whether any budget will do: where prompts, or parts of them, are computed whole, only its own does."""
    block_tokens: int
    least_block: int
    """Tokens of the smallest block of any group."""
    groups: int
    """Kinds of KV cache, each of which takes blocks of its own from one pool."""
    capacity: int
    """Tokens that the pool holds."""
    decode_tokens: int
    """Tokens that a decode may take of a step: more than 1 with speculation."""


class Turner:
    """Asks the policy when its knobs no longer hold, and turns vLLM's."""

    def __init__(
        self,
        policy: BatchingPolicy,
        profile: Profile,
        sizes: Sizes,
        victims: Victims,
        *,
        by_priority: bool,
    ) -> None:
        """Start with nothing asked. `by_priority`: how vLLM itself orders."""
        self._by_priority = by_priority
        self._policy, self._profile, self._sizes = policy, profile, sizes
        self._key = gives_way if victims is Victims.FAIR else policy.victim_key
        self._knobs: Knobs | None = None
        self._steps = 0
        self.changed = Break.NOTHING
        """What happened since the knobs were asked for."""

    def knobs(self, scheduler: Any, guests: Guests, queue: Queue, now: InstantNs) -> Knobs:
        """Return the knobs of the step that begins."""
        knobs = self._knobs
        if knobs is None or knobs.holds.is_over(self._steps, now, self.changed):
            knobs = self._knobs = self._policy.knobs(self.view(scheduler, guests, queue, now))
            self.changed, self._steps = Break.NOTHING, 0
        self._steps += 1
        return knobs

    def view(self, scheduler: Any, guests: Guests, queue: Queue, now: InstantNs) -> BatchView:
        """Return what the policy may see at this boundary."""
        decodes, prefills = split(scheduler.running)
        known = guests.running
        gaps = [known[one.request_id].gap_ns for one in decodes if one.request_id in known]
        rest = sum(one.num_tokens - one.num_computed_tokens for one in prefills)
        pool = scheduler.kv_cache_manager.block_pool
        return BatchView(
            now=now,
            profile=self._profile,
            decodes=len(decodes),
            context=Tokens(sum(one.num_computed_tokens for one in decodes) + len(decodes)),
            prefills=len(prefills),
            waiting=len(scheduler.waiting),
            prefill_tokens=Tokens(rest + queue.tokens),
            free_blocks=Blocks(
                pool.get_num_free_blocks()
                // self._sizes.groups
                * self._sizes.block_tokens
                // BLOCK_TOKENS
            ),
            tightest_gap_ns=DurationNs(min(gaps)) if gaps else None,
            fronts=_fronts(scheduler, guests, queue, prefills),
        )

    def within(self, knobs: Knobs) -> Knobs:
        """Return knobs that go no further than vLLM was started with."""
        sizes = self._sizes
        return replace(
            knobs,
            token_budget=min(knobs.token_budget, sizes.budget),
            running_limit=min(knobs.running_limit, sizes.slots),
        )

    def turn(self, scheduler: Any, guests: Guests, knobs: Knobs) -> None:
        """Set the limits of the step that begins."""
        sizes = self._sizes
        decodes, prefills = split(scheduler.running)
        if prefills:
            self.changed |= Break.FIRST_TOKEN  # of one of them, at the end of this step
            if guests.marked or knobs.token_budget < sizes.budget:  # else as vLLM has them
                scheduler.running = decodes + _as_started(prefills, guests)
        scheduler.max_num_active_reqs = min(sizes.slots, knobs.running_limit)
        if not sizes.cuts:
            return
        least = len(decodes) * sizes.decode_tokens
        scheduler.max_num_scheduled_tokens = min(sizes.budget, max(knobs.token_budget, least, 1))
        chunk, adaptive = sizes.chunk, sizes.adaptive
        if knobs.chunk_limit is not None:
            chunk, adaptive = max(knobs.chunk_limit, sizes.decode_tokens), False
        scheduler.scheduler_config.long_prefill_token_threshold = chunk
        scheduler.adaptive_long_prefill_threshold = adaptive

    def rank_victims(self, scheduler: Any, guests: Guests) -> list[Guest]:
        """Give who gives way first the largest priority, if blocks may run out in this step.

        Returns whose was changed.
        """
        sizes, running = self._sizes, scheduler.running
        ahead = len(running) * (sizes.decode_tokens - 1)  # of what is speculated
        tokens = scheduler.max_num_scheduled_tokens + ahead
        most = (len(running) + -(-tokens // sizes.least_block)) * sizes.groups
        if most <= scheduler.kv_cache_manager.block_pool.get_num_free_blocks():
            return []
        guests.follow(running, {})
        holders = list(guests.running.values())
        if not holders:
            return []

        def pause(nth: int) -> Key:
            # Of those that came without metadata vLLM's own choice gives way, before others like them.
            one = holders[nth]
            if one.told is not None:
                return (1, self._pause_ns(one), -one.n)
            return (0, -one.own_priority, -one.n) if self._by_priority else (0, -one.started)

        guests.settle()
        first = giving_way(list(map(guests.entry, holders)), self._key, pause, VICTIMS)[:VICTIMS]
        ranks = {holders[nth].request.request_id: VICTIMS - rank for rank, nth in enumerate(first)}
        for name, rank in ranks.items():
            guests.running[name].request.priority = _PRIORITY + rank
        # vLLM plans no further in a step once the one it plans for gives way itself: that is the last.
        scheduler.running = sorted(
            running, key=lambda one: (one.is_prefill_chunk, ranks.get(one.request_id, 0))
        )
        return [guests.running[name] for name in ranks]

    def _pause_ns(self, guest: Guest) -> DurationNs:
        """Return what it takes to compute a request again, for each block that it frees."""
        computed = Tokens(guest.request.num_computed_tokens)
        held = Held(computed=computed, shared=Tokens(0), blocks=blocks_for(computed))
        return choose(held, RECOMPUTE_ONLY, self._profile, host_free=0).per_block_ns


def split(running: Iterable[EngineRequest]) -> tuple[list[EngineRequest], list[EngineRequest]]:
    """Return those that decode and those whose prompt is not done, each in their order."""
    decodes: list[EngineRequest] = []
    prefills: list[EngineRequest] = []
    for one in running:
        (prefills if one.is_prefill_chunk else decodes).append(one)
    return decodes, prefills


def _as_started(prefills: list[EngineRequest], guests: Guests) -> list[EngineRequest]:
    """Return prompts by when they started, which a step with ranks may have changed."""
    known = guests.running
    return sorted(
        prefills, key=lambda one: known[one.request_id].started if one.request_id in known else 0
    )


def _fronts(
    scheduler: Any, guests: Guests, queue: Queue, prefills: list[EngineRequest]
) -> tuple[Front, ...]:
    """Return the first prompts in the order in which a step computes them."""
    running = guests.running
    found = [
        _front(running[one.request_id], one.num_computed_tokens)
        for one in prefills[:FRONT_PROMPTS]
        if one.request_id in running
    ]
    looked = 0
    for guest in queue.in_line():
        if len(found) >= FRONT_PROMPTS:
            break
        position = 0
        if looked < LOOKUPS and _is_quiet(guest):
            looked += 1
            position = scheduler.kv_cache_manager.get_computed_blocks(guest.request)[1]
        found.append(_front(guest, position))
    return tuple(found)


def _is_quiet(guest: Guest) -> bool:
    """Return whether vLLM tells nobody when the cached part of a prompt is looked up."""
    return getattr(guest.request, "kv_cache_report_mode", "") != "full"


def _front(guest: Guest, position: int) -> Front:
    return Front(
        position=Tokens(position),
        left=Tokens(max(1, guest.request.num_tokens - position)),
        deadline=guest.deadline,
        relegated=guest.relegated,
    )
