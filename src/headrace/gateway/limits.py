"""What is left of a tenant's own limits, told in the headers that SDKs read.

Read off the ledger's buckets right after a decision, so that they show this very reservation; there
is no second count that could differ.
"""

from headrace.gateway.durations import written
from headrace.gateway.errors import Headers
from headrace.model.ids import TenantId
from headrace.plane.core import Plane
from headrace.plane.ledger import Bucket


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
            "reset": written(bucket.wait_ns(bucket.limit)),
        }
        told += [
            (f"x-ratelimit-{word}-{name}".encode(), text.encode()) for word, text in values.items()
        ]
    return told
