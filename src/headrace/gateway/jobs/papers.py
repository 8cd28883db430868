"""What callers of files and batches share: where things are, how lists are asked for and told."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from headrace.gateway.errors import Edge, Fault, edge
from headrace.gateway.exchange import Exchange
from headrace.gateway.intake import RefusedError, invalid
from headrace.model.ids import TenantId
from headrace.ports.batches import Declined, Page
from headrace.units import NS_PER_S

T = TypeVar("T")

FILES, BATCHES = "/v1/files", "/v1/batches"
"""Where files and batches are; what is below is one of them, and what can be done with it."""
ID_MAX = 64
_FIELDS_MAX = 16

Act = Callable[[Exchange, TenantId], Awaitable[None]]
"""What is done for a tenant."""
Acts = dict[str, Act]
"""By method."""

_DECLINED: dict[Declined, Edge] = {
    Declined.TENANT_FILES: Edge.FILES_OF_TENANT,
    Declined.TENANT_BATCHES: Edge.BATCHES_OF_TENANT,
    Declined.STORE_FULL: Edge.JOBS_FULL,
    Declined.NO_FILE: Edge.NO_SUCH_FILE,
    Declined.KEY_MISMATCH: Edge.KEY_MISMATCH,
}


def taken(found: T | Declined) -> T:
    """Return what the store has taken; what it has not is refused."""
    if isinstance(found, Declined):
        raise RefusedError(edge(_DECLINED[found]))
    return found


def missing(path: str) -> Fault | None:
    """Return the refusal of a path at which there are files or batches where there is a store for them."""
    if all(below(path, place) is None for place in (FILES, BATCHES)):
        return None
    return edge(Edge.NO_SUCH_PATH, "Files and batches are not served: there is no queue (`jobs`).")


def below(path: str, place: str) -> list[str] | None:
    """Return what a path names below a place, step by step; None where it does not lead there."""
    if path == place:
        return []
    return path[len(place) + 1 :].split("/") if path.startswith(f"{place}/") else None


def ident(exchange: Exchange) -> str:
    """Return which file or batch a path names; what no id can be is taken for nobody's."""
    found: str = exchange.scope["path"].split("/")[3]
    return found if len(found) <= ID_MAX else ""


def query(exchange: Exchange) -> dict[str, str]:
    """Return what the query asks for; of what is told twice, the first."""
    text = exchange.scope["query_string"].decode("latin-1")
    try:
        told = parse_qsl(text, max_num_fields=_FIELDS_MAX)
    except ValueError:
        raise invalid(f"The query has more than {_FIELDS_MAX} fields.", None) from None
    return dict(reversed(told))


def page(told: dict[str, str], *, limit_max: int, limit: int) -> Page:
    """Return which part of a list is asked for, `limit` of it where that is not told."""
    asked = told.get("limit", str(limit))
    if not asked.isascii() or not asked.isdigit() or len(asked) > len(str(limit_max)):
        asked = "0"
    if not 1 <= int(asked) <= limit_max:
        raise invalid(f"Not a number from 1 to {limit_max}.", "limit")
    order = told.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("Neither `asc` nor `desc`.", "order")
    after = told.get("after")
    if after is not None and len(after) > ID_MAX:
        raise invalid("No id that there can be.", "after")
    return Page(limit=int(asked) + 1, after=after, ascending=order == "asc")


def listed(rows: Sequence[dict[str, Any]], asked: Page) -> bytes:
    """Return a page; it was asked for with one more than it has, which tells whether it is the last."""
    shown = rows[: asked.limit - 1]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(rows) > len(shown),
        }
    )


def seconds(instant_ns: int | None) -> int | None:
    """Return a time as it is told: whole seconds since 1970."""
    return None if instant_ns is None else instant_ns // NS_PER_S
