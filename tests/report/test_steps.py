"""What the steps of a log come to, each figure counted by hand."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.ids import ClassName
from headrace.model.steplog import Alive, Arrived, Ended, Note, Step
from headrace.report.stats import ratio
from headrace.report.steps import (
    UNKNOWN,
    Meter,
    Order,
    Used,
    contended,
    first_order,
    prefill_between_tokens,
    queue_times,
    share_while_backlogged,
    token_service,
    victims,
    walk,
)
from headrace.report.steps_read import Log, who_was_there
from headrace.report.steps_table import NOTES_SHOWN, steps_report, steps_tables
from headrace.report.tables import render_all
from headrace.units import MICRO, InstantNs, Tokens

MS = 1_000_000


def arrived(n: int, tenant: str = "a", **more: Any) -> Arrived:
    """Return a request of ten prompt tokens."""
    row: dict[str, Any] = {
        "n": n,
        "request": f"cmpl-{n}",
        "at_ns": 0,
        "tenant": tenant,
        "slo_class": "chat",
        "prompt_tokens": 10,
    }
    return Arrived(**{**row, **more})


def ended(*numbers: int) -> tuple[Ended, ...]:
    """Return their ends."""
    return tuple(
        Ended(n=n, reason="stop", output_tokens=Tokens(2), cached_tokens=Tokens(0)) for n in numbers
    )


def step(number: int, **more: Any) -> Step:
    """Return a step at so many milliseconds."""
    return Step(step=number, at_ns=InstantNs(number * MS), **more)


def used(steps: Iterable[Step], alive: Iterable[Alive] = ()) -> dict[str, Used]:
    """Return what each tenant used in all."""
    found: dict[str, Used] = {}
    meter = Meter()
    for one, requests in walk(steps, alive):
        for tenant, more in meter.take(one, requests).items():
            found.setdefault(tenant, Used()).add(more)
    return found


# Tokens ------------------------------------------------------------------------------------------


def test_a_prompt_in_two_chunks_makes_its_first_token_with_the_second() -> None:
    steps = [
        step(1, arrived=(arrived(0),), started=(0,), prefills=((0, 0, 6),)),
        step(2, prefills=((0, 6, 4),)),
        step(3, decodes=(0,), ended=ended(0)),
    ]
    assert used(steps[:1])["a"] == Used(computed=6)
    assert used(steps)["a"] == Used(computed=10, output=2)
    assert used(steps)["a"].service(token_service()) == 14 * MICRO
    assert used(steps)["a"].service(token_service(output_weight=0.5)) == 11 * MICRO


def test_where_the_first_prefill_begins_is_what_was_cached() -> None:
    (found,) = used([step(1, arrived=(arrived(0),), started=(0,), prefills=((0, 8, 2),))]).values()
    assert found == Used(computed=2, cached=8, output=1)
    assert found.service(token_service()) == (2 + 2) * MICRO + 8 * MICRO // 10


def test_what_a_preemption_lost_is_nobodys_charge() -> None:
    steps = [
        step(1, arrived=(arrived(0),), started=(0,), prefills=((0, 0, 10),)),
        step(2, decodes=(0,)),
        step(3, preempted=(0,)),
        step(4, resumed=(0,), prefills=((0, 4, 3),)),  # four found in the cache: not charged again
        step(5, prefills=((0, 7, 5),)),  # up to the second token, and makes the third
    ]
    assert used(steps)["a"] == Used(computed=10, recomputed=8, output=3)


def test_a_request_from_before_the_log_is_not_taken_for_cached() -> None:
    alive = [Alive(arrived=arrived(0), started=True, running=True)]
    assert used([step(1, prefills=((0, 6, 4),))], alive)["a"] == Used(computed=4, output=1)


@given(cuts=st.sets(st.integers(1, 39)), lost=st.integers(0, 40))
def test_a_prompt_counts_once_however_it_is_cut_and_preempted(cuts: set[int], lost: int) -> None:
    """Computed in chunks up to where it is preempted, then once more from the start."""
    ends = [0, *sorted(cut for cut in cuts if cut < lost), *([lost] if lost else [])]
    pieces = [(a, b - a) for a, b in pairwise(ends)]
    steps = [step(1, arrived=(arrived(0, prompt_tokens=40),), started=(0,))]
    steps += [step(2 + i, prefills=((0, *piece),)) for i, piece in enumerate(pieces)]
    steps.append(step(90, preempted=(0,)))
    made = lost == 40
    steps.append(step(91, resumed=(0,), prefills=((0, 0, 40 + made),)))
    found = used(steps)["a"]
    assert found == Used(computed=40, recomputed=lost + made, output=1 + made)


# Shares ------------------------------------------------------------------------------------------


def shared() -> list[Step]:
    """Two tenants of three requests each, of whom two of a and one of b get a slot at first."""
    rows = [arrived(n, "a") for n in range(3)] + [arrived(n, "b") for n in range(3, 6)]
    return [
        step(
            1, arrived=tuple(rows), started=(0, 1, 3), prefills=((0, 0, 10), (1, 0, 10), (3, 0, 8))
        ),
        step(2, decodes=(0, 1), prefills=((3, 8, 2),)),
        step(3, started=(2,), prefills=((2, 0, 10),), decodes=(0, 1, 3)),  # a waits no more
        step(4, started=(4, 5), prefills=((4, 0, 10), (5, 0, 10))),
    ]


def test_shares_are_of_what_backlogged_tenants_got_while_two_were() -> None:
    # Steps 1 and 2. a: 20 prompt tokens and 4 of output; b: 10 and 1.
    assert share_while_backlogged(shared()) == {"a": 28 / 40, "b": 12 / 40}
    assert contended(shared()).backlogged == {"a": 2, "b": 2}
    assert contended(shared()).steps == 2


def test_who_does_not_wait_has_no_share_in_others_contention() -> None:
    steps = [
        step(1, arrived=(arrived(9, "c"),), started=(9,), prefills=((9, 0, 10),)),
        *(step(one.step + 1, **_fields(one)) for one in shared()),
    ]
    assert share_while_backlogged(steps).keys() == {"a", "b"}


def _fields(one: Step) -> dict[str, Any]:
    names = ("arrived", "started", "prefills")
    found = {name: getattr(one, name) for name in names}
    return {**found, "decodes": (*one.decodes, 9)}


def test_a_backlogged_tenant_that_gets_nothing_has_a_share_of_nothing() -> None:
    rows = (arrived(0, "a"), arrived(1, "a"), arrived(2, "b"))
    steps = [step(1, arrived=rows, started=(0,), prefills=((0, 0, 10),))]
    assert share_while_backlogged(steps) == {"a": 1.0, "b": 0.0}


def test_a_preempted_request_waits() -> None:
    rows = (arrived(0, "a"), arrived(1, "b"), arrived(2, "b"))
    steps = [
        step(1, arrived=rows, started=(0, 1, 2), prefills=((0, 0, 10), (1, 0, 10), (2, 0, 10))),
        step(2, preempted=(0, 2), decodes=(1,)),
        step(3, resumed=(0,), decodes=(1,)),
    ]
    assert contended(steps).steps == 1
    assert share_while_backlogged(steps) == {"a": 0.0, "b": 1.0}


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([], id="nothing"),
        pytest.param([step(1, arrived=(arrived(0), arrived(1)), started=(0,))], id="one tenant"),
        pytest.param([step(1, arrived=(arrived(0), arrived(1, "b")))], id="nothing served"),
        pytest.param(
            [
                step(1, arrived=(arrived(0), arrived(1, "b")), ended=ended(1)),
                step(2, started=(0,), prefills=((0, 0, 10),)),
            ],
            id="the other left",
        ),
    ],
)
def test_where_nobody_had_to_share_there_are_no_shares(steps: list[Step]) -> None:
    assert share_while_backlogged(steps) == {}


def test_who_is_unknown_contends_with_nobody() -> None:
    alive = [Alive(arrived=arrived(7, UNKNOWN), started=False, running=False)]
    steps = [step(1, arrived=(arrived(0), arrived(1)), started=(0,), prefills=((0, 0, 10),))]
    assert contended(steps, alive).steps == 0


# Interference ------------------------------------------------------------------------------------


def test_prefill_between_tokens_is_everybodys_up_to_the_later_step() -> None:
    rows = (arrived(0), arrived(1, "b"), arrived(2, "b", prompt_tokens=100))
    steps = [
        step(1, arrived=rows, started=(0, 1), prefills=((0, 0, 10), (1, 0, 10))),
        step(2, decodes=(0,), prefills=((2, 0, 30),), started=(2,)),
        step(3, decodes=(0, 1), prefills=((2, 30, 20),)),
        step(4, prefills=((2, 50, 5),)),
        step(5, decodes=(0, 1), prefills=((2, 55, 1),)),
        step(6, decodes=(0, 1)),
    ]
    assert prefill_between_tokens(steps) == {"a": [20, 6, 0], "b": [6, 0]}


def test_a_preemption_is_no_gap_between_tokens() -> None:
    steps = [
        step(1, arrived=(arrived(0),), started=(0,), prefills=((0, 0, 10),)),
        step(2, decodes=(0,)),
        step(3, preempted=(0,)),
        step(4, resumed=(0,), prefills=((0, 0, 12),)),
        step(5, decodes=(0,)),
        step(6, decodes=(0,), ended=ended(0)),
    ]
    assert prefill_between_tokens(steps) == {"a": [0]}


# Order -------------------------------------------------------------------------------------------


def waiting(*left: int | None, **more: Any) -> tuple[Arrived, ...]:
    """Return requests of one tenant with so many milliseconds left."""
    return tuple(arrived(n, left_ms=one, **more) for n, one in enumerate(left))


@pytest.mark.parametrize(
    ("steps", "order"),
    [
        pytest.param(
            [step(1, arrived=waiting(3, 1, 2), started=(1, 2, 0))], Order(3, 3), id="in order"
        ),
        pytest.param(
            [step(1, arrived=waiting(3, 1, 2), started=(0, 2, 1))], Order(3, 0), id="against it"
        ),
        pytest.param(
            [step(1, arrived=waiting(1, 2, 3), started=(1,)), step(2, started=(0, 2))],
            Order(3, 2),
            id="over two steps",
        ),
        pytest.param([step(1, arrived=waiting(5, 5), started=(1, 0))], Order(1, 1), id="equal"),
        pytest.param(
            [step(1, arrived=waiting(9, None, -4), started=(1, 2, 0))], Order(1, 1), id="unmarked"
        ),
        pytest.param(
            [
                step(1, arrived=waiting(9), started=(0,)),
                step(2, arrived=(arrived(1, left_ms=1),), started=(1,)),
            ],
            Order(0, 0),
            id="never together",
        ),
        pytest.param(
            [step(1, arrived=(arrived(0, left_ms=9), arrived(1, "b", left_ms=1)), started=(0, 1))],
            Order(0, 0),
            id="of two tenants",
        ),
        pytest.param(
            [
                step(
                    1,
                    arrived=(
                        arrived(0, left_ms=9),
                        arrived(1, left_ms=1, relegated=True),
                        arrived(2, left_ms=0, relegated=True),
                    ),
                    started=(0, 1, 2),
                )
            ],
            Order(1, 0),
            id="relegated apart",
        ),
        pytest.param(
            [
                step(1, arrived=waiting(1, 2, 3), ended=ended(0)),
                step(2, started=(1, 2)),
            ],
            Order(1, 1),
            id="one left",
        ),
        pytest.param(
            [
                step(
                    5,
                    arrived=(arrived(0, left_ms=5), arrived(1, left_ms=2, at_ns=4 * MS)),
                    started=(0, 1),
                )
            ],
            Order(1, 1),
            id="due is arrival plus time left",
        ),
    ],
)
def test_order_counts_pairs_that_waited_together(steps: list[Step], order: Order) -> None:
    assert first_order(steps) == order
    assert order.share == ratio(order.kept, order.pairs)


def test_who_waited_before_the_log_is_in_pairs_too() -> None:
    alive = [
        Alive(arrived=arrived(0, left_ms=1), started=False, running=False),
        Alive(arrived=arrived(1, left_ms=0), started=True, running=False),
    ]
    steps = [step(1, arrived=(arrived(2, left_ms=5),), resumed=(1,), started=(2, 0))]
    assert first_order(steps, alive) == Order(1, 0)


@given(
    left=st.lists(st.integers(-3, 3), max_size=8),
    order=st.randoms(use_true_random=False),
)
def test_order_agrees_with_every_pair_looked_at(left: list[int], order: Any) -> None:
    started = list(range(len(left)))
    order.shuffle(started)
    steps = [step(1, arrived=waiting(*left), started=tuple(started))]
    pairs = [(left[a], left[b]) for i, a in enumerate(started) for b in started[i + 1 :]]
    assert first_order(steps) == Order(len(pairs), sum(first <= then for first, then in pairs))


# What was planned ahead -------------------------------------------------------------------------


def test_what_is_computed_for_who_is_over_is_nobodys() -> None:
    """Where a step is planned while the one before it runs, that one's ends are in it still."""
    steps = [
        step(1, arrived=(arrived(0), arrived(1, "b")), started=(0, 1), prefills=((0, 0, 10),)),
        step(2, decodes=(0,), prefills=((1, 0, 4),), ended=ended(0, 1)),
        step(3, decodes=(0,), prefills=((1, 4, 6),), preempted=(0,), ended=ended(0)),
        step(4, resumed=(0,), decodes=(0,)),
    ]
    assert used(steps) == {"a": Used(computed=10, output=2), "b": Used(computed=4)}
    assert victims(steps) == []
    assert all(not requests.backlogged() for _, requests in walk(steps))
    render_all(steps_tables(steps_report(log(steps), token_service())))


