"""What a decision was made of is stored beside it and comes back as it was."""

from typing import Any

import msgspec
import pytest

from headrace.model.decision import Admit, Gate, Reason, Reject, RouteTerms, Verdict
from headrace.model.effect import Concluded, Dispatch, Effect
from headrace.model.event import Event
from headrace.model.evidence import DecisionRecord, EntryRecord, RouteRecord
from headrace.model.slo import Outcome
from headrace.units import DurationNs
from tests.plane.scenes import Driver, S, config
from tests.policy.evidence import entry


def history() -> Driver:
    """Return a plane that admitted, refused, sent, served and lost."""
    made = Driver(config(), replicas=2)
    made.arrive("nobody")
    made.arrive(tokens=0)
    made.serve(made.arrive())
    made.arrive()
    made.down("r0", 1)
    made.down("r1", 2)
    made.arrive()
    return made


@pytest.mark.parametrize("module", [msgspec.json, msgspec.msgpack], ids=["json", "msgpack"])
def test_effects_and_their_evidence_come_back_from_bytes(module: Any) -> None:
    made = history()
    content = module.encode(made.seen)
    assert module.decode(content, type=list[Effect]) == made.seen
    assert {type(effect).__name__ for effect in made.seen} >= {
        "Decided", "Dispatch", "Refuse", "Fail", "Concluded",
    }  # fmt: skip


def test_decisions_are_recomputed_from_their_evidence() -> None:
    made = history()
    settings = made.plane._machine.settings.config
    assert len(made.entries()) == 5
    for record in made.entries():
        back = msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=DecisionRecord)
        assert isinstance(back, EntryRecord)
        assert settings.admission.decide(back.evidence) == record.decision
    for route in made.routes():
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(route), type=DecisionRecord)
        assert isinstance(again, RouteRecord)
        found = settings.routing.choose(again.evidence, settings.stale_after_ns())
        assert found == route.placement


def test_evidence_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        entry().ready = 7  # type: ignore[misc]


def test_every_decision_has_its_own_number_in_order() -> None:
    made = history()
    entries = [record.decision_id for record in made.entries()]
    routes = [record.decision_id for record in made.routes()]
    assert sorted(entries + routes) == list(range(1, len(entries) + len(routes) + 1))


def test_a_margin_is_how_far_inside() -> None:
    verdict = Verdict(gate=Gate.BUDGET, reason=None, measured=3, threshold=10)
    assert verdict.margin == 7
    assert Verdict(gate=Gate.BUDGET, reason=Reason.TOKEN_RATE, measured=11).margin == -11


def test_the_cost_of_a_replica_is_the_sum_of_its_terms() -> None:
    terms = RouteTerms(
        queue_ns=1, interference_ns=20, kv_ns=300, prefix_credit_ns=4_000, staleness_ns=50_000
    )
    assert terms.total_ns == 50_321 - 4_000


def test_a_decision_says_which_it_is() -> None:
    admit = Admit(slack_ns=1, wait_ns=DurationNs(2), verdicts=())
    reject = Reject(
        reason=Reason.EXPIRED, gate=None, slack_ns=-1, retry_after_ns=DurationNs(S), verdicts=()
    )
    kinds = [msgspec.json.decode(msgspec.json.encode(one))["type"] for one in (admit, reject)]
    assert kinds == ["admit", "reject"]


def test_every_kind_of_event_and_effect_has_a_name_of_its_own() -> None:
    for union in (Event, Effect):
        tags = [kind.__struct_config__.tag for kind in union.__args__]
        assert len(tags) == len(set(tags))


@pytest.mark.parametrize(
    ("outcome", "admitted", "met"),
    [
        (Outcome.SUCCESS, True, True),
        (Outcome.ERROR, True, False),
        (Outcome.TIMEOUT, True, False),
        (Outcome.CLIENT_CANCEL, True, False),
        (None, False, False),
    ],
)
def test_only_a_success_counts_for_goodput(
    outcome: Outcome | None, admitted: bool, met: bool
) -> None:
    made = Driver()
    made.serve(made.arrive())
    row = msgspec.structs.replace(made.rows()[0], outcome=outcome, admitted=admitted)
    assert isinstance(row, Concluded)
    assert row.met is met


def test_a_dispatch_carries_all_that_an_engine_needs_to_order_by_our_rules() -> None:
    made = Driver()
    made.arrive()
    sent = made.sent()[0]
    assert isinstance(sent, Dispatch)
    assert (sent.tenant, sent.slo_class) == ("a", "interactive")
    assert [(step.name, step.weight) for step in sent.way] == [("interactive", 4), ("a", 1)]
    assert (sent.deadline, sent.counters, sent.relegated) == (2 * S, (0, 0), False)
