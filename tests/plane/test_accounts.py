"""What each tenant had: as served, exact, and whatever way its requests end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.model.deployment import ClassSpec, PoolSpec
from headrace.model.event import ProgressTick
from headrace.model.ids import ClassName, TenantId
from headrace.model.slo import Outcome
from headrace.plane.accounts import Served, Tally
from headrace.plane.core import Plane
from headrace.policy.fairness.costs import Cost, WorkCost
from headrace.policy.fairness.vtc import Vtc
from tests.plane.scenes import COSTS, MODEL, Driver, S, config, patient, small, usage

ONE_AT_A_TIME = (PoolSpec(name="p", model="m", profile=small(8_192, running=1)),)


def had(made: Driver, tenant: str = "a") -> Served:
    return made.plane.state.accounts.had(MODEL, TenantId(tenant))


def tokens(one: Served) -> tuple[int, int, int]:
    return one.uncached, one.cached, one.output


def tally(made: Driver, tenant: str, slo_class: str = "interactive") -> Tally:
    return made.plane.state.accounts.tally(TenantId(tenant), ClassName(slo_class))


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_what_was_served_is_counted_by_usage_once_an_attempt_is_over(cost: Cost) -> None:
    made = Driver(config(fairness=Vtc(cost=cost)))
    attempt = made.live(made.arrive()).attempt
    made.first(attempt)
    made.tick((attempt, 7))
    assert had(made) == Served(), "it is not over"
    made.end(attempt, usage=usage(990, 30, cached=16))
    price = made.plane.settings.prices[MODEL]
    assert tokens(had(made)) == (974, 16, 30)
    assert had(made).service == price.service(974, 16, 30)
    assert had(made).weighted == made.counter("a") == had(made).service


@pytest.mark.parametrize(
    ("how", "seen"), [("left early", (0, 0, 0)), ("left", (1_000, 0, 7)), ("lost", (1_000, 0, 7))]
)
def test_without_usage_what_was_seen_counts_and_else_nothing(
    how: str, seen: tuple[int, int, int]
) -> None:
    made = Driver()
    request = made.arrive()
    attempt = made.live(request).attempt
    if how != "left early":
        made.first(attempt)
        made.tick((attempt, 7))
    if how == "lost":
        made.down("r0", 1)
    else:
        made.leave(request)
    assert tokens(had(made)) == seen
    assert had(made).weighted == made.counter("a")


@given(
    st.lists(
        st.tuples(
            st.integers(1, 3_000), st.integers(0, 400), st.integers(0, 400), st.sampled_from("uelr")
        ),
        max_size=8,
    )
)
def test_a_tenant_alone_has_had_what_its_counter_was_charged(
    asked: list[tuple[int, int, int, str]],
) -> None:
    """The counter is charged by prediction first and corrected; both agree once all is over."""
    made = Driver(replicas=2)
    for given_tokens, ticked, output, how in asked:
        request = made.arrive(tokens=given_tokens)
        attempt = made.live(request).attempt
        if ticked:
            made.first(attempt)
            made.tick((attempt, ticked))
        if how == "u":
            made.end(attempt, usage=usage(given_tokens, output))
        elif how == "e":
            made.end(attempt, Outcome.ERROR)
        elif how == "l":
            made.leave(request)
        else:
            made.restart()
            made.up("r0")
    assert had(made).weighted == made.counter("a")


def test_another_cost_function_starts_service_anew_and_keeps_tokens() -> None:
    made = Driver()
    made.serve(made.arrive(), 30)
    made.configure(config(fairness=Vtc(cost=WorkCost())), revision=2)
    assert (tokens(had(made)), had(made).service, had(made).weighted) == ((1_000, 0, 30), 0, 0)


def test_a_turn_and_an_emptied_queue_are_told() -> None:
    made = Driver(config(pools=ONE_AT_A_TIME, classes=(patient(),)))
    first = made.arrive("a", 100)
    assert (had(made).turn_at, had(made).emptied) == (0, 0), "it never waited"
    made.wait(S)
    made.arrive("a", 100)
    made.arrive("a", 100)
    made.serve(first)
    assert (had(made).turn_at, had(made).emptied) == (S, 0)
    made.wait(S // 2)
    made.serve(made.sent()[-1].request)
    assert (had(made).turn_at, had(made).emptied) == (S + S // 2, 1)


def test_lent_turns_are_counted_for_who_got_them() -> None:
    made = Driver(config(pools=ONE_AT_A_TIME))
    first = made.arrive("a", 100)
    made.arrive("b", 100, slo_class="batch")
    made.arrive("a", 100)
    made.first(made.live(first).attempt)
    made.tick((made.live(first).attempt, 1_000))
    made.end(made.live(first).attempt)
    assert made.routes()[-1].evidence.lent
    assert (tally(made, "a").lent, tally(made, "b", "batch").lent) == (1, 0)


def test_what_is_relegated_is_counted_once() -> None:
    keeps = ClassSpec(name="keeps", ttft_ms=1_000.0, expire=False)
    made = Driver(config(pools=ONE_AT_A_TIME, classes=(keeps,)))
    made.arrive("a", 100)
    late = made.arrive("a", 100)
    made.wait(3 * S)
    made.wait(3 * S)
    assert made.live(late).late
    assert tally(made, "a", "keeps").relegated == 1


def test_counts_of_an_older_checkpoint_are_read_as_nothing_yet() -> None:
    made = Driver()
    made.plane.state.accounts.tally(TenantId("a"), ClassName("interactive"))
    thawed = Plane.thaw(made.plane.freeze())
    thawed.handle(ProgressTick(()), now=made.now)
    assert thawed.state.accounts == made.plane.state.accounts
    assert replace(Tally()) == Tally(lent=0, relegated=0)