NUMBERS = st.lists(st.integers(0, 3), max_size=2).map(tuple)
ANY_STEPS = st.lists(
    st.builds(
        lambda **fields: fields,
        arrived=NUMBERS.flatmap(
            lambda some: st.sampled_from("ab").map(
                lambda tenant: tuple(arrived(n, tenant, left_ms=n) for n in some)
            )
        ),
        started=NUMBERS,
        resumed=NUMBERS,
        preempted=NUMBERS,
        decodes=NUMBERS,
        prefills=NUMBERS.map(lambda some: tuple((n, n, 5) for n in some)),
        ended=NUMBERS.map(lambda some: ended(*some)),
    ),
    max_size=6,
)


@given(ANY_STEPS)
def test_a_log_that_cannot_be_true_is_reported_all_the_same(fields: list[dict[str, Any]]) -> None:
    steps = [step(number, **more) for number, more in enumerate(fields)]
    alive = who_was_there([], steps)
    render_all(steps_tables(steps_report(log(steps, alive=tuple(alive)), token_service())))


# Victims and waits -------------------------------------------------------------------------------


def test_every_preemption_is_told_with_who_it_was() -> None:
    row = arrived(0, left_ms=7, relegated=True, slo_class=ClassName("batch"))
    steps = [
        step(1, arrived=(row, arrived(1)), started=(0, 1)),
        step(2, preempted=(0,)),
        step(3, preempted=(1,), ended=ended(1)),
    ]
    found = [(v.step, v.n, v.slo_class, v.relegated, v.deadline_ns) for v in victims(steps)]
    assert found == [(2, 0, "batch", True, 7 * MS), (3, 1, "chat", False, None)]


