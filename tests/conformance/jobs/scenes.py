"""Jobs for tests: short to write, all alike but for what a test is about."""

from typing import Any

from headrace.model.ids import ClassName, ModelName, TenantId
from headrace.model.paths import Level, Link, Path, path
from headrace.policy.fairness.claims import ClaimOrder, Line
from headrace.ports.engine import Route
from headrace.ports.job import JobId, JobSpec, Lease, State, UnixNs
from headrace.ports.jobs import Claim, ClaimAsk, Ending, Finished, JobStore, Put, Result
from headrace.units import NS_PER_S, DurationNs, Service

MODEL = ModelName("m")
BATCH = ClassName("batch")
FAR = 10**9
"""A deadline that no test comes to, in seconds."""


def at(second: float) -> UnixNs:
    """Return a time of a test."""
    return UnixNs(round(second * NS_PER_S))


def spec(ident: str, tenant: str = "acme", **changed: Any) -> JobSpec:
    """Return a job; `deadline` is in seconds, and so is `keep`."""
    return JobSpec(
        id=JobId(ident),
        tenant=TenantId(tenant),
        slo_class=changed.pop("slo_class", BATCH),
        model=changed.pop("model", MODEL),
        route=changed.pop("route", Route.CHAT),
        service=Service(changed.pop("service", 10)),
        created_ns=at(0),
        deadline_ns=at(changed.pop("deadline", FAR)),
        keep_ns=DurationNs(at(changed.pop("keep", 60))),
        **changed,
    )


def order(**weights: int) -> ClaimOrder:
    """Return an order in which tenants share by weight below their class; 1 where none is told."""

    def way(line: Line) -> Path:
        weight = weights.get(line.tenant, 1)
        tenant = Link(Level.TENANT, line.tenant, weight)
        return path(Link(Level.CLASS, line.slo_class), tenant)

    return ClaimOrder(way=way)


def ask(limit: int = 100, *, owner: str = "one", until: float = 30, model: str = MODEL) -> ClaimAsk:
    """Return a worker's question for work."""
    return ClaimAsk(model=ModelName(model), owner=owner, limit=limit, until_ns=at(until))


DONE = Ending(state=State.DONE, result=Result(status=200, body=b"told"))


async def put(store: JobStore, *specs: JobSpec, body: bytes = b"asked") -> None:
    """Put jobs that are all taken."""
    found = await store.put([(one, body) for one in specs])
    assert all(isinstance(one, Put) and one.fresh for one in found), found


async def finish(store: JobStore, lease: Lease, ending: Ending, now: float) -> Finished:
    """End one job."""
    (told,) = await store.finish([(lease, ending)], at(now))
    return told


def ids(claims: list[Claim]) -> list[str]:
    """Return which jobs were handed out."""
    return [claim.job.spec.id for claim in claims]


async def state(store: JobStore, ident: str, tenant: str = "acme") -> State:
    """Return where a job is."""
    job = await store.get(TenantId(tenant), JobId(ident))
    assert job is not None
    return job.state
