"""A simulated journal replays, restarts included, and a record that was touched is named."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.model.event import (
    CallerLeft,
    ConfigChanged,
    Ended,
    FirstToken,
    ProgressTick,
    ReplicaDown,
    ReplicaReported,
    ReplicaUp,
    RequestArrived,
    Restarted,
    TimerDue,
)
from headrace.model.ids import RequestId
from headrace.plane.journal import (
    Checkpoint,
    Differs,
    Frame,
    Gap,
    JournalError,
    Record,
    Verified,
    frame_bytes,
    frames,
    verify,
)
from headrace.sim.faults import Crash, Fault, Leavers, Reports, Restart
from headrace.sim.scenario import Scenario
from headrace.units import later
from tests.sim.scenes import Ran, run, scenario, source

FAULTS = (
    Crash(replica=1, at_s=1.0, back_after_s=1.0),
    Reports(lost=0.2, twice=0.2, delay_s=0.5),
    Leavers(share=0.3, within_s=2.0),
)
KIB = 1_024


def busy(*faults: Fault) -> Scenario:
    """Return two replicas with more to do than they can."""
    sources = source("a", 90.0), source("b", 30.0, slo_class="batch")
    return scenario(*sources, rows=400, faults=faults)


@pytest.fixture(scope="module")
def ran() -> Ran:
    """Return a run with faults whose journal has several segments."""
    return run(busy(*FAULTS), 3, segment_bytes=48 * KIB)


@pytest.fixture(scope="module")
def restarted() -> Ran:
    """Return a run in which the driver came back twice."""
    twice = (Restart(at_s=1.2), Restart(at_s=2.5, checkpoint_age_s=0.9))
    return run(busy(*FAULTS, *twice), 3)


def edited(content: bytes, at: int, change: Callable[[Record], Frame | None]) -> bytes:
    """Return a segment with its `at`th record changed, or left out where that gives None."""
    out: list[Frame | None] = []
    nth = 0
    for frame in frames(content):
        if isinstance(frame, Record):
            out.append(change(frame) if nth == at else frame)
            nth += 1
        else:
            out.append(frame)
    assert nth > at
    return b"".join(frame_bytes(frame) for frame in out if frame is not None)


def middle(ran: Ran, kind: type) -> tuple[int, int]:
    """Return (segment, place in it) of a record of a kind, as near the middle as there is one."""
    places = [
        (nth, place, record)
        for nth, content in enumerate(ran.segments)
        for place, record in enumerate(f for f in frames(content) if isinstance(f, Record))
        if isinstance(record.event, kind) and getattr(record.event, "usage", ()) is not None
    ]
    nth, place, _ = places[len(places) // 2]
    return nth, place


def index_of(ran: Ran, segment: int, place: int) -> int:
    """Return the index that a record has in the whole journal."""
    head = next(frames(ran.segments[segment]))
    assert isinstance(head, Checkpoint)
    return head.index + place


CHANGES: dict[type, Callable[[Any], Any]] = {
    ConfigChanged: lambda e: replace(e, revision=e.revision + 1),
    RequestArrived: lambda e: RequestArrived(
        replace(e.request, input_tokens=e.request.input_tokens + 1)
    ),
    CallerLeft: lambda e: CallerLeft(e.request + 1),
    FirstToken: lambda e: FirstToken(e.attempt + 1),
    ProgressTick: lambda e: ProgressTick(((e.moved[0][0], e.moved[0][1] + 1), *e.moved[1:])),
    Ended: lambda e: replace(e, usage=replace(e.usage, output_tokens=e.usage.output_tokens + 1)),
    ReplicaUp: lambda e: replace(e, incarnation=e.incarnation + 100),
    ReplicaDown: lambda e: replace(e, incarnation=e.incarnation + 100),
    ReplicaReported: lambda e: ReplicaReported(replace(e.snapshot, running=99)),
    TimerDue: lambda _: CallerLeft(RequestId(10**9)),
}
"""Events that say a little something else."""


def test_a_journal_of_several_segments_replays(ran: Ran) -> None:
    assert len(ran.segments) > 3
    assert verify(ran.segments) == Verified(records=len(ran.records()), first=0)


def test_every_kind_of_event_is_in_it(ran: Ran, restarted: Ran) -> None:
    kinds = {type(record.event) for one in (ran, restarted) for record in one.records()}
    assert kinds == {*CHANGES, Restarted}


def test_a_journal_with_restarts_replays(restarted: Ran) -> None:
    heads = [head for s in restarted.segments for head in frames(s) if isinstance(head, Checkpoint)]
    assert [head.resumed for head in heads] == [False, True, True]
    assert verify(restarted.segments) == Verified(records=len(restarted.records()), first=0)


def test_a_kept_segment_replays_alone_and_so_does_the_rest_of_the_ring(ran: Ran) -> None:
    half = len(ran.segments) // 2
    alone = verify([ran.segments[half]])
    assert isinstance(alone, Verified)
    assert alone.first == index_of(ran, half, 0) > 0
    rest = verify(ran.segments[half:])
    assert isinstance(rest, Verified)
    assert rest.first == alone.first
    assert rest.first + rest.records == len(ran.records())


@pytest.mark.parametrize("kind", list(CHANGES))
def test_an_edited_event_is_named_by_its_index(ran: Ran, kind: type) -> None:
    segment, place = middle(ran, kind)

    def change(record: Record) -> Record:
        return replace(record, event=CHANGES[type(record.event)](record.event))

    segments = list(ran.segments)
    segments[segment] = edited(segments[segment], place, change)
    found = verify(segments)
    assert isinstance(found, Differs)
    assert found.index == index_of(ran, segment, place)
    assert verify(segments[segment:]) == found  # and without what came before
    assert isinstance(verify(segments[:segment]), Verified)


def test_an_edited_instant_is_found(ran: Ran) -> None:
    segment, place = middle(ran, RequestArrived)

    def delay(record: Record) -> Record:
        return replace(record, now=later(record.now, 1))

    segments = list(ran.segments)
    segments[segment] = edited(segments[segment], place, delay)
    found = verify(segments)
    assert isinstance(found, Differs)
    assert (found.index, found.event) == (index_of(ran, segment, place), "RequestArrived")


def test_an_edit_in_a_later_life_is_found(restarted: Ran) -> None:
    last = restarted.segments[-1]
    records = [f for f in frames(last) if isinstance(f, Record)]
    place = max(n for n, record in enumerate(records) if isinstance(record.event, Ended))

    def change(record: Record) -> Record:
        return replace(record, event=CHANGES[type(record.event)](record.event))

    found = verify([*restarted.segments[:-1], edited(last, place, change)])
    assert isinstance(found, Differs)
    assert (found.index, found.event) == (place, "Ended")


def test_a_record_left_out_is_found_at_the_next(ran: Ran) -> None:
    segment, place = middle(ran, RequestArrived)
    segments = list(ran.segments)
    segments[segment] = edited(segments[segment], place, lambda _: None)
    found = verify(segments)
    assert isinstance(found, Differs)
    assert found.index == index_of(ran, segment, place)


def test_a_segment_left_out_is_found_at_the_next_checkpoint(ran: Ran) -> None:
    found = verify([ran.segments[0], *ran.segments[2:]])
    assert isinstance(found, Differs)
    assert (found.index, found.event) == (index_of(ran, 1, 0), "checkpoint")


def test_an_edited_checkpoint_is_found(ran: Ran) -> None:
    def forged(content: bytes) -> bytes:
        head, *rest = frames(content)
        assert isinstance(head, Checkpoint)
        other = next(frames(ran.segments[0]))
        assert isinstance(other, Checkpoint)
        return b"".join(map(frame_bytes, [replace(head, state=other.state), *rest]))

    found = verify([*ran.segments[:2], forged(ran.segments[2]), *ran.segments[3:]])
    assert isinstance(found, Differs)
    assert found.event == "checkpoint"


def test_after_a_recorded_gap_the_next_checkpoint_is_believed(ran: Ran) -> None:
    segment, _ = middle(ran, RequestArrived)
    lost = [f for f in frames(ran.segments[segment]) if isinstance(f, Record)]
    head = next(frames(ran.segments[segment]))
    gap = frame_bytes(head) + frame_bytes(Gap(records=len(lost)))
    found = verify([*ran.segments[:segment], gap, *ran.segments[segment + 1 :]])
    assert found == Verified(records=len(ran.records()) - len(lost), first=0)


def test_what_is_no_journal_is_an_error(ran: Ran) -> None:
    whole = ran.segments[0]
    with pytest.raises(JournalError, match="cut off at byte"):
        verify([whole[:-1]])
    with pytest.raises(JournalError, match="no frame at byte 0"):
        verify([(3).to_bytes(4, "big") + b"abc"])
    headless = b"".join(frame_bytes(f) for f in frames(whole) if isinstance(f, Record))
    with pytest.raises(JournalError, match="must start with a checkpoint"):
        verify([headless])
    head, *rest = frames(whole)
    assert isinstance(head, Checkpoint)
    with pytest.raises(JournalError, match="journal version 99"):
        verify([b"".join(map(frame_bytes, [replace(head, version=99), *rest]))])
    with pytest.raises(JournalError, match="the checkpoint of record 0"):
        verify([frame_bytes(replace(head, state=b"\xc1"))])
