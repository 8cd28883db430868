"""What is left of a tenant's own limits, told in the headers that SDKs read.

Read off the ledger's buckets and windows right after a decision, so that they show this very
reservation; there is no second count that could differ.
"""

from collections.abc import Iterator

from msgspec import Struct

from headrace.gateway.durations import written
from headrace.gateway.errors import Headers
from headrace.model.budget import NOTHING, Unit, written_amount
from headrace.model.decision import Reason
from headrace.model.evidence import WindowFacts
from headrace.model.ids import TenantId
from headrace.model.request import Request
from headrace.plane.core import Plane
from headrace.plane.quotas import Bucket, Quota, window_facts
from headrace.units import DurationNs, InstantNs


class Balance(Struct, frozen=True, kw_only=True):
    """What is left of one limit."""

    limit: int
    remaining: int
    """Below zero where an answer outgrew its reserve."""
    reset_ns: DurationNs
    """Until nothing of it is used: a bucket is full again, or a window over."""


def turned_away(plane: Plane, tenant: TenantId, now: InstantNs) -> bool:
    """Return whether the plane refuses whatever a tenant asks for at this instant, however little and cheap.

    Nothing of such a request need be counted: the plane refuses it by its own books, as any other.
    """
    spec, settings = plane.settings.tenants.get(tenant), plane.settings
    if spec is None or not settings.refuses_over_limits:
        return False
    quota = plane.state.ledger.quotas.get(tenant)
    most = spec.max_parallel_requests
    if quota is not None and most is not None and quota.parallel >= most:
        return True
    buckets = any(one.remaining < 1 for _, one in _buckets(plane, tenant, now))
    return buckets or any(
        one.hard is not None and one.taken + _LEAST.get(one.unit, 0) > one.hard
        for one in budgets(plane, tenant, now)
    )


_LEAST = {Unit.REQUESTS: 1, Unit.TOKENS: 1}
"""The least that a request takes of a budget; there are models that cost nothing."""


def is_too_large(plane: Plane, request: Request) -> bool:
    """Return whether a request is refused for its size, and for good, if it is as large as estimated.

    Who only comes too soon is told when to come again; who is told never must have been counted.
    """
    quote = plane.quote(request)
    if quote.verdict.reason is Reason.CONTEXT_TOO_LONG:
        return True
    spec, take = plane.settings.tenants.get(request.tenant), quote.take
    if spec is None:
        return False
    if spec.tpm_limit is not None and take.tokens > spec.tpm_limit:
        return True
    hard = ((take.of(one.unit), one.hard_amount()) for one in spec.budgets)
    return any(most is not None and need > most for need, most in hard)


def balances(plane: Plane, tenant: TenantId) -> dict[str, Balance]:
    """Return what is left of `requests` and `tokens`, by whichever limit leaves least."""
    found: dict[str, Balance] = {}
    now = plane.state.now
    for name, one in (*_buckets(plane, tenant, now), *_windows(plane, tenant)):
        known = found.get(name)
        if known is None or one.remaining < known.remaining:
            found[name] = one
    return found


def budgets(
    plane: Plane, tenant: TenantId, now: InstantNs | None = None
) -> tuple[WindowFacts, ...]:
    """Return a tenant's budgets as they stand now; without an instant, when the plane acted last."""
    spec = plane.settings.tenants.get(tenant)
    if spec is None or not spec.budgets:
        return ()
    now = plane.state.now if now is None else now
    quota = plane.state.ledger.quotas.get(tenant) or Quota(at=now)
    return window_facts(spec, quota, NOTHING, now)


def _buckets(plane: Plane, tenant: TenantId, now: InstantNs) -> Iterator[tuple[str, Balance]]:
    spec = plane.settings.tenants.get(tenant)
    if spec is None:
        return
    quota = plane.state.ledger.quotas.get(tenant)
    passed = 0 if quota is None else now - quota.at
    for name, limit in (("requests", spec.rpm_limit), ("tokens", spec.tpm_limit)):
        if limit is None:
            continue
        kept = None if quota is None else (quota.requests if name == "requests" else quota.tokens)
        one = Bucket(limit, limit) if kept is None else Bucket(kept.limit, kept.level, kept.rest)
        one.refill(limit, passed)
        yield name, Balance(limit=one.limit, remaining=one.level, reset_ns=one.wait_ns(one.limit))


def _windows(plane: Plane, tenant: TenantId) -> Iterator[tuple[str, Balance]]:
    for one in budgets(plane, tenant):
        if one.hard is not None and one.unit in (Unit.REQUESTS, Unit.TOKENS):
            left = one.hard - one.taken
            yield one.unit, Balance(limit=one.hard, remaining=left, reset_ns=one.wait_ns)


def rate_headers(plane: Plane, tenant: TenantId) -> Headers:
    """Return `x-ratelimit-*`, and a warning of every budget beyond its soft limit."""
    found: Headers = []
    for name, balance in balances(plane, tenant).items():
        values = {
            "limit": str(balance.limit),
            "remaining": str(max(0, balance.remaining)),
            "reset": written(balance.reset_ns),
        }
        found += [
            (f"x-ratelimit-{word}-{name}".encode(), text.encode()) for word, text in values.items()
        ]
    over = [
        f"{one.name} {written_amount(one.unit, one.taken)} of {written_amount(one.unit, one.soft)}"
        for one in budgets(plane, tenant)
        if one.soft is not None and one.taken > one.soft
    ]
    if over:
        found.append((b"x-headrace-budget-warning", ", ".join(over).encode()))
    return found
