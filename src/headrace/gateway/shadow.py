"""What would another configuration have decided? A second plane, fed with what happens to the real one.

It sees every event after the real plane took it, at the same instant. Attempts are the one thing
that must be translated: what an engine tells of the real attempt at a request is told the shadow of
its own attempt at it. So a request that only the shadow admits ends there at once, one that still
waits there when it is really over has left, and one that the shadow sends after its first token was
really made has that token at once. Nothing the shadow wants done is done.

Whatever it fails with stops the shadow and nothing else. It knows no more requests than are live.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from headrace.gateway.differences import ADMIT, Differences, Pair, Side
from headrace.model.decision import LetIn
from headrace.model.effect import Concluded, Decided, Dispatch, Effect, Fail
from headrace.model.event import (
    CallerLeft,
    ConfigChanged,
    Ended,
    Event,
    FirstToken,
    ProgressTick,
    ReplicaDown,
    RequestArrived,
    ShutDown,
    TimerDue,
)
from headrace.model.evidence import DecisionRecord, EntryRecord
from headrace.model.ids import AttemptId, RequestId
from headrace.model.meter import NO_STREAM
from headrace.plane.core import Plane
from headrace.policy.catalog import PlaneConfig, canonical
from headrace.units import DurationNs, InstantNs

_log = logging.getLogger(__name__)


class Beside(Struct, frozen=True, kw_only=True):
    """What a gateway is to have decided beside its own plane."""

    config: PlaneConfig
    name: str
    """Where that configuration stands, for people."""
    observed: bool = False
    """It is the gateway's own configuration, while all may pass: its decisions are the ones to log."""
    shown: bool = False
    """Answers tell in a header what it decided."""
    log: Path | None = None
    """File for requests that the two treat differently."""


