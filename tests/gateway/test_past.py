"""A process goes on where the last one on its journal ended, however that one ended."""

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from headrace.adapters.journal.held import HeldJournal
from headrace.adapters.journal.ring import segment_paths, segments
from headrace.config.schema import ServerSpec, Settings, UpstreamSpec
from headrace.gateway.clock import LoopClock
from headrace.gateway.driver import Driver
from headrace.gateway.errors import Fault
from headrace.gateway.fleet import engines
from headrace.gateway.past import AWAY_NS_MAX, recall
from headrace.gateway.stream import Stream
from headrace.model.deployment import TenantSpec
from headrace.model.event import ConfigChanged, Event, ReplicaUp, RequestArrived, Restarted
from headrace.model.ids import Incarnation
from headrace.model.slo import Outcome
from headrace.plane.core import Plane
from headrace.plane.journal import Checkpoint, Record, Verified, frame_bytes, frames, verify
from headrace.policy.catalog import PlaneConfig, digest
from headrace.units import NS_PER_MS, NS_PER_S
from tests.gateway.scenes import ObedientEngine, ask, deployment, keys, request

WALL_NS = 1_700_000_000 * NS_PER_S


class Turns:
    """A loop that turns by hand."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._made = 0

    def time(self) -> float:
        return self.seconds

    def call_at(self, when: float, callback: Callable[[], None]) -> "Planned":
        self._made += 1
        call = (when, self._made, callback)
        self._calls.append(call)
        return Planned(self._calls, call)

    def wait(self, seconds: float) -> None:
        until = self.seconds + seconds
        while due := [call for call in self._calls if call[0] <= until]:
            call = min(due, key=lambda one: one[:2])
            self._calls.remove(call)
            self.seconds = max(self.seconds, call[0])
            call[2]()
        self.seconds = until


class Planned:
    def __init__(self, calls: list[Any], call: Any) -> None:
        self._calls, self._call = calls, call

    def cancel(self) -> None:
        if self._call in self._calls:
            self._calls.remove(self._call)


class DatedClock(LoopClock):
    """A clock whose wall is the test's."""

    def __init__(self, turns: Turns, wall_ns: int) -> None:
        super().__init__(cast("asyncio.AbstractEventLoop", turns))
        self._wall_ns, self._since = wall_ns, turns.seconds

    def wall_ns(self) -> int:
        return self._wall_ns + round((self._loop.time() - self._since) * NS_PER_S)


class Life:
    """One process on a journal."""

    def __init__(
        self,
        folder: Path,
        *,
        wall_ns: int = WALL_NS,
        boot_s: float = 1_000.0,
        config: PlaneConfig | None = None,
        segment_bytes: int = 1 << 20,
    ) -> None:
        self.told = config or deployment()
        """What the file says."""
        self.folder, self.turns = folder, Turns(boot_s)
        self.clock = DatedClock(self.turns, wall_ns)
        self.kept = HeldJournal(folder)
        self.past = recall(self.kept, self.clock, self.told)
        self.config = self.past.in_force(self.told)
        self.states = [self.past.plane.freeze()]
        """The plane after each record, the first one before any."""
        self.frames: list[tuple[int, bool]] = []
        """Size of each frame, and whether it opens a segment."""
        self.engine = ObedientEngine(self.clock)
        self.engine.incarnation = Incarnation(self.past.first_id + 1)
        self.driver = Driver(
            self.clock, [self.engine], journal=self, past=self.past, segment_bytes=segment_bytes
        )
        self.revision = self.past.revision(self.config)
        self.driver.start(self.config, self.revision, digest(self.told))

    def put(self, frame: bytes, opens: bool) -> None:
        self.kept.put(frame, opens)
        self.frames.append((len(frame), opens))
        if not opens:
            self.states.append(self.past.plane.freeze())

    def close(self) -> None:
        pass

    def offer(self, tenant: str = "free", tokens: int = 100) -> Stream:
        return self.driver.offer(request(self.driver.mint(), tenant, tokens=tokens), ask())

    def refused(self, tenant: str = "slow") -> bool:
        return isinstance(self.offer(tenant)._end, Fault)

    def die(self, cut: int = 0) -> bytes:
        """Die at once, the last `cut` bytes unwritten; return the state of the last whole record."""
        self.kept.close()
        newest = segment_paths(self.folder)[-1]
        size = newest.stat().st_size
        os.truncate(newest, max(0, size - cut))
        wall = self.clock.wall_ns()
        os.utime(newest, ns=(wall, wall))
        lost = 0
        for length, opens in reversed(self.frames):
            if cut <= 0:
                break
            cut -= length
            if opens:  # only the newest segment is cut
                break
            lost += 1
        return self.states[len(self.states) - 1 - lost]

    def stop(self) -> bytes:
        """Stop as a process does on a signal."""
        self.driver.stop()
        self.driver.unrecord()
        assert self.driver.broken is None
        return self.die()

    def next(self, away_ns: int = 0, **more: Any) -> "Life":
        """Return the process after this one, on a machine that was started anew."""
        given: dict[str, Any] = {"wall_ns": self.clock.wall_ns() + away_ns, "boot_s": 3.0} | more
        return Life(self.folder, **given)


