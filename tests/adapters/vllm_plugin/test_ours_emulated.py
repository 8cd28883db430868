"""Our scheduler in vLLM takes the steps of an emulated engine under the same policies, at the same instants.

As in `test_emulated`, and where all come within the first step: whoever comes in the midst of one is compared
with counters as they stand at its end here, and as they stood at its begin there. Requests have ITL
bounds of their own, since vLLM cannot say how many of a victim's blocks others share, which is what
decides among equals.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace

from headrace.model.ids import AttemptId, ClassName, Incarnation, ReplicaName, TenantId
from headrace.model.paths import Level, Link, path
from headrace.model.profile import Profile
from headrace.model.told import Told
from headrace.policy.batching import Batching, ChunkedPrefill, DecodeFirst, PacedPrefill
from headrace.policy.batching.preemption import Offers, Victims, Whole
from headrace.policy.ordering.orders import EarliestDeadline, Ordering, TenantFirst
from headrace.replica.core import Replica
from headrace.replica.job import Job
from headrace.units import PS_PER_NS, InstantNs, Tokens, ms, seconds, to_ms
from tests.adapters.vllm_plugin.scenes import engine, play, starts
from tests.adapters.vllm_plugin.test_emulated import Made, look, steps
from tests.replica.scenes import small
from tests.services.vllm_scene import OURS, Asked, Run

pytestmark = pytest.mark.vllm

LATE_NS = seconds(60)
"""Longer than a run: until when one lets others pass hangs on the ns of its arrival."""
WEIGHTS = {"a": 1, "b": 3, "c": 1}
COUNT = 200


class Case(Struct, frozen=True, kw_only=True):
    """Sizes of an engine and what it goes by."""

    blocks: int = 4_000
    running: int = 8
    budget: int = 512
    batching: Batching = ChunkedPrefill()
    ordering: Ordering = TenantFirst()
    whole: Whole = Whole.ALL
    seed: int = 1


CASES = [
    Case(),
    Case(batching=PacedPrefill(token_budget_max=512)),
    Case(batching=DecodeFirst(token_budget=512), seed=2),
    Case(blocks=400, running=32),
    Case(blocks=400, running=32, whole=Whole.NEVER),
    Case(blocks=250, running=32, budget=2_048, batching=PacedPrefill(), seed=3),
    Case(blocks=400, running=32, ordering=EarliestDeadline(), seed=4),
]


class Marked(Struct, frozen=True, kw_only=True):
    """A request and what is told of it."""

    asked: Asked
    told: Told


def drawn(case: Case) -> list[Marked]:
    """Return requests of three tenants and two classes; a first one of nobody else's begins a step."""
    draw = random.Random(case.seed)
    first = marked(Asked(id="0", length=8), tenant="opener")
    return [first, *(_one(draw, nth) for nth in range(1, COUNT))]


def _one(draw: random.Random, nth: int) -> Marked:
    batch = draw.random() < 0.3
    asked = Asked(
        id=f"{nth}", at_ns=nth, length=draw.randint(16, 1_500), max_tokens=draw.randint(1, 120)
    )
    return marked(
        asked,
        tenant=draw.choice("aabbbbc"),
        left_ms=draw.randint(500, 9_000),
        gap_ms=(500 if batch else 80) + nth,
        relegated=draw.random() < 0.1,
    )


def marked(asked: Asked, *, tenant: str, **changes: int) -> Marked:
    """Return a request with what is told of it."""
    told = Told(
        tenant=TenantId(tenant),
        slo_class=ClassName("chat"),
        way=path(Link(Level.TENANT, tenant, WEIGHTS.get(tenant, 1))),
        counters=(0,),
        left_ns=ms(changes.get("left_ms", 1_000)),
        gap_ns=ms(changes.get("gap_ms", 80)),
        relegated=bool(changes.get("relegated", False)),
    )
    return Marked(asked=replace(asked, extra_args=told.scalars()), told=told)


def emulate(profile: Profile, case: Case, requests: Sequence[Marked], heard: int) -> list[Made]:
    """Return the steps of the emulated engine, one by one; all but the first are heard at an instant."""
    replica = Replica(
        ReplicaName("r"),
        Incarnation(1),
        profile,
        case.batching,
        ordering=case.ordering,
        offers=Offers(victims=Victims.FAIR, whole=case.whole),
        late_ns=LATE_NS,
        fast_forward=False,
    )
    made: list[Made] = []
    for nth, one in enumerate(requests):
        assert replica.submit(_job(one, heard if nth else 0), InstantNs(one.asked.at_ns)) is None
        look(replica, made)
    while (due := replica.next_event()) is not None:
        replica.advance(due)
        look(replica, made)
    return made


def _job(one: Marked, heard: int) -> Job:
    told = one.told
    return Job(
        attempt=AttemptId(int(one.asked.id)),
        prompt_tokens=Tokens(one.asked.length),
        output_tokens=Tokens(one.asked.max_tokens),
        gap_bound_ns=told.gap_ns,
        tenant=told.tenant,
        deadline=InstantNs(heard + told.left_ns),
        relegated=told.relegated,
        way=told.way,
        counters=told.counters,
    )


def ours(profile: Profile, case: Case, requests: Sequence[Marked], folder: Path) -> Run:
    """Return what vLLM does with our scheduler, a step at a time."""
    file = folder / "profile.json"
    file.write_bytes(msgspec.json.encode(profile))
    settings = {
        "profile": str(file),
        "batching": msgspec.to_builtins(case.batching),
        "ordering": msgspec.to_builtins(case.ordering),
        "late_ms": to_ms(LATE_NS),
    }
    return play(
        *[one.asked for one in requests],
        engine=replace(
            engine(OURS, additional_config={"headrace": settings}),
            async_scheduling=False,
            max_num_seqs=case.running,
            max_num_batched_tokens=case.budget,
            num_gpu_blocks=case.blocks + 1,
            prefix_caching=False,
            reserve_full_isl=case.whole is Whole.ALL,
        ),
        profile=profile,
    )


def unordered(made: Sequence[Made]) -> list[tuple[int, int, frozenset[str], dict[str, int]]]:
    """Return steps without the order of their prompts: in vLLM whoever may have to give way stands last."""
    return [(start, end, decodes, dict(prompts)) for start, end, decodes, prompts in made]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_our_scheduler_takes_the_emulated_engines_steps(case: Case, tmp_path: Path) -> None:
    profile = small(case.blocks, budget=case.budget, running=case.running)
    requests = drawn(case)
    run = ours(profile, case, requests, tmp_path)
    made = emulate(profile, case, requests, run.steps[0].end_ps // PS_PER_NS)
    assert unordered(made) == unordered(steps(run))
    order = list(dict.fromkeys(name for _, _, _, prompts in made for name, _ in prompts))
    assert order == starts(run)
    assert (case.blocks < 1_000) == any(step.preempted for step in run.steps)
