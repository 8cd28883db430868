"""Requests that were put aside: offered once, admitted when they are sent, and nowhere else (SLO-4)."""

import pytest

from headrace.model.effect import Concluded
from headrace.model.event import RequestDeferred
from headrace.model.ids import ClassName, ModelName, RequestId, TenantId
from headrace.model.request import Request
from headrace.model.slo import Outcome
from headrace.plane.accounts import Tally
from headrace.plane.core import Plane
from headrace.units import Tokens
from tests.plane.invariants import tallies_add_up
from tests.plane.scenes import Driver


def tally(made: Driver, tenant: str = "a") -> Tally:
    tallies_add_up(made.plane.state)
    return made.plane.state.accounts.tally(TenantId(tenant), ClassName("batch"))


def asked(tenant: str = "a", model: str = "m", slo_class: str = "batch") -> Request:
    return Request(
        id=RequestId(1_000_000),
        tenant=TenantId(tenant),
        model=ModelName(model),
        input_tokens=Tokens(1_000),
        slo_class=ClassName(slo_class),
    )


def put_aside(made: Driver, request: Request | None = None) -> None:
    made.tell(RequestDeferred(request or asked()))


def taken_up(made: Driver) -> RequestId:
    return made.arrive(slo_class="batch", deferred=True)


def counts(made: Driver) -> tuple[int, int, int, int, int]:
    one = tally(made)
    return one.offered, one.deferred, one.admitted, one.taken_up, sum(one.outcomes.values())


def last(made: Driver) -> Concluded:
    return made.rows()[-1]


def test_it_is_offered_with_its_demand_when_it_is_put_aside_and_decided_on_by_nobody() -> None:
    made = Driver()
    put_aside(made)
    one = tally(made)
    assert counts(made) == (1, 1, 0, 0, 0)
    assert one.input_tokens == 1_000
    assert one.predicted_output > 0
    assert one.offered_work_ns > 0
    assert not made.entries()
    plain = Driver()
    plain.arrive(slo_class="batch")
    there = tally(plain)
    assert (there.predicted_output, there.offered_work_ns) == (
        one.predicted_output,
        one.offered_work_ns,
    ), "as if it had been asked at once"


def test_once_it_is_sent_it_is_among_the_admitted_and_not_offered_again() -> None:
    made = Driver()
    put_aside(made)
    request = taken_up(made)
    assert counts(made) == (1, 1, 1, 1, 0)
    made.serve(request)
    assert counts(made) == (1, 1, 1, 1, 1)
    assert (last(made).deferred, last(made).admitted, last(made).met) == (True, True, True)
    assert tally(made).met == 1


def test_what_waits_and_goes_back_was_neither_admitted_nor_has_it_ended() -> None:
    made = Driver(replicas=1)
    put_aside(made)
    made.arrive("b", 30_000, slo_class="batch")  # closes the window
    request = taken_up(made)
    assert made.live(request).attempt is None
    assert counts(made) == (1, 1, 0, 0, 0)
    made.leave(request)
    assert counts(made) == (1, 1, 0, 0, 0)
    row = last(made)
    assert (row.deferred, row.admitted, row.outcome, row.reason) == (True, False, None, None)


def test_what_is_refused_and_goes_back_is_no_rejection() -> None:
    made = Driver(replicas=0)
    put_aside(made)
    for _ in range(3):
        taken_up(made)
    assert len(made.refused()) == 3
    assert counts(made) == (1, 1, 0, 0, 0)
    assert not tally(made).rejected
    assert all(row.deferred and not row.admitted for row in made.rows())


def test_what_an_engine_failed_at_is_taken_up_again_and_counts_each_time() -> None:
    made = Driver()
    put_aside(made)
    request = taken_up(made)
    made.end(made.live(request).attempt, Outcome.ERROR)
    made.serve(taken_up(made))
    assert counts(made) == (1, 1, 2, 2, 2)
    assert tally(made).met == 1


@pytest.mark.parametrize(
    ("request_", "where"),
    [
        (asked(tenant="stranger"), ("other", "batch")),
        (asked(model="unknown"), ("a", "batch")),
        (asked(slo_class="odd"), ("a", "other")),
    ],
)
def test_whoever_is_unknown_by_then_has_no_row_of_its_own(
    request_: Request, where: tuple[str, str]
) -> None:
    made = Driver()
    put_aside(made, request_)
    found = {
        (tenant, slo_class): one.deferred
        for tenant, by_class in made.plane.state.accounts.tallies.items()
        for slo_class, one in by_class.items()
    }
    assert found == {where: 1}


def test_the_counts_survive_a_checkpoint() -> None:
    made = Driver()
    put_aside(made)
    request = taken_up(made)
    thawed = Plane.thaw(made.plane.freeze())
    assert thawed.state.accounts == made.plane.state.accounts
    assert thawed.state.live[request].request.deferred
