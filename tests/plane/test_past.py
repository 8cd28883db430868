"""A plane is thawed from whatever whole records a segment has."""

from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import replace

from headrace.model.event import RequestArrived, TimerDue
from headrace.model.request import Request
from headrace.plane.core import Plane
from headrace.plane.journal import (
    VERSION,
    Checkpoint,
    Frame,
    Gap,
    JournalError,
    Record,
    frame_bytes,
    frames,
)
from headrace.plane.past import thaw
from headrace.units import InstantNs
from tests.plane.scenes import MS, usage
from tests.plane.test_journal import Recorded


def life() -> tuple[bytes, list[bytes]]:
    """Return a segment, and the frozen plane after each number of records."""
    made = Recorded()
    states = [Plane().freeze()]
    made.arrive(tenant="a")
    made.arrive(tenant="b")
    made.wait(40 * MS)
    made.serve(1)
    made.first(made.live(2).attempt)
    made.tick((made.live(2).attempt, 7))
    made.wait(300 * MS)
    made.arrive(tenant="a")
    made.end(made.live(2).attempt, usage=usage(100, 9), timing=made.timing(9))
    (content,) = made.written()
    plane = Plane()
    for frame in frames(content):
        if isinstance(frame, Record):
            plane.handle(frame.event, now=frame.now)
            states.append(plane.freeze())
    assert states[-1] == made.plane.freeze()
    return content, states


def bounds(content: bytes) -> list[int]:
    """Return where each frame ends."""
    ends, at = [], 0
    for frame in frames(content):
        at += len(frame_bytes(frame))
        ends.append(at)
    assert at == len(content)
    return ends


def test_any_prefix_thaws_to_the_state_after_its_whole_records() -> None:
    content, states = life()
    ends = bounds(content)
    for end in range(ends[0], len(content) + 1):
        found = thaw(content[:end])
        whole = sum(one <= end for one in ends) - 1
        assert (found.records, found.lost) == (whole, "")
        assert found.plane.freeze() == states[whole]


@pytest.mark.parametrize("end", [0, 1, 3, 4, 40])
def test_without_a_whole_checkpoint_there_is_nothing_to_thaw(end: int) -> None:
    content, _ = life()
    with pytest.raises(JournalError, match=r"cut off at byte 0|no checkpoint"):
        thaw(content[:end])


def changed(content: bytes, nth: int, change: Callable[[Record], Frame]) -> bytes:
    """Return a segment with one record changed."""
    kept = list(frames(content))
    record = kept[nth + 1]
    assert isinstance(record, Record)
    kept[nth + 1] = change(record)
    return b"".join(map(frame_bytes, kept))


@pytest.mark.parametrize("nth", [0, 3, 6, 9])
def test_the_past_ends_before_a_record_that_does_not_follow(nth: int) -> None:
    content, states = life()
    for change, why in (
        (lambda one: replace(one, now=InstantNs(one.now + 1)), "replays to other effects"),
        (lambda one: replace(one, event=TimerDue()), f"record {nth} "),
        (lambda one: replace(one, now=InstantNs(-1)), "cannot be replayed: AssertionError clock"),
    ):
        found = thaw(changed(content, nth, change))
        assert found.records == nth
        assert why in found.lost
        assert found.plane.freeze() == states[nth]


def test_the_past_ends_before_what_broke_the_plane() -> None:
    made = Recorded()
    made.arrive()
    before = made.plane.freeze()
    with pytest.raises(AssertionError, match="arrived twice"):
        made.tell(RequestArrived(made.live(1).request))
    found = thaw(made.written()[0])
    assert found.plane.freeze() == before
    assert not found.lost


def test_the_past_ends_at_a_gap_and_begins_behind_one() -> None:
    content, states = life()
    gap = frame_bytes(Gap(records=3))
    found = thaw(gap + changed(content, 4, lambda _: Gap(records=1)))
    assert (found.records, found.lost) == (4, "")
    assert found.plane.freeze() == states[4]


def test_what_is_of_another_kind_is_no_past() -> None:
    content, _ = life()
    head, first, *_ = frames(content)
    assert isinstance(head, Checkpoint)
    for frame, why in (
        (replace(head, version=VERSION + 1), "journal version"),
        (replace(head, state=b"\xc1"), "the checkpoint of record 0"),
        (replace(head, state=msgspec.msgpack.encode({"config": b"{}"})), "the checkpoint of"),
        (first, "must start with a checkpoint"),
    ):
        with pytest.raises(JournalError, match=why):
            thaw(frame_bytes(frame))


def test_a_checkpoint_at_the_end_leaves_nothing_to_replay() -> None:
    made = Recorded()
    made.arrive()
    assert made.recorder is not None
    made.recorder.checkpoint()
    made.recorder.checkpoint()  # nothing happened since: the first one does
    assert len(made.segments) == 2
    found = thaw(made.written()[-1])
    assert found.records == 0
    assert found.plane.freeze() == made.plane.freeze()


def test_what_was_written_before_waits_could_be_bounded_is_read() -> None:
    """A request and a backlog without the field go on as ones that have no bound."""
    made = Recorded()
    made.arrive()
    request = made.live(1).request
    old = msgspec.to_builtins(request)
    assert old.pop("ttl_ns") is None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=Request) == request
    state = msgspec.msgpack.decode(made.plane.freeze())
    for known in state["models"].values():
        del known["backlog"]["bounded"]
    for live in state["live"].values():
        del live["request"]["ttl_ns"]
    assert Plane.thaw(msgspec.msgpack.encode(state)).freeze() == made.plane.freeze()
