"""The emulated replicas of a run, and what their driver knows to be running on them.

Brings replicas up and down, hands them jobs and keeps their next events planned. What the plane is
told of it, and what goes wrong when, is the world's.
"""

from collections.abc import Callable, Iterator
from itertools import count

from msgspec import Struct

from headrace.model.deployment import PoolSpec
from headrace.model.effect import Dispatch
from headrace.model.engine import Snapshot, Yielded
from headrace.model.event import Ended, Event, FirstToken
from headrace.model.ids import AttemptId, Incarnation, PoolName, ReplicaName, RequestId
from headrace.model.ladder import Lesser
from headrace.model.meter import NO_STREAM, StreamTiming
from headrace.model.profile import Profile
from headrace.model.slo import Outcome
from headrace.replica.core import Replica
from headrace.replica.job import Finished, FirstTokenMade, Job
from headrace.replica.rules import Rules
from headrace.report.run import Victim
from headrace.sim.agenda import Agenda, Kind
from headrace.sim.faults import Slow
from headrace.sim.scenario import Scenario
from headrace.trace.row import TraceRow
from headrace.trace.streams import stream
from headrace.units import MICRO, InstantNs, Tokens

NO_CHUNK = Tokens(512)
"""What a job without a prefix says of the size of its chunks; nothing depends on it."""


class EngineTotals(Struct, frozen=True, kw_only=True, gc=False):
    """What one life of an engine did."""

    busy_ns: int
    steps: int
    prefill_tokens: int
    output_tokens: int
    preemptions: int
    queried: int
    hit: int
    yielded: Yielded


class Node(Struct):
    """One replica's place: it may be up, and in which life."""

    name: ReplicaName
    pool: PoolName
    declared: Profile
    """What the plane believes; how fast it really is, its engine knows."""
    engine: Replica | None = None
    planned: InstantNs | None = None
    """The engine event that counts; others in the agenda are stale."""
    up_since: InstantNs = InstantNs(0)
    up_ns: int = 0
    past: list[EngineTotals] = []

    def retire(self, now: InstantNs) -> None:
        """End a life and keep what it did."""
        engine = self.engine
        assert engine is not None, f"{self.name} is down"
        engine.fail(now)
        totals, report = engine.totals(now), engine.report(now)
        self.past.append(
            EngineTotals(
                busy_ns=totals.busy_ps // 1_000,
                steps=totals.steps,
                prefill_tokens=totals.prompt_tokens_computed,
                output_tokens=totals.tokens_made,
                preemptions=totals.preemptions,
                queried=report.prefix_tokens_queried or 0,
                hit=report.prefix_tokens_hit or 0,
                yielded=engine.yielded(now),
            )
        )
        self.up_ns += now - self.up_since
        self.engine, self.planned = None, None


