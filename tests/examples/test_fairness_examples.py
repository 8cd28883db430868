"""Worked examples of fairness: who gets the GPU when both ask equally often."""

from collections import Counter
from typing import Any

from msgspec import Struct

from headrace.config.profiles import load_profile
from headrace.model.decision import Reason
from headrace.model.deployment import PoolSpec, TenantSpec
from headrace.model.effect import Dispatch
from headrace.policy.fairness.costs import WorkCost
from headrace.policy.fairness.vtc import Vtc
from headrace.policy.ordering.orders import Fifo
from headrace.units import InstantNs
from tests.plane.scenes import MS, Driver, S, config, patient, usage

PROFILE = load_profile("h100-8b-tp1")
CHAT, DOCUMENT = (100, 200), (32_768, 4_096)
SHAPES = {"chat": CHAT, "document": DOCUMENT}


class Job(Struct):
    """One attempt on the engine."""

    sent: Dispatch
    given: int
    output: int
    prefilled: int = 0
    made: int = 0


class Engine:
    """One replica, one step at a time: decodes first, the rest of the budget to one prompt."""

    def __init__(self, made: Driver) -> None:
        self.made = made
        self.jobs: list[Job] = []
        self.taken = 0
        self.served: Counter[str] = Counter()
        self.ticked = 0

    def take(self) -> None:
        """Take over what the plane has sent since."""
        sent = self.made.sent()
        for one in sent[self.taken :]:
            self.jobs.append(Job(one, *SHAPES[one.tenant]))
        self.taken = len(sent)

    def step(self) -> None:
        """Run one step and tell the plane what came of it."""
        self.take()
        made = self.made
        decodes = [job for job in self.jobs if job.made]
        prompt = next((job for job in self.jobs if not job.made), None)
        context = sum(job.given + job.made for job in decodes)
        chunk = span = 0
        if prompt is not None:
            chunk = min(512 - len(decodes), prompt.given - prompt.prefilled)
            span = (prompt.prefilled + chunk) ** 2 - prompt.prefilled**2
        if not self.jobs:
            made.wait(MS)
            return
        made.now = InstantNs(
            made.now + PROFILE.step_ps(len(decodes), context, chunk, span) // 1_000
        )
        for job in decodes:
            job.made += 1
            self.served[job.sent.tenant] += PROFILE.token_ns(job.given + job.made)
        if prompt is not None:
            self.served[prompt.sent.tenant] += PROFILE.work_ns(chunk, prompt.prefilled, 0)
            prompt.prefilled += chunk
            if prompt.prefilled == prompt.given:
                prompt.made = 1
                made.first(prompt.sent.attempt)
        for job in [job for job in decodes if job.made >= job.output]:
            self.jobs.remove(job)
            made.end(
                job.sent.attempt, usage=usage(job.given, job.made), timing=made.timing(job.made)
            )
        if made.now - self.ticked >= 100 * MS:
            self.ticked = made.now
            made.tick(*((job.sent.attempt, job.made) for job in self.jobs if job.made))

    def share(self, tenant: str) -> float:
        return self.served[tenant] / self.served.total()


def both(**more: Any) -> Driver:
    limits = more.pop("limits", {})
    tenants = tuple(TenantSpec(name=name, **limits) for name in SHAPES)
    pools = (PoolSpec(name="p", model="m", profile=PROFILE),)
    classes = (patient(tenant_queue=100_000, queue=200_000),)
    return Driver(config(tenants=tenants, pools=pools, classes=classes, **more))


def offer(made: Driver, tenant: str) -> None:
    tokens, output = SHAPES[tenant]
    made.arrive(tenant, tokens, max_output=output)


def run(made: Driver, *, until_s: int, offered: int) -> Engine:
    """Serve equally many requests of both, offered together, for so many seconds."""
    for _ in range(offered):
        for tenant in SHAPES:
            offer(made, tenant)
    engine = Engine(made)
    while made.now < until_s * S:
        engine.step()
    waiting = {queue.tenant for queue in made.known.backlog.queues.values()}
    assert waiting == set(SHAPES), "both still wait"
    return engine


def test_ex_14_under_an_rps_limit_the_long_ones_get_over_95_percent_of_gpu_work() -> None:
    made = both(ordering=Fifo(), limits={"rpm_limit": 60})
    engine = run(made, until_s=60, offered=80)
    admitted = Counter(record.tenant for record in made.entries())
    assert set(admitted.values()) == {80}
    assert {r.rejection.reason for r in made.refused()} == {Reason.REQUEST_RATE}
    sent = Counter(one.tenant for one in made.sent())
    assert abs(sent["chat"] - sent["document"]) <= 1  # type: ignore[index]
    assert engine.share("document") > 0.95


def test_ex_14_work_shares_are_half_and_half_while_both_are_backlogged() -> None:
    made = both(fairness=Vtc(cost=WorkCost()))
    engine = run(made, until_s=60, offered=3_200)
    assert 0.45 < engine.share("chat") < 0.55
    sent = Counter(one.tenant for one in made.sent())
    assert sent["chat"] > 100 * sent["document"]  # type: ignore[index]


def test_ex_14_weighted_tokens_share_service_not_gpu_time() -> None:
    """Long contexts cost more for each token than the weights, taken at one context, say."""
    made = both()
    engine = run(made, until_s=60, offered=600)
    chat, document = (made.counter(tenant) for tenant in SHAPES)
    assert 0.8 < chat / document < 1.25
    assert engine.share("chat") < 0.2