def test_a_wait_is_from_arrival_to_the_first_step() -> None:
    rows = (arrived(0, at_ns=0), arrived(1, "b", at_ns=MS))
    alive = [
        Alive(arrived=arrived(8, at_ns=-4 * MS), started=False, running=False),
        Alive(arrived=arrived(9, UNKNOWN), started=False, running=False),
    ]
    steps = [step(2, arrived=rows, started=(1,)), step(5, started=(0, 8, 9))]
    assert queue_times(steps, alive) == {"a": [5 * MS, 9 * MS], "b": [MS]}


# The report --------------------------------------------------------------------------------------


def log(steps: Iterable[Step], **more: Any) -> Log:
    """Return a log without a head."""
    given: dict[str, Any] = {"head": None, "alive": (), "notes": (), "files": ("x",)}
    return Log(steps=tuple(steps), **{**given, **more})


def test_a_report_puts_them_together() -> None:
    found = steps_report(log(shared()), token_service())
    assert [(one.tenant, one.requests, one.share) for one in found.tenants] == [
        ("a", 3, 0.7),
        ("b", 3, 0.3),
    ]
    assert sum(one.used.computed for one in found.tenants) == 60
    assert found.span_ns == 3 * MS
    assert (found.steps, found.contended_steps, found.took) == (4, 2, None)
    text = render_all(steps_tables(found))
    assert "70.0 %" in text
    assert "Prefill between tokens" in text