def events(folder: Path) -> list[Event]:
    return [
        frame.event
        for content in segments(folder)
        for frame in frames(content)
        if isinstance(frame, Record)
    ]


def of(folder: Path, kind: type) -> list[Any]:
    return [event for event in events(folder) if isinstance(event, kind)]


def test_what_was_spent_before_a_crash_is_spent_after_it(tmp_path: Path) -> None:
    life = Life(tmp_path)
    assert not life.refused()
    assert life.refused()
    state = life.die()
    second = life.next(20 * NS_PER_S)
    assert second.states[0] == state
    assert second.refused()
    second.die()
    third = second.next(45 * NS_PER_S)
    assert not third.refused()
    third.die()
    assert isinstance(verify(segments(tmp_path)), Verified)


def test_who_was_in_has_ended_and_the_counts_go_on(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.offer()
    life.engine.say("one two")
    life.engine.end()
    life.offer("single")
    life.engine.say("three")
    life.die()
    second = life.next()
    state = second.driver.plane.state
    assert not state.live
    (done,) = state.accounts.tallies[request(1).tenant].values()
    assert done.outcomes == {Outcome.SUCCESS: 1}
    (cut,) = state.accounts.tallies[request(1, "single").tenant].values()
    assert cut.outcomes == {Outcome.ERROR: 1}
    assert not second.refused("single")  # its slot is free again
    assert second.driver.outcomes == {Outcome.ERROR: 1}
    second.die()


def test_time_goes_on_by_what_passed_on_the_wall_and_never_back(tmp_path: Path) -> None:
    life = Life(tmp_path)
    for away_ns, passed_ns in (
        (5 * NS_PER_S, 5 * NS_PER_S),
        (-3_600 * NS_PER_S, 0),
        (10 * AWAY_NS_MAX, AWAY_NS_MAX),
    ):
        life.turns.wait(2.5)
        life.offer()
        before = life.driver.plane.state.now
        life.die()
        life = life.next(away_ns)
        assert life.clock.now() == before + passed_ns
        assert life.driver.plane.state.now == life.clock.now()
    polls = life.engine.polls
    life.turns.wait(3.0)
    assert life.engine.polls == polls + 3  # timers go by the same time
    life.die()
    assert isinstance(verify(segments(tmp_path)), Verified)


def test_a_changed_configuration_is_the_next_revision(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.stop()
    life = life.next()
    assert life.revision == 1
    life.stop()
    config = deployment(tenants=(TenantSpec(name="new"),))
    life = life.next(config=config)
    assert life.revision == life.driver.revision == 2
    assert not life.refused("new")
    life.stop()
    assert [event.revision for event in of(tmp_path, ConfigChanged)] == [1, 2]
    assert [event.epoch for event in of(tmp_path, Restarted)] == [1, 2]
    assert isinstance(verify(segments(tmp_path)), Verified)


@pytest.mark.parametrize("end", [Life.die, Life.stop])
def test_a_policy_that_was_changed_goes_on_until_the_file_changes(
    tmp_path: Path, end: Callable[[Life], object]
) -> None:
    life = Life(tmp_path)
    changed = replace(life.told, admission=replace(life.told.admission, margin_ms=80.0))
    life.driver.reconfigure(changed, 2, digest(life.told))
    for _ in range(2):
        end(life)
        life = life.next()
        assert (life.config, life.revision, life.driver.revision) == (changed, 2, 2)
        assert life.driver.plane.settings.config == changed
    end(life)
    told = deployment(tenants=(TenantSpec(name="new"),))
    for _ in range(2):
        life = life.next(config=told)
        assert (life.config, life.revision) == (told, 3)
        assert not life.refused("new")
        end(life)
    life = life.next()
    assert (life.config, life.revision) == (life.told, 4), "the old file is a change as well"
    end(life)
    assert [event.revision for event in of(tmp_path, ConfigChanged)] == [1, 2, 3, 4]
    assert isinstance(verify(segments(tmp_path)), Verified)


def test_a_journal_of_a_process_that_noted_no_file_has_the_files_policy(tmp_path: Path) -> None:
    life = Life(tmp_path)
    changed = replace(life.told, admission=replace(life.told.admission, margin_ms=80.0))
    life.driver.reconfigure(changed, 2)
    life.stop()
    life = life.next()
    assert (life.config, life.revision) == (life.told, 3)
    life.stop()


def damage(path: Path, change: Callable[[Checkpoint], Checkpoint]) -> None:
    head, *rest = frames(path.read_bytes())
    assert isinstance(head, Checkpoint)
    path.write_bytes(b"".join(map(frame_bytes, [change(head), *rest])))


def unthawable(head: Checkpoint) -> Checkpoint:
    return replace(head, state=b"\xc1")


def of_another_version(head: Checkpoint) -> Checkpoint:
    return replace(head, version=99)


@pytest.mark.parametrize("change", [unthawable, of_another_version])
def test_what_cannot_be_read_is_told_and_the_start_is_fresh(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Checkpoint], Checkpoint]
) -> None:
    life = Life(tmp_path)
    assert not life.refused()
    assert life.engine.calls
    life.die()
    (path,) = segment_paths(tmp_path)
    damage(path, change)
    second = life.next()
    assert second.past.unread == 1
    assert len(caplog.records) == 2
    assert "is passed over" in caplog.messages[0]
    assert "budgets start afresh" in caplog.messages[1]
    assert not second.refused()
    assert second.driver.revision == 1
    second.die()
    kept = list(segment_paths(tmp_path))
    assert isinstance(verify([kept[1].read_bytes()]), Verified)
    ids = [
        frame.event.request.id
        for path in kept
        for frame in frames(path.read_bytes())
        if isinstance(frame, Record) and isinstance(frame.event, RequestArrived)
    ]
    assert len(ids) == len(set(ids)) == 2


