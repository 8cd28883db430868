"""What is a caller told of the form in which its next request would be served?

For who retrieves before it asks: no more than `top_k` parts of its context would be kept (DEG-1).
"""

from collections.abc import Mapping
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct, field

from headrace.gateway.driver import Driver
from headrace.gateway.errors import unfit
from headrace.gateway.intake import Intake, RefusedError, invalid, lowest
from headrace.model.ids import ModelName, RequestId, TenantId
from headrace.model.ladder import Effort
from headrace.model.request import Request
from headrace.units import Tokens

LADDER = "/v1/headrace/ladder"
"""Where it is asked."""
_VALID_MS = 1_000
"""For how long that holds, about: levels are looked at every second."""
_FIELDS_MAX = 8


class Told(Struct, frozen=True, kw_only=True):
    """It, as callers see it."""

    object: str = "headrace.ladder"
    model: str
    slo_class: str = field(name="class")
    level: int
    top_k: int | None
    output_part: float
    effort: Effort | None
    answering_model: str
    policy_revision: int
    valid_ms: int = _VALID_MS


def told(
    driver: Driver, intake: Intake, tenant: TenantId, headers: Mapping[bytes, bytes], query: bytes
) -> bytes:
    """Return what a tenant is told of a model; raises `RefusedError`."""
    if driver.closed is not None:
        raise RefusedError(driver.closed)
    request = Request(
        id=RequestId(0),
        tenant=tenant,
        model=ModelName(_model(query)),
        input_tokens=Tokens(1),
        slo_class=intake.objective(headers, tenant),
        lowest=lowest(headers),
    )
    found = driver.plane.outlook(request)
    if found.verdict.reason is not None:
        raise RefusedError(unfit(found.verdict))
    return msgspec.json.encode(
        Told(
            model=found.model,
            slo_class=found.slo_class,
            level=found.level,
            top_k=found.top_k,
            output_part=found.output_part,
            effort=found.effort,
            answering_model=found.answers,
            policy_revision=driver.revision,
        )
    )


def _model(query: bytes) -> str:
    try:
        fields = dict(parse_qsl(query.decode("ascii"), errors="strict", max_num_fields=_FIELDS_MAX))
    except ValueError:
        raise invalid("The query cannot be read.", None) from None
    if not (model := fields.get("model")):
        raise invalid("Say which model: `?model=NAME`.", "model")
    return model
