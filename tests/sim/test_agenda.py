"""Simultaneous events have one order, whoever planned them first."""

from itertools import permutations

from headrace.sim.agenda import Agenda, Kind
from headrace.units import InstantNs

NOW = InstantNs(5)


def popped(agenda: Agenda[str]) -> list[str]:
    """Return all events in order."""
    return [agenda.pop()[3] for _ in range(len(agenda))]


def test_ties_do_not_depend_on_the_order_of_planning() -> None:
    events = [(kind, entity) for kind in (Kind.ARRIVAL, Kind.ENGINE) for entity in (1, 0)]
    orders = set()
    for planned in permutations(events):
        agenda: Agenda[str] = Agenda()
        for kind, entity in planned:
            agenda.push(NOW, kind, entity, f"{kind.name} {entity}")
        orders.add(tuple(popped(agenda)))
    assert orders == {("ENGINE 0", "ENGINE 1", "ARRIVAL 0", "ARRIVAL 1")}


def test_an_entitys_own_events_keep_their_order() -> None:
    agenda: Agenda[str] = Agenda()
    for name in ("first", "second", "third"):
        agenda.push(NOW, Kind.REPORT, 7, name)
    agenda.push(InstantNs(4), Kind.ARRIVAL, 99, "earlier")
    assert popped(agenda) == ["earlier", "first", "second", "third"]


def test_engines_come_before_faults_and_arrivals_last() -> None:
    assert min(Kind) is Kind.ENGINE
    assert max(Kind) is Kind.ARRIVAL
    assert Kind.FAULT < Kind.REPORT < Kind.TICK < Kind.TIMER < Kind.LEAVE
