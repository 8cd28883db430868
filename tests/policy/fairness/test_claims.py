"""Turns of deferred work: fair over many claims, with nothing in memory between them."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.model.ids import ClassName, TenantId
from headrace.model.paths import Level, Link, Path, path
from headrace.policy.fairness.claims import ClaimOrder, Line, Memory, Turns
from headrace.policy.fairness.shares import Rules

BATCH = ClassName("batch")
SCALE = 1_000_000
"""Counters are whole: services far larger than weights, as in truth."""


def line(tenant: str, slo_class: str = BATCH) -> Line:
    """Return a tenant's line."""
    return Line(TenantId(tenant), ClassName(slo_class))


def order(weights: dict[str, int], **links: Link) -> ClaimOrder:
    """Return an order by weights of tenants; `links`: organisations by tenant."""

    def way(one: Line) -> Path:
        above = [links[one.tenant]] if one.tenant in links else []
        own = Link(Level.TENANT, one.tenant, weights.get(one.tenant, 1))
        return path(Link(Level.CLASS, one.slo_class), *above, own)

    return ClaimOrder(way=way)


def claim(
    by: ClaimOrder, memory: Memory, jobs: dict[Line, list[int]], most: int
) -> tuple[Memory, list[tuple[Line, int]]]:
    """Take at most so many jobs, by their services, in one claim."""
    turns = Turns(by, memory, [one for one, queued in jobs.items() if queued], {})
    taken: list[tuple[Line, int]] = []
    while len(taken) < most and (one := turns.next()) is not None:
        service = jobs[one].pop(0)
        turns.charge(one, service)
        taken.append((one, service))
        if not jobs[one]:
            turns.drop(one)
    return turns.memory(), taken


@given(
    services=st.tuples(
        st.lists(st.integers(1, 50), min_size=40, max_size=40),
        st.lists(st.integers(1, 50), min_size=40, max_size=40),
    ),
    weights=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=30),
)
def test_two_that_always_have_jobs_differ_by_one_job_at_most(
    services: tuple[list[int], list[int]], weights: tuple[int, int], sizes: list[int]
) -> None:
    a, b = line("a"), line("b")
    jobs = {a: [s * SCALE for s in services[0]], b: [s * SCALE for s in services[1]]}
    weight = {a: weights[0], b: weights[1]}
    by = order({"a": weights[0], "b": weights[1]})
    largest = {one: max(queued) / weight[one] for one, queued in jobs.items()}
    memory, had = Memory(), {a: 0, b: 0}
    for most in sizes:
        for _ in range(most):  # so that both have jobs after each
            if len(jobs[a]) < 2 or len(jobs[b]) < 2:
                return
            memory, taken = claim(by, memory, jobs, 1)
            for one, service in taken:
                had[one] += service
            apart = had[a] / weight[a] - had[b] / weight[b]
            assert -largest[b] - 1 <= apart <= largest[a] + 1


@given(cuts=st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_many_small_claims_give_the_turns_of_one_large(cuts: list[int]) -> None:
    def queued() -> dict[Line, list[int]]:
        return {line(t): [(7 * n) % 5 + 1 for n in range(i, i + 12)] for i, t in enumerate("abc")}

    by = order({"a": 1, "b": 2, "c": 3})
    memory, jobs, told = Memory(), queued(), []
    for most in cuts:
        memory, taken = claim(by, memory, jobs, most)
        told += taken
    assert told == claim(by, Memory(), queued(), len(told))[1]


def test_who_comes_late_neither_waits_for_a_hog_nor_has_what_it_slept_through() -> None:
    hog, few = line("hog"), line("few")
    jobs = {hog: [1] * 10_000, few: []}
    memory, _ = claim(order({}), Memory(), jobs, 5_000)
    jobs[few] = [1] * 5
    memory, taken = claim(order({}), memory, jobs, 10)
    assert [one for one, _ in taken].count(few) == 5
    jobs[few] = [1] * 100
    _, taken = claim(order({}), memory, jobs, 10)
    assert [one for one, _ in taken].count(few) == 5


def test_who_had_much_and_was_idle_for_a_moment_comes_back_behind() -> None:
    a, b, by = line("a"), line("b"), order({})
    jobs = {a: [100], b: [1] * 50, line("c"): [1]}
    memory, taken = claim(by, Memory(), jobs, 1)
    assert taken == [(a, 100)]
    memory, taken = claim(by, memory, jobs, 2)
    assert taken == [(b, 1), (line("c"), 1)]
    jobs[a] = [1] * 5
    _, taken = claim(by, memory, jobs, 20)
    assert {one for one, _ in taken} == {b}


def test_an_organisation_shares_as_one_however_many_tenants_it_has() -> None:
    links = {f"t{n}": Link(Level.ORGANISATION, "many") for n in range(5)}
    by = order({}, **links)
    jobs = {line(name): [1] * 20 for name in [*links, "alone"]}
    _, taken = claim(by, Memory(), jobs, 20)
    assert [one.tenant for one, _ in taken].count(TenantId("alone")) == 10


def test_what_is_owed_moves_a_line_that_waits_and_one_that_does_not() -> None:
    a, b = line("a"), line("b")
    memory = Turns(order({}), Memory(), [a, b], {}).memory()
    turns = Turns(order({}), memory, [a, b], {a: 100})
    assert turns.next() == b
    memory = Turns(order({}), memory, [b], {a: 100}).memory()
    assert Turns(order({}), memory, [a, b], {}).next() == b
    turns = Turns(order({}), memory, [a, b], {a: -100})
    turns.charge(b, 1)
    assert turns.next() == a


def test_idle_lines_that_others_have_passed_are_forgotten() -> None:
    memory, by = Memory(), order({})
    for n in range(50):
        jobs = {line("stays"): [10] * 1_000, line(f"t{n}"): [1]}
        memory, _ = claim(by, memory, jobs, 2)
    assert len(memory.counters) < 6


def test_a_line_without_a_place_has_no_turn_and_keeps_its_standing() -> None:
    a, b = line("a"), line("b")
    by = order({})
    none = ClaimOrder(way=lambda one: None if one == a else by.way(one), rules=Rules())
    memory, _ = claim(by, Memory(), {a: [1, 1], b: [1] * 9}, 2)
    turns = Turns(none, memory, [a, b], {a: 5})
    assert (turns.next(), turns.lines()) == (b, [b])
    assert turns.memory().waiting == [a, b]
    assert Turns(none, memory, [a], {}).next() is None