class Engines:
    """All replicas of a run, up or down."""

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        agenda: Agenda[object],
        tell: Callable[[Event], None],
        *,
        fast_forward: bool,
        rules: Rules,
    ) -> None:
        """Lay out a scenario's replicas, all down; `tell` hears of first tokens and endings."""
        self._scenario, self._seed, self._agenda, self._tell = scenario, seed, agenda, tell
        self._fast_forward, self._rules = fast_forward, rules
        self._incarnations = count(1)
        self.nodes = [
            Node(name=ReplicaName(name), pool=PoolName(pool), declared=profile)
            for name, pool, profile in _places(scenario)
        ]
        self.slower: dict[ReplicaName, float] = {}
        """How many times as long each step takes of those that are slow in every life."""
        self._at = {node.name: at for at, node in enumerate(self.nodes)}
        self.victims: dict[RequestId, Victim] = {}
        """Requests that gave way."""
        self._requests: dict[AttemptId, RequestId] = {}
        self.attempts: dict[AttemptId, Incarnation] = {}
        """Attempts whose end the driver has not seen, with the life each was sent to."""
        self._shown: dict[AttemptId, StreamTiming] = {}
        """Of these, what the streams showed that a crash ended and nobody was told of."""

    def _real(self, at: int, now: InstantNs) -> Profile:
        """Return how fast a replica really is now."""
        node = self.nodes[at]
        profile = node.declared
        if node.name in self.slower:
            profile = profile.paced(self.slower[node.name])
        for fault in self._scenario.faults:
            if isinstance(fault, Slow) and fault.holds(at, now):
                profile = profile.paced(fault.factor)
        return profile

    def pace(self, now: InstantNs) -> None:
        """Have every replica be as fast as it is from now on."""
        for at, node in enumerate(self.nodes):
            profile = self._real(at, now)
            if node.engine is not None and node.engine.profile != profile:
                node.engine.reprice(profile, now)
                self._plan(at)

    def cool(self, now: InstantNs) -> None:
        """Have every replica drop the prefixes that nothing runs on."""
        for at, node in enumerate(self.nodes):
            if node.engine is not None:
                node.engine.forget_prefixes(now)
                self._plan(at)

    def add(self, name: ReplicaName, pool: PoolSpec) -> int:
        """Return where a replica is that was not there before, down; one that was is where it was."""
        at = self._at.get(name)
        if at is None:
            at = self._at[name] = len(self.nodes)
            self.nodes.append(Node(name=name, pool=PoolName(pool.name), declared=pool.profile))
        return at

    def at(self, name: ReplicaName) -> int | None:
        """Return where a replica is; None: there never was one of that name."""
        return self._at.get(name)

    def start(self, at: int, now: InstantNs) -> Incarnation:
        """Bring a replica up in a new life."""
        node = self.nodes[at]
        incarnation = Incarnation(next(self._incarnations))
        node.engine = Replica(
            node.name,
            incarnation,
            self._real(at, now),
            self._scenario.batching,
            ordering=self._scenario.engine_ordering,
            noise_seed=stream(self._seed, "noise", at, incarnation).getrandbits(62),
            noise_ppm=round(self._scenario.noise_percent * MICRO / 100),
            fast_forward=self._fast_forward,
            offers=self._scenario.preemption,
            rules=self._rules,
        )
        node.up_since, node.planned = now, None
        return incarnation

    def running(self, at: int) -> bool:
        """Return whether anything runs on a replica, as far as its driver knows."""
        engine = self.nodes[at].engine
        return engine is not None and engine.incarnation in self.attempts.values()

    def alive(self) -> Iterator[tuple[Node, Replica]]:
        """Yield the replicas that are up."""
        for node in self.nodes:
            if node.engine is not None:
                yield node, node.engine

    def submit(self, effect: Dispatch, row: TraceRow, now: InstantNs) -> None:
        """Send a request with its true length; a life that is over swallows it unanswered."""
        at = self._at[effect.replica]
        engine = self.nodes[at].engine
        self.attempts[effect.attempt] = effect.incarnation
        self._requests[effect.attempt] = effect.request
        if engine is None or engine.incarnation != effect.incarnation:
            return  # it died unnoticed: the driver hears of that soon
        prompt, prefix = prompt_of(row, effect.lesser)
        job = Job(
            attempt=effect.attempt,
            prompt_tokens=prompt,
            output_tokens=Tokens(min(row.output_tokens, effect.output_limit)),
            prefix=prefix,
            prefix_tokens=Tokens(row.prefix_tokens or NO_CHUNK),
            gap_bound_ns=effect.gap_ns,
            tenant=effect.tenant,
            deadline=effect.deadline,
            relegated=effect.relegated,
            way=effect.way,
            counters=effect.counters,
        )
        refused = engine.submit(job, now)
        assert refused is None, f"the plane sent what {effect.replica} cannot hold: {refused}"
        self._plan(at)

    def stop(self, attempt: AttemptId, now: InstantNs) -> StreamTiming:
        """Stop an attempt, unless it is over, and return what its stream had shown by then.

        It stays on the driver's list until its end is told or asked for.
        """
        life = self.attempts.get(attempt)
        for at, node in enumerate(self.nodes):
            engine = node.engine
            if engine is not None and engine.incarnation == life:
                finished = engine.abort(attempt, now)
                self._plan(at)
                return self._ended(finished)
        return self._shown.get(attempt, NO_STREAM)

    def _ended(self, finished: Finished | None) -> StreamTiming:
        """Note whether an attempt that is over ever gave way; return what its stream had shown."""
        if finished is None:
            return NO_STREAM
        request = self._requests.pop(finished.attempt)
        if finished.preemptions:
            self.victims[request] = Victim(
                request=request, times=finished.preemptions, paused_ns=finished.paused_ns
            )
        return finished.timing

    def drop(self, attempt: AttemptId) -> None:
        """Take an attempt off the driver's list."""
        self.attempts.pop(attempt, None)
        self._requests.pop(attempt, None)
        self._shown.pop(attempt, None)

    def crash(self, at: int, now: InstantNs) -> list[AttemptId]:
        """End a life without a word; return the attempts lost with it, oldest first."""
        node = self.nodes[at]
        engine = node.engine
        assert engine is not None, f"{node.name} is down"
        lost = [a for a, life in self.attempts.items() if life == engine.incarnation]
        for attempt in lost:
            self._shown[attempt] = self._ended(engine.abort(attempt, now))
        node.retire(now)
        return lost

    def shown(self, incarnation: Incarnation) -> tuple[tuple[AttemptId, StreamTiming], ...]:
        """Return what the streams that a life took with it had shown, as far as any did."""
        return tuple(
            (attempt, self._shown[attempt])
            for attempt, life in self.attempts.items()
            if life == incarnation and attempt in self._shown
        )

    def cut(self, now: InstantNs) -> None:
        """Stop all attempts: whoever sent them is gone."""
        for at, node in enumerate(self.nodes):
            if node.engine is not None:
                for attempt in self.attempts:
                    node.engine.abort(attempt, now)
                self._plan(at)
        self.attempts.clear()
        self._shown.clear()

    def advance(self, at: int, event: object, now: InstantNs) -> None:
        """Tell what a replica has done by now, if this is the event that was planned for it."""
        node = self.nodes[at]
        engine = node.engine
        if engine is None or node.planned != now or event != engine.incarnation:
            return  # planned anew meanwhile
        node.planned = None
        for done in engine.advance(now):
            if isinstance(done, FirstTokenMade):
                self._tell(FirstToken(done.attempt))
            else:
                self.attempts.pop(done.attempt, None)
                self._ended(done)
                self._tell(
                    Ended(
                        attempt=done.attempt,
                        outcome=Outcome.SUCCESS,
                        usage=done.usage,
                        timing=done.timing,
                    )
                )
        self._plan(at)

    def progress(self, now: InstantNs) -> tuple[tuple[AttemptId, int], ...]:
        """Return the tokens made of all streams that moved since the last call."""
        moved: list[tuple[AttemptId, int]] = []
        for _, engine in self.alive():
            moved += engine.progress(now)
        return tuple(moved)

    def report(self, at: int, incarnation: object, now: InstantNs) -> Snapshot | None:
        """Return a replica's report of itself; None if that life is over."""
        engine = self.nodes[at].engine
        if engine is None or engine.incarnation != incarnation:
            return None
        return engine.report(now)

    def forget(self, incarnation: Incarnation) -> None:
        """A life is known to be over: nothing more is heard of what was sent to it."""
        for attempt in [a for a, life in self.attempts.items() if life == incarnation]:
            self.drop(attempt)

    def retire(self, now: InstantNs) -> None:
        """End every life."""
        for node, _ in self.alive():
            node.retire(now)

    def _plan(self, at: int) -> None:
        """Plan a replica's next event, unless that is planned already."""
        node = self.nodes[at]
        if node.engine is None:
            return
        when = node.engine.next_event()
        if when is not None and when != node.planned:
            node.planned = when
            self._agenda.push(when, Kind.ENGINE, at, node.engine.incarnation)


def prompt_of(row: TraceRow, lesser: Lesser | None) -> tuple[Tokens, tuple[int, ...]]:
    """Return a prompt's tokens and leading chunks as they are sent: without what is left out of it."""
    if lesser is None or lesser.kept is None or lesser.kept >= len(row.optional):
        return row.input_tokens, row.prefix
    left = Tokens(row.input_tokens - sum(row.optional[lesser.kept :]))
    return left, row.prefix[: kept_chunks(row)]


def kept_chunks(row: TraceRow) -> int:
    """Return how many whole leading chunks stand before all that is optional."""
    if not row.prefix_tokens:
        return 0
    return min(len(row.prefix), (row.input_tokens - sum(row.optional)) // row.prefix_tokens)


def _places(scenario: Scenario) -> Iterator[tuple[str, str, Profile]]:
    """Yield (replica, pool, profile as declared) of every replica."""
    window = scenario.deployment.window
    for pool in map(window.stepped, scenario.deployment.pools):
        for nth in range(pool.replicas):
            yield f"{pool.name}-{nth}", pool.name, pool.profile