def test_a_report_of_nothing_is_whole() -> None:
    found = steps_report(log(()), token_service())
    assert (found.steps, found.tenants, found.order_share) == (0, (), None)
    assert "STEPS" in render_all(steps_tables(found))


def test_steps_that_ours_would_have_set_otherwise_are_counted() -> None:
    steps = [
        step(1, budget=512, limit=8, proposed=(512, None, 8)),
        step(2, budget=512, limit=8, proposed=(256, None, 8)),
        step(3, budget=512, limit=8),
    ]
    assert steps_report(log(steps), token_service()).otherwise == 1


def test_steps_are_told_by_how_many_ran() -> None:
    steps = [step(n, running=n, took_ns=n * MS, schedule_ns=n) for n in (0, 1, 2, 3, 4, 7, 8)]
    found = steps_report(log(steps), token_service()).by_running
    assert [(one.least, one.most, one.steps) for one in found] == [
        (0, 0, 1),
        (1, 1, 1),
        (2, 3, 2),
        (4, 7, 2),
        (8, 15, 1),
    ]


def test_of_many_notes_the_latest_are_shown_and_the_rest_counted() -> None:
    notes = tuple(Note(at_ns=InstantNs(n * MS), text=str(n)) for n in range(NOTES_SHOWN + 3))
    found = steps_report(log([step(1)], notes=notes), token_service())
    assert [note.text for note in found.notes] == [str(n) for n in range(3, NOTES_SHOWN + 3)]
    assert "and 3 earlier ones" in render_all(steps_tables(found))