def test_an_older_segment_is_better_than_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(tmp_path)
    assert not life.refused()
    state = life.die()
    second = life.next()
    second.die()
    damage(segment_paths(tmp_path)[-1], of_another_version)
    third = second.next()
    assert third.states[0] == state
    assert (third.past.unread, third.past.epoch) == (1, 2)
    assert third.refused()
    assert len(caplog.records) == 1
    third.die()


def test_a_state_that_breaks_the_plane_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def without_replicas(head: Checkpoint) -> Checkpoint:
        plane = Plane.thaw(head.state)
        assert plane.state.live
        plane.state.models.clear()
        return replace(head, state=plane.freeze())

    life = Life(tmp_path)
    assert not life.refused()
    life.driver.unrecord()
    state = life.die()
    damage(segment_paths(tmp_path)[-1], without_replicas)
    second = life.next()
    assert second.past.unread == 1
    assert "breaks the plane" in caplog.text
    assert second.states[0] == state
    assert second.refused()
    second.die()


def test_a_record_that_does_not_follow_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(tmp_path)
    life.offer()
    life.die()
    (path,) = segment_paths(tmp_path)
    *most, last = frames(path.read_bytes())
    assert isinstance(last, Record)
    path.write_bytes(b"".join(map(frame_bytes, [*most, replace(last, digest=b"other")])))
    second = life.next()
    assert second.states[0] == life.states[-2]
    assert "replays to other effects" in caplog.text
    second.die()


def test_without_a_journal_there_is_no_past() -> None:
    clock = DatedClock(Turns(7.0), WALL_NS)
    past = recall(None, clock, deployment())
    assert (past.epoch, past.first_id, past.revision(deployment())) == (0, 0, 1)
    assert clock.now() == 7 * NS_PER_S


