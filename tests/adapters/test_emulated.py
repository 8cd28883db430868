"""The emulated engine in real time: its own planned instants, however late it is woken."""

from collections.abc import Callable

import pytest

from headrace.adapters.engines.answer import Order, drawn_length, lengths, text
from headrace.adapters.engines.emulated import DELIVERY_NS, EmulatedEngine, Made
from headrace.model.effect import Dispatch
from headrace.model.engine import Snapshot
from headrace.model.ids import (
    AttemptId,
    ClassName,
    DecisionId,
    Incarnation,
    ModelName,
    PoolName,
    ReplicaName,
    RequestId,
    TenantId,
)
from headrace.model.request import Request
from headrace.model.slo import Outcome
from headrace.policy.batching.chunked import ChunkedPrefill
from headrace.ports.clock import Timer
from headrace.ports.engine import Finish
from headrace.replica.core import Replica
from headrace.replica.job import Finished, Job
from headrace.units import NS_PER_MS, NS_PER_S, DurationNs, InstantNs, Tokens
from tests.gateway.scenes import PROFILE


class LateClock:
    """A clock that the test moves; calls come `late_ns` after they are due."""

    def __init__(self, late_ns: int = 0) -> None:
        self._now, self.late_ns = 0, late_ns
        self.creeps = False
        """Whether time passes with each look at it, as it does."""
        self._calls: list[tuple[int, Callable[[], None]]] = []
        self.woken = 0

    def now(self) -> InstantNs:
        self._now += 1_000 * self.creeps
        return InstantNs(self._now)

    def wall(self) -> int:
        return 0

    def call_at(self, when: InstantNs, callback: Callable[[], None]) -> Timer:
        entry = (when, callback)
        self._calls.append(entry)

        class Entry:
            def cancel(_self) -> None:  # noqa: N805
                if entry in self._calls:
                    self._calls.remove(entry)

        return Entry()

    def run(self, until: int) -> None:
        """Make all calls due by `until`, in order."""
        while self._calls:
            entry = min(self._calls, key=lambda one: one[0])
            at = max(self._now, entry[0] + self.late_ns)
            if at > until:
                break
            self._calls.remove(entry)
            self._now = at
            self.woken += 1
            entry[1]()
        self._now = max(self._now, until)

    @property
    def idle(self) -> bool:
        return not self._calls


class Ear:
    """A listener that keeps what it hears, and when."""

    def __init__(self, clock: LateClock) -> None:
        self._clock = clock
        self.pieces: list[tuple[int, AttemptId, str, int]] = []
        self.endings: dict[AttemptId, Made] = {}
        self.ended_at: dict[AttemptId, int] = {}
        self.reports: list[Snapshot] = []

    def produced(self, attempt: AttemptId, text: str, tokens: int) -> None:
        assert attempt not in self.endings
        self.pieces.append((self._clock.now(), attempt, text, tokens))

    def ended(self, attempt: AttemptId, made: Made) -> None:
        assert attempt not in self.endings
        self.endings[attempt] = made
        self.ended_at[attempt] = self._clock.now()

    def reported(self, snapshot: Snapshot) -> None:
        self.reports.append(snapshot)

    def tokens(self, attempt: int) -> int:
        return sum(count for _, who, _, count in self.pieces if who == attempt)

    def text(self, attempt: int) -> str:
        return "".join(said for _, who, said, _ in self.pieces if who == attempt)


def replica() -> Replica:
    return Replica(ReplicaName("p-0"), Incarnation(1), PROFILE, ChunkedPrefill())


def call(nth: int, *, prompt: int = 500, output: int = 40, limit: int = 1_000) -> Order:
    return Order(
        dispatch=Dispatch(
            request=RequestId(nth),
            attempt=AttemptId(nth),
            decision=DecisionId(nth),
            replica=ReplicaName("p-0"),
            incarnation=Incarnation(1),
            output_limit=Tokens(limit),
            tenant=TenantId("t"),
            slo_class=ClassName("c"),
            deadline=InstantNs(NS_PER_S),
            relegated=False,
            way=(),
            counters=(),
            gap_ns=DurationNs(80 * NS_PER_MS),
        ),
        request=Request(
            id=RequestId(nth),
            tenant=TenantId("t"),
            model=ModelName("m"),
            input_tokens=Tokens(prompt),
        ),
        replay_output=Tokens(output),
    )


def engine(late_ms: float = 0) -> tuple[EmulatedEngine, LateClock, Ear]:
    clock = LateClock(round(late_ms * NS_PER_MS))
    made = EmulatedEngine(replica(), PoolName("p"), clock, lengths(0))
    ear = Ear(clock)
    made.connect(ear)
    return made, clock, ear


def planned(*jobs: tuple[int, int, int]) -> dict[int, Finished]:
    """Return how (prompt, output, at) end in the pure engine, by number from 1."""
    pure = replica()
    for nth, (prompt, output, at) in enumerate(jobs, 1):
        pure.submit(
            Job(
                attempt=AttemptId(nth),
                prompt_tokens=Tokens(prompt),
                output_tokens=Tokens(output),
                gap_bound_ns=DurationNs(80 * NS_PER_MS),
                tenant=TenantId("t"),
                deadline=InstantNs(NS_PER_S),
            ),
            InstantNs(at),
        )
    ended = pure.advance(InstantNs(100 * NS_PER_S))
    return {done.attempt: done for done in ended if isinstance(done, Finished)}


