"""The ring of segment files: order, bound, full disks, crashes."""

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from headrace.adapters.journal.ring import JournalRing, segment_paths, segments
from headrace.model.event import TimerDue
from headrace.plane.core import Plane
from headrace.plane.journal import (
    Checkpoint,
    Differs,
    Gap,
    JournalError,
    Recorder,
    Verified,
    frame_bytes,
    frames,
    verify,
)
from headrace.units import InstantNs

SEGMENT = 700
"""A few records each."""


class Life:
    """A plane that records timers, which need no configuration, into a folder."""

    def __init__(self, folder: Path, *, keep_bytes: int = 1 << 30) -> None:
        self.ring = JournalRing(folder, keep_bytes=keep_bytes)
        self.recorder = Recorder(
            Plane(), self.ring.put, segment_bytes=SEGMENT, resumed=self.ring.resumed
        )
        self.now = 0

    def live(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 1
            self.recorder.handle(TimerDue(), now=InstantNs(self.now))


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Let files take so many more bytes; None: any number."""
    left: list[int | None] = [None]
    real = os.write

    def limited(file: int, content: bytes) -> int:
        if left[0] is None:
            return real(file, content)
        part = content[: left[0]]
        left[0] -= len(part)
        if not part:
            raise OSError(28, "No space left on device")
        return real(file, part)

    monkeypatch.setattr(os, "write", limited)

    def allow(count: int | None) -> None:
        left[0] = count

    return allow


def gaps(folder: Path) -> list[int]:
    """Return how many records each gap of a journal lost."""
    return [
        frame.records
        for content in segments(folder)
        for frame in frames(content)
        if isinstance(frame, Gap)
    ]


def test_segments_in_order_are_the_whole_run(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.live(50)
    life.ring.close()
    paths = segment_paths(tmp_path)
    assert len(paths) > 3
    assert paths[0].name == "000001-000000000000.journal"
    first = [int(path.stem.partition("-")[2]) for path in paths]
    assert first == sorted(first)
    assert verify(segments(tmp_path)) == Verified(records=50, first=0)
    middle = segments(paths[2])
    assert verify(middle) == Verified(records=first[3] - first[2], first=first[2])
    assert life.ring.dropped == 0


def test_the_oldest_segments_go_and_the_rest_still_replays(tmp_path: Path) -> None:
    life = Life(tmp_path, keep_bytes=3 * SEGMENT)
    life.live(200)
    assert sum(path.stat().st_size for path in segment_paths(tmp_path)) <= 3 * SEGMENT
    life.ring.close()
    found = verify(segments(tmp_path))
    assert isinstance(found, Verified)
    assert found.first + found.records == 200
    assert found.first > 100


def test_a_restart_goes_on_in_the_same_folder(tmp_path: Path) -> None:
    for nth in (1, 2, 3):
        life = Life(tmp_path)
        assert life.ring.resumed is (nth > 1)
        life.live(10)
        life.ring.close()
    assert verify(segments(tmp_path)) == Verified(records=30, first=0)


@pytest.mark.parametrize("bytes_left", [0, 1, 17, 100, 333, 700])
def test_a_full_disk_makes_a_gap_that_is_told(
    tmp_path: Path, write: Callable[[int | None], None], bytes_left: int
) -> None:
    life = Life(tmp_path)
    life.live(7)
    write(bytes_left)
    life.live(23)
    write(None)
    life.live(40)
    life.ring.close()
    found = verify(segments(tmp_path))
    assert isinstance(found, Verified)
    told = gaps(tmp_path)
    assert told
    assert found.records + sum(told) == 70
    for content in segments(tmp_path):
        assert isinstance(next(frames(content)), Checkpoint)
    assert life.ring.dropped >= sum(told)


def test_a_disk_that_is_full_from_the_start_loses_all_and_fails_nothing(
    tmp_path: Path, write: Callable[[int | None], None]
) -> None:
    write(0)
    life = Life(tmp_path)
    life.live(20)
    life.ring.close()
    assert life.ring.dropped > 20
    assert segment_paths(tmp_path) == []


def test_a_disk_that_has_room_again_is_used_from_the_next_segment_on(
    tmp_path: Path, write: Callable[[int | None], None]
) -> None:
    write(0)
    life = Life(tmp_path)
    life.live(20)
    write(None)
    life.live(40)
    life.ring.close()
    (missing,) = gaps(tmp_path)
    assert verify(segments(tmp_path)) == Verified(records=60 - missing, first=missing)


def test_a_folder_that_goes_away_fails_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    life = Life(folder)
    for path in segment_paths(folder):
        path.unlink()
    folder.rmdir()
    life.live(30)
    assert life.ring.dropped
    folder.mkdir()
    life.live(30)
    life.ring.close()
    assert isinstance(verify(segments(folder)), Verified)


def test_a_frame_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.live(3)
    life.ring.close()
    (path,) = segment_paths(tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    assert verify(segments(tmp_path)) == Verified(records=2, first=0)
    Life(tmp_path).live(3)
    assert verify(segments(tmp_path)) == Verified(records=5, first=0)


def test_records_missing_in_the_middle_are_found(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.live(30)
    life.ring.close()
    path = segment_paths(tmp_path)[1]
    content = path.read_bytes()
    kept = [frame_bytes(frame) for frame in frames(content)]
    path.write_bytes(b"".join(kept[:-1]))
    found = verify(segments(tmp_path))
    assert isinstance(found, Differs)
    assert found.event == "checkpoint"


def test_bytes_missing_in_the_middle_of_a_life_are_an_error(tmp_path: Path) -> None:
    for _ in range(2):
        life = Life(tmp_path)
        life.live(30)
        life.ring.close()
    paths = segment_paths(tmp_path)
    ends = {path for path, after in pairwise(paths) if path.name[:6] != after.name[:6]} | {
        paths[-1]
    }
    assert len(ends) == 2
    for path in paths:
        content = path.read_bytes()
        path.write_bytes(content[:-5])
        for read in (tmp_path, path):
            if path in ends:
                cut: dict[Path, int] = {}
                assert isinstance(verify(segments(read, cut.__setitem__)), Verified)
                assert list(cut) == [path]
            else:
                with pytest.raises(JournalError, match=f"{path.name}: cut off at byte"):
                    list(segments(read))
        path.write_bytes(content)


@pytest.mark.parametrize("by", [1 << 8, 1 << 16, 1 << 24])
def test_a_length_that_was_altered_is_an_error_and_no_crash(tmp_path: Path, by: int) -> None:
    life = Life(tmp_path)
    life.live(5)
    life.ring.close()
    (path,) = segment_paths(tmp_path)
    content = path.read_bytes()
    at = 0
    starts: list[int] = []
    while at < len(content):
        starts.append(at)
        at += 4 + int.from_bytes(content[at : at + 4], "big")
    for start in starts[:-1]:
        length = int.from_bytes(content[start : start + 4], "big") + by
        path.write_bytes(content[:start] + length.to_bytes(4, "big") + content[start + 4 :])
        with pytest.raises(JournalError):
            verify(segments(tmp_path))


STRANGERS = [
    "foo.journal",
    "-.journal",
    "1-2.journal",
    "000001-x.journal",
    "٠٠٠٠٠٩-000000000000.journal",
]


def test_files_of_other_names_are_left_alone(tmp_path: Path) -> None:
    for name in STRANGERS:
        (tmp_path / name).write_bytes(b"not ours")
    life = Life(tmp_path, keep_bytes=3 * SEGMENT)
    assert not life.ring.resumed
    life.live(100)
    life.ring.close()
    assert isinstance(verify(segments(tmp_path)), Verified)
    assert {(tmp_path / name).read_bytes() for name in STRANGERS} == {b"not ours"}
    assert not {*STRANGERS} & {path.name for path in segment_paths(tmp_path)}


def test_lives_and_indices_are_in_order_beyond_their_digits(tmp_path: Path) -> None:
    names = [f"{life}-{index}.journal" for life, index in (
        ("000009", "000000000000"), ("999999", "999999999999"), ("999999", "1000000000000"),
        ("1000000", "000000000000"),
    )]  # fmt: skip
    for name in reversed(names):
        (tmp_path / name).touch()
    assert [path.name for path in segment_paths(tmp_path)] == names
    life = Life(tmp_path)
    life.live(1)
    assert segment_paths(tmp_path)[-1].name == "1000001-000000000000.journal"


def test_a_segment_in_which_a_crash_left_nothing_hinders_no_later_life(tmp_path: Path) -> None:
    (tmp_path / "000001-000000000000.journal").touch()
    for life in (2, 3):
        one = Life(tmp_path)
        assert segment_paths(tmp_path)[-1].name == f"{life:06d}-000000000000.journal"
        one.live(3)
        assert one.ring.dropped == 0
        one.ring.close()
    assert verify(segments(tmp_path)) == Verified(records=6, first=0)


def test_a_journal_is_its_owners_alone(tmp_path: Path) -> None:
    Life(tmp_path)
    assert segment_paths(tmp_path)[0].stat().st_mode & 0o077 == 0
