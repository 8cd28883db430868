"""The order of what was published: gaps, what is asked for again, other lives, what cannot be read."""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.adapters.engines.kv.follower import HELD, HELD_BYTES, Follower, Reset
from headrace.adapters.engines.kv.index import BlockIndex
from tests.adapters.kv.scenes import CLEARED, batch, prompt, removed, store, stored


class Scene:
    """A follower, what it asked for and what it told."""

    def __init__(self, *, replays: bool = True) -> None:
        self.asked: list[int] = []
        self.resets: list[Reset] = []
        self.index = BlockIndex(b"k")
        ask = self.asked.append if replays else None
        self.follower = Follower(self.index, self.resets.append, ask)

    def holds(self, *prompts: int) -> bool:
        """Return whether it knows these prompts of one block, and no other block."""
        found = all(self.index.cached_tokens(prompt(nth, 1)) for nth in prompts)
        return found and len(self.index) == len(prompts)

    def hear(self, *numbers: int) -> "Scene":
        """Have it hear live batches, each storing the prompt of its number."""
        for number in numbers:
            self.follower.heard(number, batch(store(number)))
        return self

    def answer(self, *numbers: int, life: float = 1.0) -> "Scene":
        """Have what it asked for come, in full."""
        for number in numbers:
            self.follower.replayed(number, batch(store(number), at=life))
        self.follower.replay_over()
        return self


@pytest.mark.parametrize("replays", [False, True])
def test_batches_in_order_are_taken_at_once(replays: bool) -> None:
    scene = Scene(replays=replays).hear(0, 1, 2)
    assert scene.holds(0, 1, 2)
    scene.follower.heard(3, batch(removed(100), store(5)))
    assert scene.holds(0, 2, 5)
    counts = scene.follower.counts
    assert (counts.stored, counts.removed, counts.gaps) == (4, 1, 0)
    assert not scene.resets
    assert not scene.asked


def test_a_gap_is_filled_by_what_is_asked_for_and_nothing_is_forgotten() -> None:
    scene = Scene().hear(0, 1, 4, 5)
    assert scene.asked == [1], "from the last one heard: it must be the same"
    assert scene.holds(0, 1)
    scene.answer(1, 2, 3, 4).hear(6)
    assert scene.holds(0, 1, 2, 3, 4, 5, 6)
    assert scene.follower.counts.gaps == 1
    assert not scene.resets
    assert scene.follower.counts.stored == 7, "none twice"


def test_a_gap_that_cannot_be_filled_leaves_only_what_came_after() -> None:
    scene = Scene(replays=False).hear(0, 1, 4)
    assert scene.resets == [Reset.LOST]
    assert scene.holds(4)
    assert scene.hear(5).holds(4, 5)


@pytest.mark.parametrize("answer", [(), (1,), (1, 2), (3, 4), (1, 3, 4), (4,)], ids=str)
def test_a_gap_filled_in_part_is_not_filled(answer: tuple[int, ...]) -> None:
    scene = Scene().hear(0, 1, 4).answer(*answer)
    assert scene.resets == [Reset.LOST]
    assert scene.holds(*{nth for nth in answer if nth > 2} | {4})
    assert scene.hear(5).index.cached_tokens(prompt(5, 1))


def test_an_engine_that_was_there_before_is_asked_for_what_it_told_then() -> None:
    scene = Scene().hear(7)
    assert scene.asked == [0]
    scene.answer(5, 6, 7, 8).hear(8, 9)
    assert scene.holds(5, 6, 7, 8, 9)
    assert not scene.resets
    assert not scene.follower.counts.gaps
    scene = Scene().hear(7).answer()
    assert scene.holds(7)
    assert not scene.resets
    scene = Scene(replays=False).hear(7, 8)
    assert scene.holds(7, 8)


def test_a_hole_in_the_past_makes_what_came_before_it_doubtful() -> None:
    scene = Scene().hear(7).answer(2, 3, 5, 6)
    assert scene.holds(5, 6, 7)
    assert not scene.resets
    scene = Scene().hear(7).answer(2, 3)
    assert scene.holds(7)


def test_what_happened_before_we_listened_is_no_news() -> None:
    scene = Scene().hear(3)
    for number, payload in ((0, batch(store(0), CLEARED, store(1))), (1, b"nonsense")):
        scene.follower.replayed(number, payload)
    scene.follower.replayed(2, batch(store(2, 2), removed(201), {"type": "New"}))
    scene.follower.replay_over()
    assert scene.holds(2, 3)
    assert not scene.resets
    counts = scene.follower.counts
    assert (counts.stored, counts.removed, counts.malformed, counts.unknown) == (1, 0, 0, 0)
    scene.follower.heard(4, batch(CLEARED))
    assert scene.resets == [Reset.CLEARED]


def test_what_was_missed_while_we_listened_is_news_though_it_comes_late() -> None:
    scene = Scene().hear(0, 3)
    for number, payload in ((0, batch(store(0))), (1, batch(CLEARED, store(1))), (2, batch())):
        scene.follower.replayed(number, payload)
    scene.follower.replay_over()
    assert scene.holds(1, 3)
    assert scene.resets == [Reset.CLEARED]
    assert scene.follower.counts.stored == 3


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_number_that_comes_again_is_another_life(number: int) -> None:
    scene = Scene(replays=False).hear(0, 1, 2)
    scene.follower.heard(number, batch(store(9)))
    assert scene.resets == [Reset.RESTARTED]
    assert scene.holds(9)
    scene = Scene().hear(0, 1, 2)
    scene.follower.heard(number, batch(store(9), at=2.0))
    assert scene.resets == [Reset.RESTARTED]
    assert scene.asked == [0] * bool(number)