@pytest.mark.parametrize("late_ms", [0, 0.7, 35, 400])
def test_a_late_wake_up_delays_delivery_and_nothing_else(late_ms: float) -> None:
    made, clock, ear = engine(late_ms)
    made.submit(call(1))
    clock.run(30 * NS_PER_MS)
    made.submit(call(2, prompt=700, output=60))
    clock.run(20 * NS_PER_S)
    expected = planned((500, 40, 0), (700, 60, 30 * NS_PER_MS))
    for nth, done in expected.items():
        ending = ear.endings[AttemptId(nth)]
        assert (ending.outcome, ending.finish) == (Outcome.SUCCESS, Finish.STOP)
        assert (ending.usage, ending.timing) == (done.usage, done.timing)
        assert done.timing.last_at is not None
        late = ear.ended_at[AttemptId(nth)] - done.timing.last_at
        assert 0 <= late <= clock.late_ns
        assert ear.tokens(nth) == done.usage.output_tokens
        assert ear.text(nth) == text(AttemptId(nth), 0, done.usage.output_tokens)
    assert clock.idle, "an idle engine wakes nobody"


def test_the_first_token_comes_at_its_instant_and_the_rest_in_small_pieces() -> None:
    made, clock, ear = engine()
    made.submit(call(1, output=100))
    clock.run(20 * NS_PER_S)
    timing = ear.endings[AttemptId(1)].timing
    at, _, _, count = ear.pieces[0]
    assert (at, count) == (timing.first_at, 1)
    between = [at for at, *_ in ear.pieces[1:-1]]
    assert all(at % DELIVERY_NS == 0 for at in between)
    assert len(between) > 10
    assert ear.pieces[-1][0] == timing.last_at
    assert clock.woken < 100, "not woken for every step"


def test_time_goes_on_while_a_listener_submits() -> None:
    made, clock, ear = engine()
    clock.creeps = True
    produced, nth = ear.produced, iter(range(2, 30))

    def and_ask_again(attempt: AttemptId, text: str, tokens: int) -> None:
        produced(attempt, text, tokens)
        if (another := next(nth, None)) is not None:
            made.submit(call(another))

    ear.produced = and_ask_again  # type: ignore[method-assign]
    made.submit(call(1))
    clock.run(20 * NS_PER_S)
    assert sorted(ear.endings) == list(range(1, 30))
    assert all(ear.tokens(one) == 40 for one in range(1, 30))


def test_an_aborted_attempt_is_not_heard_of_again_and_frees_its_place() -> None:
    made, clock, ear = engine()
    made.submit(call(1, output=10_000, limit=20_000))
    made.submit(call(2, output=10_000, limit=20_000))
    clock.run(500 * NS_PER_MS)
    heard = len(ear.pieces)
    assert ear.tokens(1)
    made.abort(AttemptId(1))
    made.abort(AttemptId(2))
    made.abort(AttemptId(3))
    clock.run(2 * NS_PER_S)
    assert len(ear.pieces) == heard
    assert not ear.endings
    made.poll()
    assert (ear.reports[-1].running, ear.reports[-1].waiting) == (0, 0)
    assert ear.reports[-1].kv_blocks_used == 0
    assert clock.idle


def test_what_never_fits_ends_with_an_error() -> None:
    made, clock, ear = engine()
    made.submit(call(1, prompt=PROFILE.kv_capacity_tokens + 1, output=1))
    ending = ear.endings[AttemptId(1)]
    assert (ending.outcome, ending.usage, ending.timing.tokens) == (Outcome.ERROR, None, 0)
    clock.run(NS_PER_S)
    assert clock.idle


def test_an_output_limit_cuts_and_says_so() -> None:
    made, clock, ear = engine()
    made.submit(call(1, output=50, limit=7))
    clock.run(NS_PER_S)
    ending = ear.endings[AttemptId(1)]
    assert ending.usage is not None
    assert (ending.usage.output_tokens, ending.finish) == (7, Finish.LENGTH)


def test_a_closed_engine_is_silent() -> None:
    made, clock, ear = engine()
    made.submit(call(1))
    made.close()
    clock.run(NS_PER_S)
    assert not ear.pieces
    assert not ear.endings


def test_a_length_is_drawn_from_seed_and_request() -> None:
    drawn = [drawn_length(7, RequestId(nth)) for nth in range(2_000)]
    assert drawn == [drawn_length(7, RequestId(nth)) for nth in range(2_000)]
    assert drawn != [drawn_length(8, RequestId(nth)) for nth in range(2_000)]
    assert 250 < sum(drawn) / len(drawn) < 290
    assert len(set(drawn)) == 16


def test_a_text_is_the_same_in_any_pieces() -> None:
    whole = text(AttemptId(3), 0, 100)
    assert whole == text(AttemptId(3), 0, 1) + text(AttemptId(3), 1, 60) + text(
        AttemptId(3), 60, 100
    )
    assert len(whole.split()) == 100
