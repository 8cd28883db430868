"""Bugs planted into the plane are each caught, by the invariant that guards against them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.model.budget import Take
from headrace.model.deployment import TenantSpec
from headrace.model.effect import Cancel, Concluded, Dispatch, Effect, Refuse
from headrace.model.event import Ended, Event, FirstToken, ReplicaUp
from headrace.model.ids import AttemptId, ClassName, Incarnation, ModelName, RequestId
from headrace.model.ladder import LadderFacts, LadderSpec
from headrace.model.slo import Indicators, Outcome, indicators
from headrace.plane import degrade, dispatch, entry, machine, streams
from headrace.plane.core import Plane
from headrace.plane.ledger import Flight, Ledger
from headrace.plane.machine import Machine
from headrace.plane.state import Live
from headrace.policy.catalog import PlaneConfig
from headrace.policy.degrade import forms as forms_of
from headrace.policy.degrade.forms import Form, forms
from headrace.policy.fairness.backlog import Backlog, Turn
from headrace.sim import books, buckets, checks, consent, holdings
from headrace.sim.checks import Broken
from headrace.sim.faults import Crash, Drain, Leavers
from headrace.sim.scenario import Scenario, rows_of
from headrace.sim.world import World
from headrace.trace.mix import Headroom, OptionalParts
from headrace.units import InstantNs, Tokens
from tests.sim.scenes import burst, deployment, run, scenario, source

ROOT = Path(__file__).parents[2]
Patch = pytest.MonkeyPatch
CHECKED = (checks, books, buckets, consent, holdings)
LIMITED = (
    TenantSpec(name="a", rpm_limit=600),
    TenantSpec(name="b", weight=2, tpm_limit=50_000),
)


def busy(config: PlaneConfig | None = None) -> Scenario:
    """Return two replicas with more to do than they can, leavers, and a crash."""
    return scenario(
        source("a", 500.0),
        source("b", 200.0, slo_class="batch"),
        config=deployment(tenants=LIMITED) if config is None else config,
        rows=1_000,
        faults=(Leavers(share=0.3, within_s=2.0), Crash(replica=1, at_s=0.7, back_after_s=0.3)),
    )


def caught(number: str, one: Scenario | None = None) -> None:
    """Assert that a run is stopped by an invariant."""
    with pytest.raises(Broken, match=rf"^{number} at \d+: "):
        run(busy() if one is None else one)


def rewrite(monkeypatch: Patch, change: Callable[[list[Effect]], list[Effect]]) -> None:
    """Change what the plane wants done."""
    handle = Plane.handle

    def changed(self: Plane, event: Event, *, now: InstantNs) -> list[Effect]:
        return change(handle(self, event, now=now))

    monkeypatch.setattr(Plane, "handle", changed)


def without_dispatch(monkeypatch: Patch, kind: type) -> None:
    """Let the plane hand out no turns after one kind of event."""
    handle, hand_out = Plane.handle, dispatch.run
    asleep = False

    def handled(self: Plane, event: Event, *, now: InstantNs) -> list[Effect]:
        nonlocal asleep
        asleep = isinstance(event, kind)
        return handle(self, event, now=now)

    def run_unless_asleep(*given: Any) -> None:
        if not asleep:
            hand_out(*given)

    monkeypatch.setattr(Plane, "handle", handled)
    monkeypatch.setattr(dispatch, "run", run_unless_asleep)


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    ran = run(busy())
    reasons = {row.reason for row in ran.rows()}
    assert len(reasons) > 4
    assert ran.rows(tenant="a", admitted=True)
    assert ran.rows(tenant="b", admitted=True)


def test_a_double_release_of_blocks(monkeypatch: Patch) -> None:
    close = Ledger.close

    def twice(self: Ledger, attempt: AttemptId, *given: Any) -> int:
        flight = self.flights[attempt]
        load: Any = self.loads[flight.incarnation]
        load.blocks -= flight.blocks
        return close(self, attempt, *given)

    monkeypatch.setattr(Ledger, "close", twice)
    caught("INV-3")


def test_a_flight_that_is_never_closed(monkeypatch: Patch) -> None:
    close = Ledger.close

    def kept(self: Ledger, attempt: AttemptId, *given: Any) -> int:
        flight = self.flights[attempt]
        made = close(self, attempt, *given)
        self.flights[attempt] = flight
        return made

    monkeypatch.setattr(Ledger, "close", kept)
    caught("INV-[23]")


@pytest.mark.parametrize("kind", [Ended, FirstToken, ReplicaUp])
def test_a_lost_wake_up(monkeypatch: Patch, kind: type) -> None:
    without_dispatch(monkeypatch, kind)
    caught("INV-5")


def test_a_turn_that_is_nobodys(monkeypatch: Patch) -> None:
    given = Backlog.next_turn

    def nobodys(self: Backlog, *rules: Any) -> Turn | None:
        return given(self, *rules) if ClassName("") in self.classes else None  # engines go on

    monkeypatch.setattr(Backlog, "next_turn", nobodys)
    caught("INV-5")


def test_a_refund_of_more_than_was_charged(monkeypatch: Patch) -> None:
    recharge = Ledger._recharge

    def generous(self: Ledger, flight: Flight, amount: int) -> None:
        back = flight.charged - amount
        recharge(self, flight, amount)
        if back > 0:
            shares = self.shares[flight.model]
            shares.counters[flight.way[-1].key] -= back

    monkeypatch.setattr(Ledger, "_recharge", generous)
    caught("INV-8")


def test_a_request_concluded_twice(monkeypatch: Patch) -> None:
    def doubled(effects: list[Effect]) -> list[Effect]:
        return [*effects, *(e for e in effects if isinstance(e, Concluded))]

    rewrite(monkeypatch, doubled)
    with pytest.raises(AssertionError, match=r"^INV-10.*concluded twice"):
        run(busy())


def test_a_request_concluded_again_later(monkeypatch: Patch) -> None:
    first: list[Effect] = []

    def again(effects: list[Effect]) -> list[Effect]:
        first.extend(e for e in effects if isinstance(e, Concluded))
        return [*effects, first[0]] if len(first) > 9 else effects

    rewrite(monkeypatch, again)

    def lenient(world: World, row: Concluded) -> None:  # its own check would come first
        world.concluded.setdefault(row.request, row)

    monkeypatch.setattr(World, "_conclude", lenient)
    caught("INV-10")


def test_an_outcome_of_something_never_admitted(monkeypatch: Patch) -> None:
    def admitted(effects: list[Effect]) -> list[Effect]:
        return [
            replace(e, admitted=True) if isinstance(e, Concluded) and not e.admitted else e
            for e in effects
        ]

    rewrite(monkeypatch, admitted)
    caught("INV-10")


def test_a_caller_that_is_never_told_of_its_refusal(monkeypatch: Patch) -> None:
    rewrite(monkeypatch, lambda effects: [e for e in effects if not isinstance(e, Refuse)])
    caught("INV-10")


def test_an_answer_after_the_end(monkeypatch: Patch) -> None:
    refusals: list[Effect] = []

    def again(effects: list[Effect]) -> list[Effect]:
        refusals.extend(e for e in effects if isinstance(e, Refuse))
        return [*effects, refusals[0]] if len(refusals) > 1 else effects

    rewrite(monkeypatch, again)
    caught("INV-10")


def test_a_farewell_that_is_not_heard(monkeypatch: Patch) -> None:
    monkeypatch.setattr(streams, "replica_down", lambda *_: None)
    caught("INV-9", replace(busy(), faults=(Crash(replica=1, at_s=0.7),)))


def test_a_request_sent_to_a_dead_incarnation(monkeypatch: Patch) -> None:
    """Its flights are closed, but the replica stays listed."""
    monkeypatch.setattr(streams, "_remove", lambda *_: None)
    monkeypatch.setattr(checks, "ready_is_what_was_told", lambda _: None)
    caught("INV-9", replace(busy(), faults=(Crash(replica=1, at_s=0.7),)))


def test_a_request_sent_to_a_replica_that_is_to_go(monkeypatch: Patch) -> None:
    monkeypatch.setattr(streams, "replica_draining", lambda *_: None)
    caught("INV-9", replace(busy(), faults=(Drain(replica=1, at_s=0.7),)))


def test_a_request_sent_to_an_incarnation_of_old(monkeypatch: Patch) -> None:
    def stale(effects: list[Effect]) -> list[Effect]:
        return [replace(e, incarnation=1) if isinstance(e, Dispatch) else e for e in effects]

    rewrite(monkeypatch, stale)
    caught("INV-9")


def test_a_request_sent_to_a_pool_of_other_classes(monkeypatch: Patch) -> None:
    def mistaken(effects: list[Effect]) -> list[Effect]:
        sent = [e for e in effects if isinstance(e, Dispatch) and e.replica == "own-0"]
        return [replace(e, slo_class="chat") if e in sent else e for e in effects]

    config = deployment(replicas=1)
    own = replace(config.pools[0], name="own", classes=("batch",))
    rewrite(monkeypatch, mistaken)
    caught("INV-9", busy(replace(config, pools=(own, *config.pools))))


def test_a_request_sent_twice(monkeypatch: Patch) -> None:
    def doubled(effects: list[Effect]) -> list[Effect]:
        sent = [e for e in effects if isinstance(e, Dispatch)]
        return [*effects, *(replace(e, attempt=AttemptId(e.attempt + 10**9)) for e in sent)]

    rewrite(monkeypatch, doubled)
    caught("INV-6")


def test_a_request_sent_after_its_end(monkeypatch: Patch) -> None:
    sent: list[Dispatch] = []
    over: set[RequestId] = set()

    def again(effects: list[Effect]) -> list[Effect]:
        late = [e for e in sent if e.request in over]
        sent.extend(e for e in effects if isinstance(e, Dispatch))
        over.update(e.request for e in effects if isinstance(e, Concluded))
        return [*effects, *(replace(e, attempt=AttemptId(10**9)) for e in late[:1])]

    rewrite(monkeypatch, again)
    caught("INV-6")


def test_a_phase_that_does_not_move(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Live, "advance", lambda *_: None)
    caught("INV-[136]")


def test_a_cancel_at_another_life(monkeypatch: Patch) -> None:
    def elsewhere(m: Machine, _: object, live: Live) -> None:
        assert live.attempt is not None
        assert live.replica is not None
        life = Incarnation(99)
        m.out.append(Cancel(attempt=live.attempt, replica=live.replica, incarnation=life))

    monkeypatch.setattr(streams, "_cancel", elsewhere)
    caught("INV-6")


def test_a_cancel_that_is_forgotten(monkeypatch: Patch) -> None:
    monkeypatch.setattr(streams, "_cancel", lambda *_: None)
    caught("INV-2")


def test_an_engine_that_loses_a_block() -> None:
    one = busy()
    checker = checks.Checker()

    def stealing(world: World, effects: list[Effect]) -> None:
        if checker.steps == 100:
            engine = world.nodes[0].engine
            assert engine is not None
            engine._batch.pool.free -= 1
        checker(world, effects)

    with pytest.raises(Broken, match=r"^INV-2 at"):
        World(one, rows_of(one, 0), 0, after=stealing).run()


def test_quota_that_is_never_given_back(monkeypatch: Patch) -> None:
    settle = Ledger.settle

    def leaky(self: Ledger, request: RequestId, used: Take, now: InstantNs) -> None:
        hold = self.holds[request]
        settle(self, request, max(used, hold.take, key=lambda one: one.tokens), now)

    monkeypatch.setattr(Ledger, "settle", leaky)
    caught("INV-4")


def test_quota_that_is_given_back_twice(monkeypatch: Patch) -> None:
    settle = Ledger.settle

    def twice(self: Ledger, request: RequestId, used: Take, now: InstantNs) -> None:
        hold = self.holds[request]
        settle(self, request, used, now)
        self.quotas[hold.tenant].parallel -= 1

    monkeypatch.setattr(Ledger, "settle", twice)
    caught("INV-4")


@pytest.mark.parametrize("strange", [{"model": ModelName("nobody")}, {"slo_class": "nothing"}])
def test_a_refusal_by_contract_that_looks_at_no_bucket_is_no_leak(strange: dict[str, Any]) -> None:
    """A bucket above its limit stays so until somebody looks; a stranger is no reason to."""
    limits = (TenantSpec(name="a", tpm_limit=100_000, rpm_limit=1_000), TenantSpec(name="b"))
    long, short = burst(3, made=1_500), burst(1, at_s=8.0, made=5)
    strangers = [replace(one, **strange) for one in burst(2, at_s=30.0)]
    asked = [*long, *short, *strangers, *burst(1, at_s=31.0, made=5)]
    rows = [replace(row, max_tokens=Tokens(4_000)) for row in asked]
    ran = run(scenario(config=deployment(1, tenants=limits)), 0, rows)
    assert len(ran.rows(admitted=False)) == 2
    assert len(ran.rows(outcome=Outcome.SUCCESS)) == 5


def test_a_request_rate_that_counts_twice(monkeypatch: Patch) -> None:
    hold = Ledger.hold

    def twice(self: Ledger, request: RequestId, spec: TenantSpec, *given: Any, **more: Any) -> None:
        hold(self, request, spec, *given, **more)
        bucket = self.quotas[self.holds[request].tenant].requests
        if bucket is not None:
            bucket.level -= 1

    monkeypatch.setattr(Ledger, "hold", twice)
    caught("INV-4")


def test_a_hold_that_outlives_its_request(monkeypatch: Patch) -> None:
    settle = Ledger.settle

    def kept(self: Ledger, request: RequestId, used: Take, now: InstantNs) -> None:
        hold = self.holds[request]
        settle(self, request, used, now)
        self.holds[request] = hold

    monkeypatch.setattr(Ledger, "settle", kept)
    caught("INV-3")


def test_a_request_that_vanishes(monkeypatch: Patch) -> None:
    def eaten(effects: list[Effect]) -> list[Effect]:
        return [e for e in effects if not isinstance(e, Concluded) or e.admitted]

    rewrite(monkeypatch, lambda effects: [e for e in eaten(effects) if not isinstance(e, Refuse)])
    caught("INV-1")


def test_a_backlog_that_miscounts_its_work(monkeypatch: Patch) -> None:
    leave = dispatch.leave

    def skewed(m: Machine, live: Live, known: Any, now: InstantNs) -> None:
        leave(m, live, known, now)
        known.backlog.work_ns += 1

    monkeypatch.setattr(dispatch, "leave", skewed)
    caught("INV-1")


def test_time_that_does_not_add_up(monkeypatch: Patch) -> None:
    def skewed(*given: Any) -> Indicators | None:
        seen = indicators(*given)
        return None if seen is None else replace(seen, queue_ns=seen.queue_ns + 1)

    monkeypatch.setattr(machine, "indicators", skewed)
    caught("INV-7")


def test_a_timer_left_behind(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Plane, "next_timer", lambda plane: InstantNs(plane.state.now - 1))
    caught("INV-7")


def test_work_that_is_left_at_the_end(monkeypatch: Patch) -> None:
    """Nobody wakes the plane to expire what is hopeless, and nothing else happens any more."""
    monkeypatch.setattr(dispatch, "lapse", lambda *_: None)
    monkeypatch.setattr(dispatch, "is_open", lambda *_: False)
    monkeypatch.setattr(checks, "is_open", lambda *_: False)
    monkeypatch.setattr(Plane, "next_timer", lambda _: None)
    caught("INV-11", replace(busy(), drain_s=60.0))


def test_a_queue_beyond_its_bound(monkeypatch: Patch) -> None:
    monkeypatch.setattr(entry, "_push_out", lambda *_: None)
    config = deployment()
    short = tuple(replace(spec, queue=3) for spec in config.classes)
    caught("INV-12", busy(replace(config, classes=short)))


def skewed(change: Callable[[Form], Form]) -> Callable[..., tuple[Form, ...]]:
    """Return what makes forms of the ladder that differ from what was agreed to."""

    def made(spec: LadderSpec, facts: LadderFacts) -> tuple[Form, ...]:
        asked, *lesser = forms(spec, facts)
        return asked, *(change(one) for one in lesser)

    return made


@pytest.mark.parametrize(
    "change",
    [
        lambda form: replace(form, kept=0, input_tokens=Tokens(form.input_tokens - 9)),
        lambda form: replace(form, max_output=Tokens(1)),
    ],
    ids=["prompt", "output"],
)
def test_less_than_was_agreed_to(monkeypatch: Patch, change: Callable[[Form], Form]) -> None:
    monkeypatch.setattr(forms_of, "forms", skewed(change))
    monkeypatch.setattr(degrade, "forms", skewed(change))
    caught("INV-13", hurried(LadderSpec(level=1)))


def test_a_level_that_nobody_agreed_to(monkeypatch: Patch) -> None:
    monkeypatch.setattr(forms_of, "agreed", lambda spec, _: spec.level)
    caught("INV-13", hurried(LadderSpec(level=2)))


def test_a_form_that_is_forgotten_on_the_way(monkeypatch: Patch) -> None:
    forgets = Form.lesser
    monkeypatch.setattr(Form, "lesser", lambda form: replace(forgets(form), level=2))
    caught("INV-13", hurried(LadderSpec(level=1)))


def hurried(ladder: LadderSpec) -> Scenario:
    """Return overload with consent to shorter answers."""
    plain = deployment(tenants=(TenantSpec(name="a", degrade=1),))
    chat = replace(plain.classes[0], ttft_ms=200.0, degrade=ladder)
    given = replace(plain, classes=(chat, *plain.classes[1:]))
    asks = replace(source("a", 900.0), max_tokens=Headroom(), optional=OptionalParts())
    return scenario(asks, config=given, rows=600)


def test_the_page_of_invariants_numbers_what_is_checked() -> None:
    page = (ROOT / "docs" / "invariants.md").read_text()
    told = re.findall(r"^\| (INV-\d+) \|", page, re.MULTILINE)
    assert told == [f"INV-{n}" for n in range(1, len(told) + 1)]
    sources = [Path(str(one.__file__)).read_text() for one in CHECKED]
    assert set(re.findall(r"INV-\d+", "".join(sources))) == set(told)