class Shadow:
    """A plane that decides beside the real one and is never obeyed."""

    def __init__(
        self,
        config: PlaneConfig,
        *,
        revision: int = 1,
        decided: Callable[[DecisionRecord], None] | None = None,
        differing: Callable[[Pair], None] | None = None,
    ) -> None:
        """Decide by `config`, which stands whatever the real plane is told to change.

        `decided` gets each of its decisions, `differing` each request that is over and that the two
        treated differently.
        """
        self.plane = Plane()
        self.found = Differences()
        self.broken: Exception | None = None
        """What it failed with; it decides nothing any more."""
        self._first: ConfigChanged | None = ConfigChanged(
            revision=revision, config=canonical(config)
        )
        self._decided, self._differing = decided, differing
        self._pairs: dict[RequestId, Pair] = {}
        self._attempts: dict[AttemptId, Pair] = {}

    @property
    def known(self) -> int:
        """Requests it keeps anything of: never more than are live."""
        return max(len(self._pairs), len(self._attempts), len(self.plane.state.live))

    def saw(self, event: Event, effects: Sequence[Effect], now: InstantNs) -> None:
        """Take an event that the real plane has handled, with what that wanted done."""
        if self.broken is not None:
            return
        try:
            if self._first is not None:
                self._tell(self._first, now)
                self._first = None
            self._note_real(effects, now)
            self._follow(event, now)
            for effect in effects:
                if isinstance(effect, Concluded):
                    self._close(effect, now)
        except Exception as error:  # noqa: BLE001 - our bug, whatever it is: the real plane goes on
            self._break(error, event)

    def next_timer(self) -> InstantNs | None:
        """Return when `wake` has something to do next, or None."""
        if self.broken is not None:
            return None
        try:
            return self.plane.next_timer()
        except Exception as error:  # noqa: BLE001 - as above
            self._break(error, None)
            return None

    def wake(self, now: InstantNs) -> None:
        """Do what time alone makes due."""
        when = self.next_timer()
        if when is None or when > now:
            return
        try:
            self._tell(TimerDue(), now)
        except Exception as error:  # noqa: BLE001 - as above
            self._break(error, None)

    def verdict(self, request: RequestId) -> str | None:
        """Return what it decided about a live request, for a header: `admit` or `reject:REASON`."""
        pair = self._pairs.get(request)
        if pair is None:
            return None
        decided = pair.shadow.verdict
        return decided if decided == ADMIT else f"reject:{decided}"

    # The real plane ---------------------------------------------------------------------------

    def _note_real(self, effects: Sequence[Effect], now: InstantNs) -> None:
        """Keep what the real plane did."""
        for effect in effects:
            if isinstance(effect, Decided) and isinstance(effect.record, EntryRecord):
                record = effect.record
                self._pairs[record.request_id] = Pair(
                    request=record.request_id,
                    tenant=record.tenant,
                    slo_class=record.tenant_class,
                    at=now,
                    real=Side(),
                    shadow=Side(),
                )
            pair = self._of(effect)
            if pair is not None:
                _note(pair, pair.real, effect, now)
                if isinstance(effect, Dispatch):
                    self._attempts[effect.attempt] = pair

    def _of(self, effect: Effect) -> Pair | None:
        """Return the request that an effect is about."""
        match effect:
            case Decided(record):
                return self._pairs.get(record.request_id)
            case Dispatch() | Fail():
                return self._pairs.get(effect.request)
            case _:
                return None

    # The shadow -------------------------------------------------------------------------------

    def _follow(self, event: Event, now: InstantNs) -> None:
        """Tell the shadow of what happened, in its own terms."""
        match event:
            case ConfigChanged():
                pass  # it has its own, and keeps it
            case RequestArrived(request):
                self._tell(event, now)
                self._compare(request.id, now)
            case CallerLeft() | ShutDown():
                self._leave(event, now)
            case FirstToken(attempt):
                self._begin(attempt, now)
            case ProgressTick(moved):
                all_moved = ((self._mine(attempt), made) for attempt, made in moved)
                told = tuple((one, made) for one, made in all_moved if one is not None)
                self._tell(ProgressTick(told), now)
            case Ended():
                if (mine := self._mine(event.attempt)) is not None:
                    self._tell(replace(event, attempt=mine), now)
            case ReplicaDown():
                shown = ((self._mine(attempt), timing) for attempt, timing in event.timings)
                known = tuple((one, timing) for one, timing in shown if one is not None)
                self._tell(replace(event, timings=known), now)
            case _:
                self._tell(event, now)

    def _tell(self, event: Event, now: InstantNs) -> None:
        """Have the shadow take an event, and what follows from it at once."""
        events = deque([event])
        while events:
            for effect in self.plane.handle(events.popleft(), now=now):
                if isinstance(effect, Decided) and self._decided is not None:
                    self._decided(effect.record)
                pair = self._of(effect)
                if pair is None:
                    continue
                _note(pair, pair.shadow, effect, now)
                if isinstance(effect, Dispatch) and pair.begun:
                    events.append(FirstToken(effect.attempt))

    def _mine(self, attempt: AttemptId) -> AttemptId | None:
        """Return the shadow's attempt that stands for a real one, if it has sent the request."""
        pair = self._attempts.get(attempt)
        return None if pair is None else pair.shadow.attempt

    def _compare(self, request: RequestId, now: InstantNs) -> None:
        """Count both decisions; what only the shadow admits has nobody to tell how it goes on."""
        pair = self._pairs[request]
        self.found.decided(pair)
        if pair.shadow.verdict == ADMIT != pair.real.verdict:
            self._leave(CallerLeft(request), now)

    def _begin(self, attempt: AttemptId, now: InstantNs) -> None:
        pair = self._attempts.get(attempt)
        if pair is None:
            return
        pair.begun = True
        if pair.shadow.attempt is not None:
            self._tell(FirstToken(pair.shadow.attempt), now)

    def _leave(self, event: CallerLeft | ShutDown, now: InstantNs) -> None:
        if event.request in self.plane.state.live:
            self._tell(event, now)

    def _close(self, row: Concluded, now: InstantNs) -> None:
        """End in the shadow what is really over, and forget it."""
        self._leave(CallerLeft(row.request, row.timing or NO_STREAM), now)
        pair = self._pairs.pop(row.request, None)
        if pair is None:
            return
        if pair.real.attempt is not None:
            self._attempts.pop(pair.real.attempt, None)
        self.found.concluded(pair)
        if pair.differs and self._differing is not None:
            self._differing(pair)

    def _break(self, error: Exception, event: Event | None) -> None:
        """Stop for good; what was counted stays."""
        self.broken = error
        self._pairs.clear()
        self._attempts.clear()
        self.plane = Plane()
        _log.error("the shadow stopped, on %r; nothing else did", event, exc_info=error)


def _note(pair: Pair, side: Side, effect: Effect, now: InstantNs) -> None:
    """Keep what one of the planes did with a request."""
    match effect:
        case Decided(EntryRecord() as record):
            side.decision = record.decision_id
            decision = record.decision
            side.verdict = ADMIT if isinstance(decision, LetIn) else decision.reason.value
        case Dispatch():
            side.attempt, side.replica = effect.attempt, effect.replica
            side.wait_ns = DurationNs(now - pair.at)
        case Fail():
            side.failed = effect.reason
        case _:
            pass
