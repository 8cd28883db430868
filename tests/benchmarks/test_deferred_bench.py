"""What the benchmark of deferred work measures by."""

from headrace.model.ids import RequestId
from headrace.units import InstantNs
from tests.gateway.leftover import Seen, Wait


def seen(waits: list[Wait], jobs: list[int] | None = None, bursts: list[int] | None = None) -> Seen:
    return Seen(
        rows=[],
        offered=[],
        waits={RequestId(nth): wait for nth, wait in enumerate(waits)},
        jobs_sent=[InstantNs(at) for at in jobs or []],
        bursts=[InstantNs(at) for at in bursts or []],
        busy=1.0,
    )


def wait(begun: int, over: int | None, *, sent: bool = True) -> Wait:
    return Wait(InstantNs(begun), None if over is None else InstantNs(over), sent)


def test_a_bursts_first_dispatch_is_that_of_whoever_is_sent_first() -> None:
    waits = [wait(0, 5), wait(100, 180, sent=False), wait(101, 130), wait(300, None)]
    assert seen(waits, bursts=[100, 300]).first_dispatches_ns() == [30, None]


def test_a_job_is_in_the_way_once_somebody_has_waited_for_a_window() -> None:
    waits = [wait(0, 100), wait(200, 210)]
    assert seen(waits, [49, 50, 51, 99, 100, 205]).jobs_in_the_way(50) == 2
