"""How long a newcomer would wait for its turn: against adding up everything, and against serving it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model.ids import ClassName
from headrace.model.paths import ROOT, Path, path
from headrace.policy.fairness.costs import Linear, Price, RequestCost, price
from headrace.policy.fairness.forecast import LOOKED_AT, debt, stake
from headrace.policy.fairness.shares import Rules, Shares, Side
from headrace.policy.ordering.orders import TenantFirst
from tests.plane.scenes import H100
from tests.policy.fairness.line import BATCH, CHAT, Line, S, batch, chat, klass, lane, org, tenant

EVERYBODY = frozenset({CHAT, BATCH, ClassName("ops"), ClassName("elsewhere")})


PRICE = Price("plain-1", Linear())
"""One unit of service is one nanosecond."""


def owed(line: Line, way: Path, rivals: frozenset[ClassName] = EVERYBODY) -> int:
    return debt(line.shares, way, PRICE, rivals, line.now)


def test_what_goes_before_is_what_lifts_the_others_there_and_no_more_than_waits() -> None:
    line = Line()
    for name, counter in (("a", 99), ("b", 95), ("c", 0), ("d", 100), ("me", 100)):
        line.add(chat(name, 2), 1)
        line.shares.counters[chat(name, 2)[-1].key] = counter
        line.shares.charge(chat(name, 2), 0, 0)
        line.charge(chat(name, 2), 1)
    line.add(chat("lender"), 100)
    assert owed(line, chat("me", 2)) == 2 + 10 + 10
    assert owed(line, batch("me")) == 0, "nobody waits there"


def test_beyond_the_first_few_the_rest_is_taken_together_and_never_for_too_little() -> None:
    line = Line()
    count = LOOKED_AT + 30
    ways = [chat(f"t{nth:02}") for nth in range(count)]
    for way in (*ways, chat("me")):
        line.add(way, 1)
    for nth, way in enumerate(ways):
        line.charge(way, 80 + nth)
    line.charge(chat("me"), 100)
    exact = sum(min(10, max(0, 20 - nth)) for nth in range(count))
    found = owed(line, chat("me"))
    assert exact < found <= line.backlog.work[CHAT] - 10
    line.shares.counters[chat("me")[-1].key] = 88
    line.charge(chat("me"), 0)
    assert owed(line, chat("me")) == 8 + 7 + 6 + 5 + 4 + 3 + 2 + 1


def test_classes_that_are_served_elsewhere_are_nobodys_rivals() -> None:
    line = Line()
    line.add(path(klass("elsewhere", 5), tenant("a")), 5)
    line.add(path(lane("admin", 3), klass("ops"), tenant("a")), 5)
    line.add(A, 5)
    line.charge(A, 100)
    rivals = EVERYBODY - {"elsewhere"}
    assert stake(line.shares, A, EVERYBODY) == (9, 1)
    assert stake(line.shares, A, rivals) == (4, 1), "a lane has its part everywhere"
    ops = path(lane("admin", 3), klass("ops"), tenant("b"))
    assert stake(line.shares, ops, rivals) == (4 * 2, 3)
    assert owed(line, A, rivals) == 10
    assert owed(line, A, EVERYBODY) == 20


A = chat("a")


def test_who_comes_now_is_behind_those_that_have_aged() -> None:
    line = Line(TenantFirst(lend_after_ms=None), Rules(aging=100))
    for _ in range(200):
        line.add(A, 50)
    line.charge(A, 500)
    line.wait(3)
    line.shares.last_out.clear()
    assert line.shares.counter(chat("b")[-1].key) == 0
    assert owed(line, chat("b")) == 300, "lifted to it, it is three seconds' age behind"


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Line, Path]:
    """A tree with something waiting in it, and somebody who may come."""
    line = Line()
    ways: list[Path] = []
    for nth in range(draw(st.integers(0, 14))):
        middle = draw(st.sampled_from(((), (org("o", 2),), (org("p"),))))
        slo_class = draw(st.sampled_from((klass(CHAT, 4), klass(BATCH), klass("elsewhere", 3))))
        ways.append(path(slo_class, *middle, tenant(f"t{nth:02}", draw(st.integers(1, 9)))))
    for way in ways:
        for _ in range(draw(st.integers(1, 3))):
            line.add(way, draw(st.sampled_from((1, 5, 50))), work=draw(st.integers(0, 30)))
    for way in ways:
        line.charge(way, draw(st.integers(0, 60)))
    me = path(klass(CHAT, 4), org("o", 2), tenant(draw(st.sampled_from(("t00", "me"))), 3))
    if draw(st.booleans()):
        line.add(me, 5)
        line.charge(me, draw(st.integers(0, 60)))
    return line, me


def exact(line: Line, me: Path, rivals: frozenset[ClassName]) -> tuple[int, int, int, bool]:
    """Return (weights, own, work before it, whether few enough are looked at) by adding up all."""
    shares: Shares = line.shares
    weights, own, total, few, parent = 1, 1, 0, True, ROOT
    ways = [one.way for one in line.backlog.queues.values() if one.side is Side.URGENT]
    for depth, step in enumerate(me):
        siblings = {
            way[depth].key: way[depth].weight
            for way in ways
            if len(way) > depth
            and (way[depth - 1].key if depth else ROOT) == parent
            and way[depth].key != step.key
            and (depth or way[0].name in rivals)
        }
        mine = shares.counter(step.key)
        if step.key not in shares.waiting:
            first = shares.least(parent)
            last = shares.last_out.get(parent)
            left = None if last is None else shares.counter(last)
            mine = max(mine, (left or 0) if first is None else first)
        gaps = {key: mine - shares.counter(key) for key in siblings}
        under = {key: gap * siblings[key] for key, gap in gaps.items() if gap > 0}
        few = few and len(under) <= LOOKED_AT
        there = sum(min(shares.work.get(key, 0), gap) for key, gap in under.items())
        total += there * weights // own
        if siblings:
            weights, own = weights * (step.weight + sum(siblings.values())), own * step.weight
        parent = step.key
    return weights, own, total, few


@given(scenes(), st.booleans())
@settings(max_examples=200)
def test_it_is_what_adding_up_everything_gives(scene: tuple[Line, Path], both: bool) -> None:
    line, me = scene
    rivals = frozenset({CHAT, BATCH}) if both else EVERYBODY
    weights, own, total, few = exact(line, me, rivals)
    assert stake(line.shares, me, rivals) == (weights, own)
    found = owed(line, me, rivals)
    assert found == total if few else found >= total


@pytest.mark.parametrize("own", [1, 3])
@pytest.mark.parametrize("nested", [False, True])
def test_the_forecast_comes_true(own: int, nested: bool) -> None:
    """What is served until the turn, where all wait throughout, is what was owed."""
    links = (klass(CHAT, 4), org("o", own)) if nested else (klass(CHAT, 4),)
    me = path(*links, tenant("me", own))
    others = [path(*links, tenant(f"t{nth}", 1 + nth % 3)) for nth in range(6)]
    others += [path(klass(BATCH, 2), tenant("b")), path(klass(CHAT, 4), tenant("beside", 2))]
    line = Line()
    for way in (*others, me):
        for _ in range(1_000):
            line.add(way, 5, work=500)
    for way in others:
        line.charge(way, 5_000)
    line.charge(me, 20_000)
    promised = owed(line, me)
    spent = 0
    while (way := line.serve(500)) != me:
        spent += 500
    assert promised > 5_000
    assert spent == pytest.approx(promised, rel=0.05, abs=500 * len(others))


def test_a_cost_by_the_request_is_turned_into_time() -> None:
    line = Line()
    made = price(RequestCost(), "m", H100)
    for way in (A, chat("me")):
        for _ in range(9):
            line.add(way, 5, work=10**12)
    line.charge(chat("me"), 3 * made.service(1, 0, 1))
    found = debt(line.shares, chat("me"), made, EVERYBODY, line.now)
    assert found == made.work_ns(3 * made.service(1, 0, 1)) > S // 100
