"""When does somebody who lent its turns, or was away, go again? Measured before an engine that takes its time."""

from collections import Counter
from heapq import heappop, heappush

import pytest

from headrace.model.deployment import ClassSpec, PoolSpec, TenantSpec
from headrace.model.ids import AttemptId, RequestId
from headrace.policy.admission.gates import GateMode, Gates
from headrace.policy.catalog import Window
from headrace.policy.fairness.vtc import Vtc
from headrace.policy.ordering.orders import TenantFirst
from headrace.units import InstantNs, ms
from tests.plane import invariants
from tests.plane.scenes import H100, MS, Driver, S, config, usage

CHAT = ClassSpec(name="chat", ttft_ms=2_000.0, tenant_queue=10_000)
BULK = ClassSpec(name="bulk", ttft_ms=None, itl_ms=1_000.0, completion_ms=20_000.0, expire=False)
WINDOW = Window(prefill_ms=150.0)
WINDOW_NS = ms(WINDOW.prefill_ms)


class Timed:
    """A plane before one engine that makes prompts one after the other, as long as predicted."""

    def __init__(
        self, tenants: tuple[TenantSpec, ...] = (), *, memory_tokens: float = 100_000.0
    ) -> None:
        self.made = Driver(
            config(
                pools=(PoolSpec(name="p", model="m", profile=H100),),
                tenants=tenants or tuple(TenantSpec(name=name) for name in "abc"),
                classes=(CHAT, BULK),
                window=WINDOW,
                fairness=Vtc(memory_tokens=memory_tokens),
                admission=Gates(mode=GateMode.AUDIT),
            )
        )
        self.sent_at: dict[RequestId, InstantNs] = {}
        self.turns: list[tuple[InstantNs, str, RequestId]] = []
        self.flood: dict[str, int] = {}
        """Tenants that always have so many waiting."""
        self.tokens = 600
        self._free = 0
        self._prefills: list[tuple[int, AttemptId, int]] = []

    def run(self, until: int) -> None:
        """Let time pass, prompts be made and those who flood send more."""
        made = self.made
        self._step()
        while True:
            done = self._prefills[0][0] if self._prefills else until + 1
            timer = made.plane.next_timer()
            when = done if timer is None else min(done, timer)
            if when > until:
                break
            made.now = InstantNs(max(made.now, when))
            if when == done:
                _, attempt, given = heappop(self._prefills)
                made.first(attempt)
                made.end(attempt, usage=usage(given, 1), timing=made.timing(1))
            else:
                made.seen += made.plane.handle_timer(now=made.now)
            self._step()
        made.now = InstantNs(until)

    def _step(self) -> None:
        made = self.made
        for tenant, most in self.flood.items():
            key = made.way(tenant, "chat")[-1].key
            while made.known.backlog.tenants.get(key, 0) < most:
                made.arrive(tenant, self.tokens, slo_class="chat")
        sent = made.sent()
        made.seen.clear()
        for effect in sent:
            flight = made.plane.state.ledger.flights[effect.attempt]
            self._free = max(self._free, made.now) + flight.prefill_ns
            heappush(self._prefills, (self._free, effect.attempt, flight.input_tokens))
            self.turns.append((made.now, effect.tenant, effect.request))
        if len(self.turns) % 50 == 0:
            invariants.hold(made.plane, made.now)


@pytest.mark.parametrize("tokens", [100, 2_500, 20_000])
@pytest.mark.parametrize("offset", [0, 7 * MS, 31 * MS])
def test_a_lender_whose_work_becomes_urgent_is_the_next_to_be_sent(
    tokens: int, offset: int
) -> None:
    """Nobody goes between, and it goes as soon as there is room: within one dispatch window.

    That is what waits in the engine, behind the prompt at its front.
    """
    timed = Timed()
    timed.flood = {"b": 6, "c": 6}
    timed.run(1 * S + offset)
    request = timed.made.arrive("a", tokens, slo_class="bulk")
    lend = TenantFirst().lend_after_ns
    assert lend is not None
    urgent = timed.made.live(request).latest_start - lend
    assert urgent > timed.made.now + 5 * S
    timed.run(urgent - 1)
    assert timed.made.live(request).attempt is None, "it lets everybody pass until then"
    timed.run(urgent + 2 * S)
    after = [(at, who, one) for at, who, one in timed.turns if at >= urgent]
    assert after[0][1:] == ("a", request)
    front = H100.prefill_ns(timed.tokens, 0, 0, 0, H100.token_budget)
    assert after[0][0] <= urgent + WINDOW_NS + front


def test_who_has_lent_for_long_is_owed_its_memory_and_then_has_its_share() -> None:
    """Many become urgent together: the first go in one row, the rest by share beside the others."""
    timed = Timed(memory_tokens=20_000)
    timed.flood = {"b": 6}
    timed.run(1 * S)
    for _ in range(80):
        timed.made.arrive("a", 600, slo_class="bulk")
    timed.run(40 * S)
    whose = [who for _, who, _ in timed.turns]
    start = whose.index("a")
    row = next(nth for nth, who in enumerate(whose[start:]) if who != "a")
    dearest = (
        600 + 3 * 200
    )  # input, and what is predicted of output, at less than three times the price
    assert 20_000 / dearest - 2 <= row <= 20_000 / 600 + 2
    after = whose[start + row : start + row + 40]
    assert abs(after.count("a") - 20) <= 2


@pytest.mark.parametrize("weight", [1, 3])
def test_who_is_back_from_ten_minutes_has_no_more_than_its_share_and_is_not_starved(
    weight: int,
) -> None:
    tenants = (TenantSpec(name="a", weight=weight), TenantSpec(name="b"), TenantSpec(name="c"))
    timed = Timed(tenants)
    timed.flood, timed.tokens = {"a": 6, "b": 6, "c": 6}, 4_000
    timed.run(5 * S)
    del timed.flood["a"]
    timed.run(605 * S)
    away = len(timed.turns)
    assert Counter(who for _, who, _ in timed.turns[away - 100 :])["a"] == 0
    timed.flood["a"] = 6
    timed.run(635 * S)
    back = [who for _, who, _ in timed.turns[away:]]
    assert "a" in back[: 2 + weight], "it is not starved"
    # Between two that wait throughout: twice the largest charge under way, one request each here.
    for upto in range(10, len(back)):
        had = Counter(back[:upto])
        due = upto * weight / (weight + 2)
        assert abs(had["a"] - due) <= 2 * (weight + 1), (upto, had)
