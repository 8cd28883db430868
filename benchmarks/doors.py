"""What stands before an engine in place of a control plane: limits by count and rate, and one forecast.

One emulated engine, first come first served, behind a door that lets a request in or not. Limits on
requests inside, on those that wait, and on prompt tokens a second: what gateways ship, each with a
setting that fits one load. Also the predictive door of the published comparison, which
sees the engine a second late, for the calibration. No tenants, no plane.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from msgspec import Struct

from benchmarks.engines import Engine
from headrace.model.ids import AttemptId, TenantId
from headrace.replica.core import Replica
from headrace.replica.job import Finished, FirstTokenMade, Job
from headrace.sim.faults import Repeaters
from headrace.trace.row import TraceRow
from headrace.trace.streams import stream
from headrace.units import NS_PER_S, InstantNs, later, seconds

TTFT_NS, TPOT_NS = seconds(2.0), seconds(0.06)
"""Bounds of every request here: first token, and the mean time of each one after it."""


class Seat(Struct):
    """One request that was let in."""

    row: int
    at: InstantNs
    given: int
    """Prompt tokens."""
    made: int = 0
    """Tokens of its answer, when somebody last looked."""


class Room(Struct):
    """What a door may look at: the engine as it is now."""

    engine: Replica
    seats: dict[AttemptId, Seat] = {}
    waiting: int = 0
    """Let in and without a first token."""

    @property
    def inside(self) -> int:
        """Return how many were let in and have not ended."""
        return len(self.seats)


Door = Callable[[TraceRow, InstantNs, Room], bool]


class Tried(Struct, kw_only=True):
    """What became of each row: whether it was let in, at which instant, and whether it met its bounds."""

    admitted: list[bool]
    met: list[bool]
    tries: int = 0


def stand(
    engine: Engine,
    rows: Sequence[TraceRow],
    door: Door,
    *,
    repeaters: Repeaters | None = None,
    seed: int = 0,
) -> Tried:
    """Run a trace through a door into an idle engine, to the end of all work."""
    room = Room(engine.start())
    found = Tried(admitted=[False] * len(rows), met=[False] * len(rows))
    due: list[tuple[InstantNs, int, int]] = [(row.at, nth, 1) for nth, row in enumerate(rows)]
    due.reverse()
    again: list[tuple[InstantNs, int, int]] = []
    while due or again or room.seats:
        step = room.engine.next_event()
        source = again if again and (not due or again[0] < due[-1]) else due
        coming = (again[0] if source is again else due[-1]) if source else None
        if coming is None or (step is not None and step <= coming[0]):
            assert step is not None, "somebody is inside"
            for event in room.engine.advance(step):
                _note(room, found, event)
            continue
        now, nth, tried = heappop(again) if source is again else due.pop()
        found.tries += 1
        if door(rows[nth], now, room):
            _let_in(room, rows[nth], nth, now, AttemptId(found.tries))
            found.admitted[nth] = True
        elif repeaters is not None and tried <= repeaters.times:
            wait = repeaters.delay_ns(tried, None, stream(seed, "again", nth, tried))
            heappush(again, (later(now, wait), nth, tried + 1))
    return found


def _let_in(room: Room, row: TraceRow, nth: int, now: InstantNs, attempt: AttemptId) -> None:
    job = Job(
        attempt=attempt,
        prompt_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        gap_bound_ns=TPOT_NS,
        tenant=row.tenant or TenantId(""),
        deadline=later(now, TTFT_NS),
    )
    refused = room.engine.submit(job, now)
    assert refused is None, f"{refused=}"
    room.seats[attempt] = Seat(nth, now, row.input_tokens)
    room.waiting += 1


def _note(room: Room, found: Tried, event: FirstTokenMade | Finished) -> None:
    if isinstance(event, FirstTokenMade):
        room.waiting -= 1
        return
    seat, timing = room.seats.pop(event.attempt), event.timing
    assert timing.first_at is not None
    assert timing.last_at is not None
    gaps = timing.last_at - timing.first_at
    in_time = timing.first_at - seat.at <= TTFT_NS
    found.met[seat.row] = in_time and gaps <= TPOT_NS * (timing.tokens - 1)


# Doors -----------------------------------------------------------------------------------------------


def open_door() -> Door:
    """Let everybody in."""
    return lambda _row, _now, _room: True


def inside_below(limit: int) -> Door:
    """Let in while fewer than so many requests are inside: a concurrency cap."""
    return lambda _row, _now, room: room.inside < limit


def waiting_below(limit: int) -> Door:
    """Let in while fewer than so many wait for their first token: a queue cap."""
    return lambda _row, _now, room: room.waiting < limit


def bucket(rate: float, size: float) -> Door:
    """Let in by prompt tokens: so many a second, and at most `size` at once."""
    level, at = size, 0

    def door(row: TraceRow, now: InstantNs, _room: Room) -> bool:
        nonlocal level, at
        level = min(size, level + (now - at) * rate / NS_PER_S)
        at = now
        if level < row.input_tokens:
            return False
        level -= row.input_tokens
        return True

    return door


class Forecast:
    """The predictive door of the published comparison, on what the engine said a second ago.

    `local` adds what was let in since and takes off what must have been computed.
    """

    DRAIN = 7_000
    """Prompt tokens that an engine computes in a second."""

    def __init__(self, engine: Engine, *, local: bool) -> None:
        self._profile, self._local = engine.profile, local
        self._capacity = engine.rules.capacity
        self._at = -NS_PER_S
        self._told = self._since = (0, 0, 0)

    def __call__(self, row: TraceRow, now: InstantNs, room: Room) -> bool:
        """Return whether the prompts before it, the pool and the step leave room for one more."""
        if now - self._at >= NS_PER_S:
            self._at, self._told, self._since = now, _state(room, now), (0, 0, 0)
        given = row.input_tokens
        backlog, streams, context = self._told
        if self._local:
            tokens, count, held = self._since
            drained = (now - self._at) * self.DRAIN // NS_PER_S
            backlog, streams, context = (
                max(0, backlog + tokens - drained),
                streams + count,
                context + held,
            )
        chunk = max(32, 512 - streams)
        step_ms = self._step_ms(chunk, streams, context)
        ok = (
            (backlog + given) * step_ms / chunk <= 1_400
            and context + 100 * (streams + 1) + given < 0.95 * self._capacity
            and self._step_ms(chunk, streams + 1, context) <= 60
        )
        if ok:
            tokens, count, held = self._since
            self._since = tokens + given, count + 1, held + given
        return ok

    def _step_ms(self, chunk: int, streams: int, context: int) -> float:
        return self._profile.costs.step_ps(streams, context, chunk, chunk * chunk) / 1e9


def _state(room: Room, now: InstantNs) -> tuple[int, int, int]:
    """Return prompt tokens to compute, requests inside, and the context of those that stream."""
    for attempt, made in room.engine.progress(now):
        room.seats[attempt].made = made
    context = sum(seat.given + seat.made for seat in room.seats.values() if seat.made)
    return room.engine.report(now).waiting_prefill_tokens or 0, room.inside, context
