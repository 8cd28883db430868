"""In which order did it happen, and was anything missed? The sequence numbers of one publisher.

A number left out is a gap: what was missed is asked for where that can be had, and else nothing that was
known counts any more. A number that comes again, or a lower one, is another life of the engine, whose
cache began empty. One that restarts unheard may go on as if nothing were: so what is asked for, after a
gap or a broken connection, begins with the last batch that was heard, and that must be the same.

Does no I/O: the subscriber hands over what came, and is told what to ask for.
"""

from collections import deque
from collections.abc import Callable
from enum import StrEnum
from hashlib import blake2b

from msgspec import Struct

from headrace.adapters.engines.kv.events import Cleared, MalformedError, Removed, Stored, read
from headrace.adapters.engines.kv.index import BlockIndex
from headrace.units import MIB

HELD, HELD_BYTES = 4_096, 64 * MIB
"""Messages, and bytes of them, that wait at most for what is asked for; beyond, it is given up. 4,096: a
minute of steps."""
_MARK_BYTES = 16


class Reset(StrEnum):
    """Why what was known of a cache counts no more."""

    CLEARED = "cleared"
    """The engine emptied it."""
    RESTARTED = "restarted"
    """The engine counts anew."""
    LOST = "lost"
    """What happened to it was not heard, or not understood."""


class Counts(Struct):
    """What was heard of one engine since we listen."""

    stored: int = 0
    """Blocks that entered."""
    removed: int = 0
    """Blocks that left."""
    gaps: int = 0
    """Times that something was missed, though it may have been had later."""
    malformed: int = 0
    """Messages that could not be read."""
    unknown: int = 0
    """Events of kinds that are not known here."""
    resets: dict[Reset, int] = {}


class Follower:
    """Follows one publisher; `index` holds what it told."""

    def __init__(
        self,
        index: BlockIndex,
        forgot: Callable[[Reset], None],
        ask: Callable[[int], None] | None = None,
    ) -> None:
        """Hear nothing yet. `forgot` is called after each reset.

        `ask` asks for what was published from a number on, and forgets what it asked before; what comes
        is handed to `replayed`, then `replay_over` is called, whatever happened. None: it cannot be had.
        """
        self.index, self.counts = index, Counts()
        self._forgot, self._ask = forgot, ask
        self._live: int | None = None  # the last number heard live, of this life
        self._applied: int | None = None  # up to here it is in the index
        self._mark = b""  # of the batch applied last
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes = 0
        self._asking = self._unproven = self._blind = self._quiet = False
        self._broken = False

    def heard(self, number: int, payload: bytes) -> None:
        """Take what was published just now."""
        if not self._asking:
            self._take(number, payload)
            return
        self._held.append((number, payload))
        self._held_bytes += len(payload)
        if len(self._held) > HELD or self._held_bytes > HELD_BYTES:
            self.replay_over()

    def interrupted(self) -> None:
        """The connection broke: who is behind the next one may be another."""
        if not self._asking:
            self._broken = True
            return
        self._asking, self._held_bytes = False, 0
        self._held.clear()  # of one life or two: nobody can say
        self._forget(Reset.LOST)
        self._quiet = False

    def replayed(self, number: int, payload: bytes) -> None:
        """Take what was asked for, in order."""
        if not self._asking:
            return
        if self._unproven:
            self._unproven = False
            if number != self._applied:
                self._forget(Reset.LOST)  # it goes back no further
            elif _mark(payload) != self._mark:
                self._forget(Reset.RESTARTED)
                self._question(0)
                return
        if self._applied is not None:
            if number <= self._applied:
                return
            if number > self._applied + 1:
                self._forget(Reset.LOST)
        self._apply(number, payload)

    def replay_over(self) -> None:
        """Go on with what is live: what was asked for has come, or does not come."""
        if not self._asking:
            return
        self._asking = False
        first = self._held[0][0]
        if self._applied is not None and self._applied < first - 1:
            self._forget(Reset.LOST)
        self._quiet, self._held_bytes = False, 0
        if self._applied is None:
            self._applied = first - 1
        while self._held and not self._asking:
            self._take(*self._held.popleft())

    def begin_anew(self) -> None:
        """Forget everything, quietly: the engine is gone, and who comes next is another."""
        self._start_over()
        self._held.clear()
        self._asking = self._quiet = False
        self.index.clear()

    def _take(self, number: int, payload: bytes) -> None:
        if self._live is not None and number <= self._live:
            self._forget(Reset.RESTARTED)
        if self._applied is None:
            if number and self._ask is not None:
                self._catch_up(0, number, payload)
                return
            self._apply(number, payload)
        elif number > self._applied + 1 or self._broken:
            self._broken = False
            self.counts.gaps += number > self._applied + 1
            if self._ask is not None:
                self._unproven = True
                self._catch_up(self._applied, number, payload)
                return
            self._forget(Reset.LOST)
            self._apply(number, payload)
        elif number > self._applied:
            self._apply(number, payload)
        self._live = number

    def _catch_up(self, start: int, number: int, payload: bytes) -> None:
        """Keep a message until what was published before it is there."""
        self._held.appendleft((number, payload))
        self._asking = True
        self._question(start)

    def _question(self, start: int) -> None:
        """Ask; what happened before we listened to this life is history, and nobody's news."""
        assert self._ask is not None
        self._quiet = not self._unproven
        self._ask(start)

    def _apply(self, number: int, payload: bytes) -> None:
        self._applied, self._mark = number, _mark(payload)
        counts = Counts() if self._quiet else self.counts
        try:
            batch = read(payload)
        except MalformedError:
            counts.malformed += 1
            if not self._blind:
                self._blind = True
                self._drop(Reset.LOST)
            return
        self._blind = False
        counts.unknown += batch.unknown
        for event in batch.events:
            match event:
                case Stored():
                    counts.stored += self.index.store(event)
                case Removed():
                    counts.removed += self.index.remove(event)
                case Cleared():
                    self._drop(Reset.CLEARED)

    def _forget(self, reset: Reset) -> None:
        """Drop what is known, and begin anew with whatever comes."""
        self._start_over()
        self._drop(reset)

    def _start_over(self) -> None:
        self._applied = self._live = None
        self._unproven = self._blind = self._broken = False

    def _drop(self, reset: Reset) -> None:
        self.index.clear()
        if self._quiet:
            return
        self.counts.resets[reset] = self.counts.resets.get(reset, 0) + 1
        self._forgot(reset)


def _mark(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=_MARK_BYTES).digest()
