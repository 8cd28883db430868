"""The emulated engine under the knobs of a real vLLM, given the requests that one was sent, in the same order."""

import random
from collections.abc import Sequence
from itertools import combinations

from msgspec import Struct

from headrace.adapters.vllm_plugin.settings import Settings, profile_of, rates_of
from headrace.model.ids import AttemptId, Incarnation, ReplicaName
from headrace.policy.batching.preemption import Offers, Victims
from headrace.replica.core import Replica
from headrace.replica.job import Job
from headrace.units import InstantNs, Tokens
from tests.services.vllm import BLOCK_TOKENS
from tests.services.vllm_ours import BLOCKS, BUDGET, SLOTS, Engine, Played, Sent

Composition = tuple[frozenset[int], tuple[tuple[int, int], ...]]
"""Who decodes in a step, and whose prompt tokens are computed, how many; requests by their place in the line of
arrivals, from 1."""


class Agreement(Struct, frozen=True, kw_only=True):
    """How far two runs of the same requests are one."""

    positions: float
    """Part of the places in the order of first scheduling that the same request has."""
    pairs: float
    """Part of the pairs of requests that are started in the same order."""
    steps: float
    """Part of the real engine's steps that hold the same tokens of the same requests as that of the same number."""


def mixed(count: int = 200, seed: int = 1) -> list[Sent]:
    """Return requests of three tenants, due in an order of their own, so far off that no clock matters."""
    draw = random.Random(seed)
    return [
        Sent(
            tenant=(tenant := draw.choice("xyyyyz")),
            weight=3 if tenant == "y" else 1,
            prompt=draw.randint(16, 400),
            output=draw.randint(1, 40),
            left_ms=draw.randrange(10_000_000, 20_000_000),
            relegated=draw.random() < 0.1,
        )
        for _ in range(count)
    ]


async def agreement(engine: Engine, settings: Settings, asked: Sequence[Sent]) -> Agreement:
    """Return how a real engine and the emulated one agree on what all waits before the first is started."""
    played = await engine.together(asked)
    real, twin = _real(played), _emulated(played, settings)
    order, other = _order(real), _order(twin)
    place = {n: nth for nth, n in enumerate(other)}
    pairs = [place[a] < place[b] for a, b in combinations(order, 2)]
    return Agreement(
        positions=_part([a == b for a, b in zip(order, other, strict=True)]),
        pairs=_part(pairs),
        steps=_part([a == b for a, b in zip(real, twin, strict=False)])
        * min(1, len(twin) / len(real)),
    )


def _part(alike: Sequence[bool]) -> float:
    return sum(alike) / len(alike)


def _order(steps: Sequence[Composition]) -> list[int]:
    return list(dict.fromkeys(n for _, prompts in steps for n, _ in prompts))


def _real(played: Played) -> list[Composition]:
    place = {n: nth for nth, n in enumerate(played.arrived, 1)}
    steps = [
        (
            frozenset(place[n] for n in step.decodes if n in place),
            tuple((place[n], tokens) for n, _, tokens in step.prefills if n in place),
        )
        for step in played.steps
    ]
    return [step for step in steps if any(step)]


def _emulated(played: Played, settings: Settings) -> list[Composition]:
    """Return the emulated engine's steps, after one of a request that all others wait for."""
    profile = profile_of(settings, capacity=BLOCKS * BLOCK_TOKENS, budget=BUDGET, slots=SLOTS)
    replica = Replica(
        ReplicaName("twin"),
        Incarnation(1),
        profile,
        settings.batching,
        ordering=settings.ordering,
        rates=rates_of(settings, profile),
        token_ns=0,
        offers=Offers(victims=Victims.FAIR),
        fast_forward=False,
    )
    for nth, sent in enumerate([Sent(tenant="opener", output=1), *played.sent]):
        assert replica.submit(_job(nth, sent), InstantNs(nth)) is None
    steps: list[Composition] = []
    while (due := replica.next_event()) is not None:
        replica.advance(due)
        batch = replica._batch
        if replica.next_event() is not None:
            prompts = tuple((int(one.job.attempt), tokens) for one, tokens in batch.plan)
            steps.append((frozenset(map(int, batch.decodes)), prompts))
    return steps


def _job(nth: int, sent: Sent) -> Job:
    told = sent.told
    return Job(
        attempt=AttemptId(nth),
        prompt_tokens=Tokens(sent.prompt),
        output_tokens=Tokens(sent.output),
        gap_bound_ns=told.gap_ns,
        tenant=told.tenant,
        deadline=InstantNs(told.left_ns),
        relegated=told.relegated,
        way=told.way,
        counters=told.counters,
    )
