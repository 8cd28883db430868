"""A journal replays to what was, and says where it does not."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from headrace.model.deployment import PoolSpec
from headrace.model.effect import Effect
from headrace.model.event import CallerLeft, ConfigChanged, Event, RequestArrived, TimerDue
from headrace.model.ids import RequestId, TenantId
from headrace.model.profile import WORK_MAX_NS, DecodeFit
from headrace.plane import journal
from headrace.plane.core import Plane
from headrace.plane.journal import (
    Checkpoint,
    Differs,
    Frame,
    Gap,
    JournalError,
    Record,
    Recorder,
    Verified,
    frame_bytes,
    frames,
    verify,
)
from headrace.policy.fairness.vtc import Vtc
from headrace.units import REQUEST_TOKENS_MAX, SUM_MAX, InstantNs
from tests.plane.scenes import COSTS, H100, MS, Driver, config, usage


class Recorded(Driver):
    """A driver whose plane writes a journal."""

    def __init__(self, segment_bytes: int = 10**9) -> None:
        self.segments: list[bytearray] = []
        self.recorder: Recorder | None = None
        self.segment_bytes = segment_bytes
        super().__init__(replicas=2)

    def sink(self, frame: bytes, opens: bool) -> None:
        if opens:
            self.segments.append(bytearray())
        self.segments[-1] += frame

    def tell(self, event: Event) -> list[Effect]:
        if self.recorder is None:
            self.recorder = Recorder(self.plane, self.sink, segment_bytes=self.segment_bytes)
        effects = self.recorder.handle(event, now=self.now)
        self.seen += effects
        return effects

    def written(self) -> list[bytes]:
        return [bytes(segment) for segment in self.segments]


def life(segment_bytes: int = 10**9) -> list[bytes]:
    """Return the journal of a short life in which everything happens once."""
    made = Recorded(segment_bytes)
    for nth in range(6):
        made.now = InstantNs(made.now + 5 * MS)
        made.arrive("abc"[nth % 3], 500 + nth, prefix=(1, 2, nth), prefix_tokens=100)
    for sent in made.sent()[:3]:
        made.now = InstantNs(made.now + 20 * MS)
        made.first(sent.attempt)
        made.tick((sent.attempt, 30))
    first = made.sent()[0]
    made.end(first.attempt, usage=usage(500, 40), timing=made.timing(40))
    made.leave(made.sent()[1].request)
    made.report("r0", 1, running=1, prefix_tokens_hit=5)
    made.down("r1", 2)
    made.up("r1")
    made.tell(TimerDue())
    made.restart()
    return made.written()


def edited(segments: list[bytes], change: Callable[[int, Frame], Frame | None]) -> list[bytes]:
    """Return a journal with each record passed through `change`; None drops it."""
    result, index = [], 0
    for content in segments:
        kept = b""
        for frame in frames(content):
            put: Frame | None = frame
            if isinstance(frame, Record):
                put = change(index, frame)
                index += 1
            kept += frame_bytes(put) if put is not None else b""
        result.append(kept)
    return result


def records(segments: list[bytes]) -> list[Record]:
    found = (frame for content in segments for frame in frames(content))
    return [frame for frame in found if isinstance(frame, Record)]


def test_a_journal_replays_to_itself() -> None:
    segments = life()
    count = len(records(segments))
    assert count > 20
    assert verify(segments) == Verified(records=count, first=0)


def test_the_same_life_gives_the_same_bytes() -> None:
    assert life() == life()


@pytest.mark.parametrize("field", ["now", "event", "digest"])
def test_editing_any_one_record_names_its_index(field: str) -> None:
    segments = life()
    for at, old in enumerate(records(segments)):
        new: dict[str, Any] = {"now": old.now, "event": old.event, "digest": old.digest}
        if field == "now":
            new["now"] = InstantNs(old.now + 1)
        elif field == "event":
            new["event"] = CallerLeft(RequestId(10**6 + at))
        else:
            new["digest"] = bytes(16)
        wrong = verify(
            edited(segments, lambda nth, one: Record(**new) if nth == at else one)  # noqa: B023
        )
        assert isinstance(wrong, Differs)
        assert wrong.index == at
        assert wrong.now == new["now"]
        assert wrong.event == type(new["event"]).__name__


def test_a_field_changed_inside_an_event_names_its_index() -> None:
    segments = life()
    arrivals = [
        n for n, one in enumerate(records(segments)) if isinstance(one.event, RequestArrived)
    ]
    for at in arrivals:

        def change(nth: int, one: Record) -> Record:
            if nth != at or not isinstance(one.event, RequestArrived):  # noqa: B023
                return one
            request = msgspec.structs.replace(
                one.event.request, input_tokens=one.event.request.input_tokens + 1
            )
            return msgspec.structs.replace(one, event=RequestArrived(request))

        wrong = verify(edited(segments, change))  # type: ignore[arg-type]
        assert isinstance(wrong, Differs)
        assert (wrong.index, wrong.event) == (at, "RequestArrived")


@pytest.mark.parametrize(
    "event", [ConfigChanged(revision=9, config=b"{"), ConfigChanged(revision=9, config=b"{}")]
)
def test_an_event_that_the_plane_refuses_is_a_difference_not_a_crash(event: Event) -> None:
    segments = life()

    def change(nth: int, one: Frame) -> Frame:
        return msgspec.structs.replace(one, event=event) if nth == 5 else one

    wrong = verify(edited(segments, change))
    assert isinstance(wrong, Differs)
    assert (wrong.index, wrong.event) == (5, "ConfigChanged")
    assert "replay refused it" in wrong.why


def test_a_record_left_out_is_noticed_at_the_next() -> None:
    segments = life()
    for at in range(len(records(segments)) - 1):
        wrong = verify(edited(segments, lambda nth, one: None if nth == at else one))  # noqa: B023
        assert isinstance(wrong, Differs)
        assert wrong.index == at


def test_time_that_ran_backwards_is_a_difference() -> None:
    def change(nth: int, one: Frame) -> Frame:
        return msgspec.structs.replace(one, now=InstantNs(0)) if nth == 10 else one

    wrong = verify(edited(life(), change))
    assert isinstance(wrong, Differs)
    assert wrong.index == 10
    assert "clock ran backwards" in wrong.why


def test_any_kept_segment_verifies_alone_and_with_those_after_it() -> None:
    segments = life(segment_bytes=2_000)
    assert len(segments) > 5
    starts = [next(iter(frames(content))) for content in segments]
    total = len(records(segments))
    for nth, head in enumerate(starts):
        assert isinstance(head, Checkpoint)
        alone = verify(segments[nth : nth + 1])
        assert alone == Verified(records=len(records(segments[nth : nth + 1])), first=head.index)
        assert verify(segments[nth:]) == Verified(records=total - head.index, first=head.index)
    assert verify(segments) == Verified(records=total, first=0)


def test_an_edit_in_a_later_segment_is_named_by_its_index_over_all() -> None:
    segments = life(segment_bytes=2_000)
    at = len(records(segments)) - 2

    def change(nth: int, one: Frame) -> Frame:
        return msgspec.structs.replace(one, digest=bytes(16)) if nth == at else one

    wrong = verify(edited(segments, change))
    assert isinstance(wrong, Differs)
    assert wrong.index == at


def test_a_missing_segment_in_the_middle_is_a_difference() -> None:
    segments = life(segment_bytes=2_000)
    wrong = verify(segments[:2] + segments[3:])
    assert isinstance(wrong, Differs)
    assert wrong.event == "checkpoint"
    assert "not the state that the replay reached" in wrong.why


def test_after_a_recorded_gap_the_next_checkpoint_is_believed() -> None:
    segments = life(segment_bytes=2_000)
    lost = len(records(segments[2:3]))
    gap = frame_bytes(Gap(records=lost))
    found = verify([*segments[:2], gap, *segments[3:]])
    assert found == Verified(records=len(records(segments)) - lost, first=0)


def test_a_record_after_a_gap_without_a_checkpoint_cannot_be_read() -> None:
    segments = life()
    only = frame_bytes(records(segments)[0])
    with pytest.raises(JournalError, match="must start with a checkpoint"):
        verify([only])
    with pytest.raises(JournalError, match="must start with a checkpoint"):
        verify([segments[0], frame_bytes(Gap(records=1)) + only])


@pytest.mark.parametrize("missing", [1, 3, 40])
def test_a_journal_cut_short_says_where(missing: int) -> None:
    content = life()[0]
    with pytest.raises(JournalError, match=r"cut off at byte \d+"):
        verify([content[:-missing]])


def test_a_tail_of_less_than_a_length_is_cut_off() -> None:
    content = life()[0]
    with pytest.raises(JournalError, match=f"cut off at byte {len(content)}"):
        verify([content + b"\x00\x00"])


def test_what_is_no_frame_is_no_journal() -> None:
    with pytest.raises(JournalError, match="no frame at byte 0"):
        verify([b"\x00\x00\x00\x01\xc1"])


def test_another_version_is_refused() -> None:
    head = Checkpoint(version=99, index=0, digest=bytes(16), state=Plane().freeze())
    with pytest.raises(JournalError, match="journal version 99, this reads 5"):
        verify([frame_bytes(head)])


def test_a_spoilt_checkpoint_is_no_journal() -> None:
    head = Checkpoint(version=journal.VERSION, index=0, digest=bytes(16), state=b"\xc1")
    with pytest.raises(JournalError, match="the checkpoint of record 0"):
        verify([frame_bytes(head)])


def test_nothing_verifies() -> None:
    assert verify([]) == Verified(records=0, first=0)


def test_a_thawed_plane_goes_on_in_a_segment_of_its_own() -> None:
    made = Recorded()
    made.arrive()
    saved = made.plane.freeze()
    made.arrive()
    made.plane = Plane.thaw(saved)
    made.recorder = Recorder(made.plane, made.sink, resumed=True)
    made.restart()
    made.arrive()
    found = verify(made.written())
    assert isinstance(found, Verified)
    assert found.records == len(records(made.written()))


def test_the_event_that_broke_a_plane_is_the_last_of_its_journal() -> None:
    made = Recorded()
    made.arrive()
    event = RequestArrived(made.live(1).request) if made.plane.state.live else TimerDue()
    with pytest.raises(AssertionError, match="arrived twice"):
        made.tell(event)
    wrong = verify(made.written())
    assert isinstance(wrong, Differs)
    assert wrong.index == len(records(made.written())) - 1
    assert "arrived twice" in wrong.why


def test_code_that_no_longer_breaks_on_an_event_is_a_difference() -> None:
    segments = life()
    last = len(records(segments)) - 1

    def change(nth: int, one: Frame) -> Frame:
        return msgspec.structs.replace(one, digest=b"") if nth == last else one

    wrong = verify(edited(segments, change))
    assert isinstance(wrong, Differs)
    assert (wrong.index, wrong.why) == (last, "the plane broke on this event; this code does not")


def test_hash_seeds_do_not_show() -> None:
    """No set is iterated where its order could show: strings hash differently in each process."""
    script = "from tests.plane.test_journal import life; print(b''.join(life(3_000)).hex())"
    found = [
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1]
    assert len(found[0]) > 10_000


def test_the_most_that_engines_are_believed_breaks_no_journal() -> None:
    made, most = Recorded(), REQUEST_TOKENS_MAX
    slow = replace(H100, decode=DecodeFit(a_ms=6.06, c_ms=0.0079, d_ms=1e-2), reference_batch=1)
    pool = PoolSpec(name="p", model="m", profile=slow)
    for cost in COSTS.values():
        made.configure(config(pools=(pool,), fairness=Vtc(cost=cost)))
        for nth in range(50):
            made.arrive("abc"[nth % 3], 100)
            attempt = made.sent()[-1].attempt
            made.end(attempt, usage=usage(most, most, most), timing=made.timing(most))
            made.now = InstantNs(made.now + MS)
    assert made.recorder is not None
    made.recorder.checkpoint()
    assert isinstance(verify(made.written()), Verified)
    assert all(row.work_ns == WORK_MAX_NS for row in made.rows())


def test_a_sum_over_a_life_stops_where_a_journal_does() -> None:
    made = Recorded()
    request = made.arrive("a", 1_000)
    tally = made.plane.state.accounts.tallies[TenantId("a")][made.live(request).slo_class]
    tally.met_work_ns = tally.offered_work_ns = SUM_MAX
    made.serve(request)
    made.arrive("a", 1_000)
    assert tally.met_work_ns == tally.offered_work_ns == SUM_MAX
    Plane.thaw(made.plane.freeze())
