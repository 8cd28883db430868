"""Which attempts do engines have, what have they made, and when must their first tokens have come?"""

from collections.abc import Iterator
from heapq import heappop, heappush

from msgspec import Struct

from headrace.gateway.stream import Stream
from headrace.model.ids import AttemptId
from headrace.model.meter import NO_STREAM, Meter, StreamTiming
from headrace.ports.engine import EngineClient
from headrace.units import InstantNs


class Flight(Struct):
    """An attempt that an engine has."""

    stream: Stream
    engine: EngineClient
    meter: Meter
    """What the engine noted: for ends of which no engine tells."""
    told: int = 0
    """Tokens of it that the plane was, or at the next tick will be, told of."""


class Flights:
    """The attempts under way."""

    def __init__(self) -> None:
        """Begin with none."""
        self._all: dict[AttemptId, Flight] = {}
        self._moved: dict[AttemptId, int] = {}
        self._guesses: list[tuple[InstantNs, AttemptId]] = []
        """A heap; those of attempts that are over by then say nothing."""
        self.get = self._all.get

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._all)

    def __iter__(self) -> Iterator[AttemptId]:
        """Yield them, the oldest first."""
        return iter(self._all)

    def start(self, attempt: AttemptId, flight: Flight, guess: InstantNs | None) -> None:
        """Know an attempt from here on.

        `guess`: when its first token is taken to have come, where the engine tells of none before the
        whole answer.
        """
        self._all[attempt] = flight
        if guess is not None:
            heappush(self._guesses, (guess, attempt))

    def forget(self, attempt: AttemptId) -> Flight | None:
        """Know an attempt no more."""
        self._moved.pop(attempt, None)
        return self._all.pop(attempt, None)

    def count(self, attempt: AttemptId, flight: Flight) -> bool:
        """Note what an attempt has made by now; return whether it had made nothing before."""
        first = not flight.told
        flight.told = self._moved[attempt] = flight.meter.tokens
        return first

    def moved(self) -> tuple[tuple[AttemptId, int], ...]:
        """Return (attempt, tokens) of those that moved since this was asked last."""
        moved = tuple(self._moved.items())
        self._moved.clear()
        return moved

    def shown(self, attempt: AttemptId | None) -> StreamTiming:
        """Return what an attempt has shown so far; None: there is none."""
        flight = None if attempt is None else self._all.get(attempt)
        return NO_STREAM if flight is None else flight.meter.timing()

    def shown_by(self, engine: EngineClient) -> tuple[tuple[AttemptId, StreamTiming], ...]:
        """Return what the attempts of an engine have shown."""
        return tuple(
            (attempt, flight.meter.timing())
            for attempt, flight in self._all.items()
            if flight.engine is engine
        )

    # First tokens that nobody tells ---------------------------------------------------------------

    @property
    def next_guess(self) -> InstantNs | None:
        """When the next first token is taken to have come."""
        return self._guesses[0][0] if self._guesses else None

    def guessed(self, now: InstantNs) -> AttemptId | None:
        """Return an attempt whose first token is taken to have come by now, once; None: no more."""
        while self._guesses and self._guesses[0][0] <= now:
            attempt = heappop(self._guesses)[1]
            flight = self._all.get(attempt)
            if flight is not None and not flight.told:
                flight.told = 1
                return attempt
        return None

    def guess_no_more(self) -> None:
        """Take nothing for come any more."""
        self._guesses.clear()
