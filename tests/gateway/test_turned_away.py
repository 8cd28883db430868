"""Whom the gateway turns away before its prompt is looked at, the plane refuses, whatever came before."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.limits import turned_away
from headrace.model.budget import Per, Unit, WindowSpec
from headrace.model.decision import Gate, Reject
from headrace.model.deployment import ModelSpec, TenantSpec
from headrace.model.effect import Decided
from headrace.model.event import RequestArrived
from headrace.model.evidence import EntryRecord
from headrace.model.ids import RequestId, TenantId
from headrace.model.price import PriceSpec
from headrace.model.request import Request
from headrace.plane.core import Plane
from headrace.policy.admission.gates import GateMode, Gates, Mode, Modes
from headrace.policy.catalog import PlaneConfig
from headrace.units import InstantNs, Tokens
from tests.plane.scenes import MODEL, MS, Driver, S, config

_FREE = PriceSpec(input=0.0, cached=0.0, output=0.0)
_DEAR = PriceSpec(input=2.0, cached=0.5, output=8.0)
_BUDGETS = st.builds(
    WindowSpec,
    unit=st.sampled_from(list(Unit)),
    per=st.sampled_from(list(Per)),
    hard=st.sampled_from([1e-9, 0.5, 1.0, 3.0, 2_000.0]),
)
_TENANTS = st.builds(
    TenantSpec,
    name=st.just("a"),
    tpm_limit=st.none() | st.sampled_from([1, 500, 5_000]),
    rpm_limit=st.none() | st.integers(1, 3),
    max_parallel_requests=st.none() | st.integers(1, 3),
    max_parallel_sessions=st.none() | st.integers(1, 2),
    budgets=st.lists(_BUDGETS, max_size=3, unique_by=lambda one: (one.unit, one.per)).map(tuple),
)
_GATES = st.sampled_from(
    [
        Gates(),
        Gates(mode=GateMode.OBSERVE),
        Gates(modes=Modes(budget=Mode.AUDIT)),
        Gates(mode=GateMode.OBSERVE, modes=Modes(budget=Mode.ENFORCE)),
        Gates(modes=Modes(contract=Mode.AUDIT)),
    ]
)
_CONFIGS = st.builds(
    lambda tenant, gates, price: config(
        models=(ModelSpec(name="m", price=price, fan_out_limit=4),),
        tenants=(tenant,),
        admission=gates,
    ),
    _TENANTS,
    _GATES,
    st.sampled_from([_FREE, _DEAR]),
)
_STEPS = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 700), st.integers(1, 4)),
    st.tuples(st.just("serve"), st.integers(0, 5), st.integers(1, 900)),
    st.tuples(st.just("wait"), st.sampled_from([1, MS, S, 20 * S, 61 * S, 3_601 * S]), st.just(0)),
    st.tuples(st.just("change"), _CONFIGS, st.just(0)),
)


def offered(plane: Plane, now: InstantNs, **told: Any) -> EntryRecord:
    """Return what a copy of the plane decides on a small request."""
    request = Request(
        id=RequestId(10**6), tenant=TenantId("a"), model=MODEL, input_tokens=Tokens(1), **told
    )
    effects = Plane.thaw(plane.freeze()).handle(RequestArrived(request), now=now)
    (record,) = (one.record for one in effects[:1] if isinstance(one, Decided))
    assert isinstance(record, EntryRecord)
    return record


def step(made: Driver, what: str, one: Any, other: int, nth: int) -> None:
    match what:
        case "ask":
            made.arrive(tokens=one, max_output=one, fan_out=other, session=f"s{other}")
        case "serve":
            sent = [live for live in made.plane.state.live.values() if live.attempt is not None]
            if sent:
                made.serve(sent[one % len(sent)].request.id, output=other)
        case "wait":
            made.wait(one)
        case _:
            made.configure(one, nth + 2)


@settings(max_examples=150)
@given(start=_CONFIGS, steps=st.lists(_STEPS, max_size=25))
def test_whoever_is_turned_away_would_have_been_refused(
    start: PlaneConfig, steps: list[tuple[str, Any, int]]
) -> None:
    made = Driver(start, replicas=2)
    for nth, (what, one, other) in enumerate(steps):
        step(made, what, one, other, nth)
        before = made.plane.freeze()
        away = turned_away(made.plane, TenantId("a"), made.now)
        assert made.plane.freeze() == before, "looking changes nothing"
        if away:
            record = offered(made.plane, made.now, max_output=Tokens(1))
            assert isinstance(record.decision, Reject)
            assert record.decision.gate is Gate.BUDGET
            assert record.decision.retry_after_ns != 0