def test_a_life_that_began_unheard_is_found_by_what_it_tells_instead() -> None:
    scene = Scene().hear(0, 1)
    scene.follower.heard(4, batch(store(4), at=2.0))
    scene.follower.replayed(1, batch(store(1), at=2.0))
    assert scene.resets == [Reset.RESTARTED]
    assert scene.asked == [1, 0]
    scene.answer(0, 1, 2, 3, 4, life=2.0)
    assert scene.holds(0, 1, 2, 3, 4)
    assert scene.resets == [Reset.RESTARTED]


def test_a_cache_that_was_emptied_is_told_in_order() -> None:
    scene = Scene().hear(0)
    scene.follower.heard(1, batch(store(1), CLEARED, store(2)))
    assert scene.holds(2)
    assert scene.resets == [Reset.CLEARED]
    assert scene.follower.counts.resets == {Reset.CLEARED: 1}


def test_what_cannot_be_read_leaves_nothing_certain_and_is_told_once() -> None:
    scene = Scene(replays=False).hear(0)
    for number in (1, 2, 3):
        scene.follower.heard(number, b"nonsense")
    assert len(scene.index) == 0
    assert scene.resets == [Reset.LOST]
    assert scene.follower.counts.malformed == 3
    assert scene.hear(4).holds(4)
    scene.follower.heard(5, b"")
    assert scene.resets == [Reset.LOST] * 2


def test_unknown_events_are_counted_and_change_nothing() -> None:
    scene = Scene().hear(0)
    scene.follower.heard(1, batch({"type": "Moved"}, store(1)))
    assert scene.holds(0, 1)
    assert scene.follower.counts.unknown == 1


def test_an_answer_that_never_ends_is_given_up() -> None:
    scene = Scene().hear(0, 2)
    scene.hear(*range(3, HELD + 2))
    assert len(scene.index) == 1
    scene.hear(HELD + 2)
    assert scene.resets == [Reset.LOST]
    assert len(scene.index) == HELD + 1
    scene.follower.replayed(0, batch(store(9_999)))  # too late
    assert not scene.index.cached_tokens(prompt(9_999, 1))


def test_what_waits_for_an_answer_is_bounded_in_bytes_too() -> None:
    scene = Scene().hear(0, 2)
    large = b"\xc1" * (HELD_BYTES // 4)
    for number in range(3, 7):
        scene.follower.heard(number, large)
        assert not scene.resets, "it waits"
    scene.follower.heard(7, large)
    assert scene.resets[0] is Reset.LOST


def test_an_engine_that_is_gone_is_forgotten_quietly() -> None:
    scene = Scene().hear(0, 1, 3)
    scene.follower.begin_anew()
    assert len(scene.index) == 0
    scene.answer(1, 2).hear(0)
    assert scene.holds(0)
    assert not scene.resets


LOST = st.sampled_from((False, False, False, True))


class Publisher(RuleBasedStateMachine):
    """An engine in several lives, on a line that loses batches, and what a follower makes of it."""

    @initialize(replays=st.sampled_from((True, True, False)), kept=st.sampled_from((2, 50)))
    def begin(self, replays: bool, kept: int) -> None:
        self.scene = Scene(replays=replays)
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self.held: set[int] = set()
        self.number = self.name = self.stamp = 0
        self.settled = False

    def _publish(self, events: list[object], *, lost: bool) -> None:
        self.stamp += 1
        number, payload = self.number, batch(*events, at=float(self.stamp))
        self.number += 1
        self.kept.append((number, payload))
        follower = self.scene.follower
        self.settled = not lost
        if not lost:
            follower.heard(number, payload)

    @rule(blocks=st.integers(1, 2), lost=LOST)
    def store(self, blocks: int, lost: bool) -> None:
        names = list(range(self.name, self.name + blocks))
        self.name += blocks
        self.held.update(names)
        self._publish([stored(names, prompt(names[0], blocks)[:-1])], lost=lost)

    @precondition(lambda self: self.held)
    @rule(nth=st.integers(0, 9), lost=LOST)
    def evict(self, nth: int, lost: bool) -> None:
        gone = sorted(self.held)[nth % len(self.held)]
        self.held.discard(gone)
        self._publish([removed(gone)], lost=lost)

    @rule(lost=LOST)
    def clear(self, lost: bool) -> None:
        self.held.clear()
        self._publish([CLEARED], lost=lost)

    @rule()
    def restart(self) -> None:
        self.held.clear()
        self.kept.clear()
        self.number, self.settled = 0, False
        self.scene.follower.interrupted()

    @rule()
    def blink(self) -> None:
        """Have the connection break, and nothing else."""
        self.scene.follower.interrupted()

    @precondition(lambda self: self.scene.asked)
    @rule(dropped=st.sampled_from((None, None, 0, 1, 2)), silent=LOST)
    def answer(self, dropped: int | None, silent: bool) -> None:
        """Answer the last question, or say nothing until patience is over."""
        follower, asked = self.scene.follower, self.scene.asked
        while asked:
            start = asked.pop()
            asked.clear()
            told = [one for one in self.kept if one[0] >= start]
            for nth, (number, payload) in enumerate(told):
                if nth != dropped and not silent and not asked:
                    follower.replayed(number, payload)
            if not asked:
                follower.replay_over()

    @invariant()
    def nothing_is_believed_that_is_gone(self) -> None:
        if hasattr(self, "scene") and self.settled and not self.scene.follower._asking:
            assert set(self.scene.index._digests) <= self.held
        if hasattr(self, "scene"):
            assert self.scene.follower._asking >= bool(self.scene.follower._held)


Publisher.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestPublisher = Publisher.TestCase