def test_no_two_engines_of_any_life_have_one_incarnation() -> None:
    given = Settings(
        deployment=deployment(replicas=3),
        keys=keys(),
        server=ServerSpec(),
        upstreams=tuple(UpstreamSpec(url=f"http://h:{nth}", pool="q") for nth in (1, 2)),
    )

    async def found() -> list[tuple[str, int]]:
        clock = LoopClock(asyncio.get_running_loop())
        both = [*engines(given, clock), *engines(given, clock, 1 << 40)]
        return [(engine.name, engine.incarnation) for engine in both]

    seen = asyncio.run(found())
    assert len({incarnation for _, incarnation in seen}) == len(seen) == 10
    for (name, before), (same, after) in zip(seen[:5], seen[5:], strict=True):
        assert name == same
        assert after > before + (1 << 20)


# The lock ----------------------------------------------------------------------------------------


def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    first = HeldJournal(folder)
    with pytest.raises(OSError, match="another process keeps its journal here") as refused:
        HeldJournal(folder)
    assert refused.value.filename == str(folder)
    first.close()
    second = HeldJournal(folder)
    with pytest.raises(OSError, match="another process"):
        first.reopen()
    second.close()
    second.close()
    first.reopen()
    first.close()


def test_a_file_system_without_locks_keeps_a_journal_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_file: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    HeldJournal(tmp_path).close()


def test_what_was_dropped_is_counted_over_all_openings(tmp_path: Path) -> None:
    kept = HeldJournal(tmp_path)
    kept.put(b"\x00\x00\x00\x00", opens=False)
    kept.close()
    kept.reopen()
    kept.put(b"\x00\x00\x00\x00", opens=False)
    assert kept.dropped == 2
    kept.close()


# Any life ----------------------------------------------------------------------------------------


class Lives(RuleBasedStateMachine):
    """Processes that live and die on one journal."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = TemporaryDirectory()
        self.folder = Path(self.kept.name) / "journal"
        self.life = Life(self.folder, segment_bytes=4_000)
        self.ids: set[int] = set()
        self.open: list[Stream] = []

    def teardown(self) -> None:
        self.life.stop()
        assert isinstance(verify(segments(self.folder)), Verified)
        arrived = [event.request.id for event in of(self.folder, RequestArrived)]
        assert len(arrived) == len(set(arrived))
        ups = [event.incarnation for event in of(self.folder, ReplicaUp)]
        assert ups == sorted(set(ups))
        self.kept.cleanup()

    @rule(tenant=st.sampled_from(["free", "slow", "single"]), tokens=st.integers(1, 5_000))
    def ask(self, tenant: str, tokens: int) -> None:
        stream = self.life.offer(tenant, tokens)
        assert stream.request.id not in self.ids
        self.ids.add(stream.request.id)
        if not stream.ended:
            self.open.append(stream)

    @precondition(lambda self: self.life.driver._flights)
    @rule(words=st.integers(1, 20), over=st.booleans())
    def answer(self, words: int, over: bool) -> None:
        attempt = next(iter(self.life.driver._flights))
        self.life.engine.say("word " * words, attempt)
        if over:
            self.life.engine.end(attempt)

    @precondition(lambda self: self.open)
    @rule()
    def leave(self) -> None:
        self.life.driver.leave(self.open.pop().request.id)

    @rule(ms=st.integers(1, 20_000))
    def wait(self, ms: int) -> None:
        self.life.turns.wait(ms / 1_000)

    @rule(cut=st.just(0) | st.integers(1, 5_000), away_ms=st.integers(-5_000, 90_000))
    def die(self, cut: int, away_ms: int) -> None:
        state = self.life.die(cut)
        before = Plane.thaw(state).state
        self._next(state, away_ms)
        mine = self.life.past.plane.state
        assert mine.now >= before.now
        for tenant, by_class in before.accounts.tallies.items():
            for name, tally in by_class.items():
                now = mine.accounts.tallies[tenant][name]
                assert (now.offered, now.admitted) == (tally.offered, tally.admitted)
                assert sum(now.outcomes.values()) == tally.admitted
        assert not mine.live
        assert not mine.ledger.holds

    @rule(away_ms=st.integers(0, 90_000))
    def stop(self, away_ms: int) -> None:
        state = self.life.stop()
        self._next(state, away_ms)
        assert self.life.past.unread == 0

    def _next(self, state: bytes, away_ms: int) -> None:
        self.open.clear()
        self.life = self.life.next(away_ms * NS_PER_MS, segment_bytes=4_000)
        assert self.life.states[0] == state

    @invariant()
    def whole(self) -> None:
        assert self.life.driver.broken is None


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
