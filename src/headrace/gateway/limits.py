"""What is left of a tenant's own limits, told in the headers that SDKs read.

Read off the ledger's buckets right after a decision, so that they show this very reservation; there
is no second count that could differ.
"""

from headrace.gateway.errors import Headers
from headrace.model.ids import TenantId
from headrace.plane.core import Plane
from headrace.plane.ledger import Bucket
from headrace.units import NS_PER_MS, NS_PER_S, DurationNs, ceil_div

_MINUTE, _HOUR = 60, 3_600


def balances(plane: Plane, tenant: TenantId) -> dict[str, Bucket]:
    """Return a tenant's buckets (`requests`, `tokens`) as they stand now; no limit, no bucket."""
    spec = plane.settings.tenants.get(tenant)
    if spec is None:
        return {}
    quota = plane.state.ledger.quotas.get(tenant)
    passed = 0 if quota is None else plane.state.now - quota.at
    found: dict[str, Bucket] = {}
    for name, limit in (("requests", spec.rpm_limit), ("tokens", spec.tpm_limit)):
        if limit is None:
            continue
        kept = None if quota is None else (quota.requests if name == "requests" else quota.tokens)
        now = Bucket(limit, limit) if kept is None else Bucket(kept.limit, kept.level, kept.rest)
        now.refill(limit, passed)
        found[name] = now
    return found


def rate_headers(plane: Plane, tenant: TenantId) -> Headers:
    """Return `x-ratelimit-*`: limit, what remains, and when the bucket is full again."""
    told: Headers = []
    for name, bucket in balances(plane, tenant).items():
        values = {
            "limit": str(bucket.limit),
            "remaining": str(max(0, bucket.level)),
            "reset": duration(bucket.wait_ns(bucket.limit)),
        }
        told += [
            (f"x-ratelimit-{word}-{name}".encode(), text.encode()) for word, text in values.items()
        ]
    return told


def duration(wait: DurationNs) -> str:
    """Return a wait as Go writes it (`250ms`, `1s`, `6m0s`), rounded up, never too short."""
    millis = ceil_div(wait, NS_PER_MS)
    if 0 < millis < NS_PER_S // NS_PER_MS:
        return f"{millis}ms"
    whole = ceil_div(wait, NS_PER_S)
    hours, rest = divmod(whole, _HOUR)
    minutes, secs = divmod(rest, _MINUTE)
    if hours:
        return f"{hours}h{minutes}m{secs}s"
    return f"{minutes}m{secs}s" if minutes else f"{secs}s"
