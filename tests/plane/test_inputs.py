"""What engines count of prompts shows in the demand, the margin and the quota of the next."""

from typing import Any

from headrace.model.deployment import TenantSpec
from headrace.model.ids import RequestId
from headrace.model.request import BY_BYTES, TextBytes
from headrace.model.slo import Outcome
from headrace.plane.core import Plane
from headrace.policy.predict.input import REVISION
from headrace.units import Tokens
from tests.plane.scenes import Driver, config, usage

TEXT = TextBytes(cjk=3_000)
LIMITED = config(tenants=(TenantSpec(name="a", tpm_limit=100_000), TenantSpec(name="b")))


def arrive(made: Driver, **more: Any) -> RequestId:
    """Offer a prompt of 3,000 bytes, taken for 750 tokens."""
    given = {"input_margin": Tokens(187), "input_revision": BY_BYTES, "text": TEXT} | more
    return made.arrive("a", 750, **given)


def serve(made: Driver, counted: int, **more: Any) -> None:
    """Have a prompt answered by an engine that counts it."""
    live = made.live(arrive(made, **more))
    made.first(live.attempt)
    made.end(live.attempt, usage=usage(counted, 10), timing=made.timing(10))


def test_before_anything_is_learnt_the_edges_estimate_stands() -> None:
    made = Driver(LIMITED)
    demand = made.live(arrive(made)).demand
    assert (demand.input_tokens, demand.input_revision) == (750, BY_BYTES)


def test_learnt_counts_show_in_demand_margin_entry_and_quota() -> None:
    made = Driver(LIMITED)
    for _ in range(12):
        serve(made, 1_500)
    for _ in range(4):
        serve(made, 1_800)
    live = made.live(arrive(made, max_output=Tokens(100)))
    evidence = made.entries()[-1].evidence
    assert (live.demand.input_tokens, live.demand.input_revision) == (1_500, REVISION)
    assert live.request.input_margin == 300
    assert evidence.demand == live.demand
    assert evidence.budget.tokens_needed == 1_600
    assert live.entry.input_tokens == 1_500
    assert evidence.input_margin_ns > made.entries()[0].evidence.input_margin_ns


def test_whatever_was_estimated_quota_settles_on_the_engines_count() -> None:
    made = Driver(LIMITED)
    for _ in range(20):
        serve(made, 1_500)
    made.wait(0)
    bucket = made.plane.state.ledger.quotas[made.rows()[0].tenant].tokens
    assert bucket is not None
    assert bucket.level == 100_000 - 20 * 1_510


def test_what_is_given_or_counted_is_not_estimated_anew() -> None:
    made = Driver(LIMITED)
    for _ in range(16):
        serve(made, 1_500)
    told = made.live(made.arrive("a", 750)).demand
    assert (told.input_tokens, told.input_revision) == (750, "given")
    more = {"input_margin": Tokens(0), "input_revision": "engine"}
    counted = made.live(arrive(made, **more)).demand
    assert (counted.input_tokens, counted.input_revision) == (750, "engine")


def test_a_failed_answer_teaches_nothing() -> None:
    made = Driver(LIMITED)
    for _ in range(20):
        live = made.live(arrive(made))
        made.end(live.attempt, Outcome.ERROR, usage=usage(9, 1), timing=made.timing(1))
    assert not made.plane.state.inputs.windows


def test_lessons_survive_a_restart() -> None:
    made = Driver(LIMITED)
    for _ in range(16):
        serve(made, 1_500)
    again = Plane.thaw(made.plane.freeze())
    assert again.state.inputs == made.plane.state.inputs
    made.plane = again
    assert made.live(arrive(made)).demand.input_tokens == 1_500
