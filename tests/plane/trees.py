"""Configurations drawn for the plane: every level of the share tree, every order, every cost."""

from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.model.deployment import ClassSpec, LaneSpec, OrganisationSpec, TenantSpec
from headrace.policy.catalog import PlaneConfig, canonical, decode
from headrace.policy.fairness.vtc import Vtc
from headrace.policy.ordering.orders import (
    EarliestDeadline,
    Fifo,
    LeastSlack,
    Niyama,
    Ordering,
    Score,
    ShortestFirst,
    TenantFirst,
    VtcOrder,
)
from tests.plane.scenes import COSTS

ORDERS: tuple[Ordering, ...] = (
    TenantFirst(),
    TenantFirst(lend_after_ms=500.0),
    TenantFirst(lend_after_ms=None),
    VtcOrder(),
    Score(),
    Score(candidates=2, aging=10.0),
    Niyama(),
    Fifo(),
    ShortestFirst(),
    EarliestDeadline(),
    LeastSlack(),
)
BY_SHARE = tuple(order for order in ORDERS if order.by_share)
LANES = ("ops", "probes")
ORGANISATIONS = ("x", "y")
USERS = (None, "u", "v", "w")

_weights = st.sampled_from((1, 1, 2, 7))
_minimums = st.sampled_from((0.0, 0.0, 0.0, 0.05, 0.3))
_maximums = st.sampled_from((1.0, 1.0, 1.0, 0.5, 0.1))


@st.composite
def _parts(draw: st.DrawFn) -> dict[str, Any]:
    """Draw what any node of the tree has, its minimum no more than its maximum."""
    maximum = draw(_maximums)
    return {
        "weight": draw(_weights),
        "minimum": min(maximum, draw(_minimums)),
        "maximum": maximum,
    }


def fairness() -> st.SearchStrategy[Vtc]:
    """Draw a cost, and the bounded exceptions from its counters."""
    return st.builds(
        Vtc,
        cost=st.sampled_from(tuple(COSTS.values())),
        aging_tokens_per_s=st.sampled_from((0.0, 0.0, 50.0, 100_000.0)),
        boost_tokens=st.sampled_from((0.0, 0.0, 3_000.0)),
        boost_ms=st.sampled_from((0.0, 200.0, 5_000.0)),
        memory_tokens=st.sampled_from((1.0, 3_000.0, 100_000.0)),
    )


@st.composite
def grown(draw: st.DrawFn, base: PlaneConfig) -> PlaneConfig:
    """Draw a tree of shares from some or all of the classes and tenants of a configuration.

    Whatever order, cost and limits: the same names come back at other places, or not at all.
    """
    lanes = draw(st.lists(st.sampled_from(LANES), unique=True))
    organisations = draw(st.lists(st.sampled_from(ORGANISATIONS), unique=True))
    classes = draw(st.lists(st.sampled_from(base.classes), unique=True, min_size=1))
    if draw(st.booleans()):
        classes = list(base.classes)
    tenants = draw(st.lists(st.sampled_from(base.tenants), unique=True, min_size=1))
    if draw(st.booleans()):
        tenants = list(base.tenants)
    drawn = replace(
        base,
        lanes=tuple(LaneSpec(name=name, **draw(_parts())) for name in lanes),
        organisations=tuple(
            OrganisationSpec(name=name, **draw(_parts())) for name in organisations
        ),
        classes=tuple(draw(_class(spec, [None, *lanes])) for spec in classes),
        tenants=tuple(
            draw(_tenant(spec, [None, *organisations], base.classes)) for spec in tenants
        ),
        ordering=draw(st.sampled_from(ORDERS)),
        fairness=draw(fairness()),
    )
    return decode(canonical(drawn))  # as it is read: 1 is 1.0


@st.composite
def _class(draw: st.DrawFn, spec: ClassSpec, lanes: list[str | None]) -> ClassSpec:
    return replace(
        spec,
        lane=draw(st.sampled_from(lanes)),
        expire=draw(st.sampled_from((spec.expire, False))),
        starve_ms=draw(st.sampled_from((None, 1.0, 3_000.0, 600_000.0))),
        **draw(_parts()),
    )


@st.composite
def _tenant(
    draw: st.DrawFn,
    spec: TenantSpec,
    organisations: list[str | None],
    classes: tuple[ClassSpec, ...],
) -> TenantSpec:
    named = tuple(one.name for one in classes)  # a lane is for those who name its classes
    return replace(
        spec,
        classes=spec.classes or draw(st.sampled_from(((), named, named))),
        organisation=draw(st.sampled_from(organisations)),
        by_user=draw(st.booleans()),
        **draw(_parts()),
    )
