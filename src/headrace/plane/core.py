"""The whole surface of the plane: what happened goes in, what shall be done comes out.

Time is an argument and never runs backwards. Same events, same instants, same configuration: same
effects, to the byte. An event that the plane did not expect (late, twice, unknown) is counted and
has no effect; a state that cannot be is an assertion, and the driver stops on it.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from headrace.model.effect import Effect
from headrace.model.event import (
    CallerLeft,
    ConfigChanged,
    Ended,
    Event,
    FirstToken,
    GroupsListed,
    GroupTold,
    Migrated,
    ProgressTick,
    ReplicaDown,
    ReplicaDraining,
    ReplicaForgot,
    ReplicaReported,
    ReplicaUp,
    RequestArrived,
    RequestDeferred,
    Restarted,
    ScaleFrozen,
    ShutDown,
    TimerDue,
    WallTold,
)
from headrace.model.evidence import ReplicaView
from headrace.model.request import Request
from headrace.plane import (
    degrade,
    dispatch,
    entry,
    groups,
    handover,
    migrate,
    reconfigure,
    scaler,
    streams,
)
from headrace.plane.machine import NOT_SURVEYED, Machine, Resolved
from headrace.plane.outlook import Outlook, outlook
from headrace.plane.quote import Quote, quote
from headrace.plane.state import Live, PlaneState
from headrace.units import InstantNs

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(PlaneState)


class Plane:
    """A deterministic control plane: `handle`, `handle_timer`, `next_timer`."""

    def __init__(self, state: PlaneState | None = None) -> None:
        """Start empty, or from a thawed state."""
        self._machine = Machine(PlaneState() if state is None else state)
        self._steps: dict[type, Callable[[Any, InstantNs], None]] = {
            ConfigChanged: self._config_changed,
            RequestArrived: self._arrived,
            RequestDeferred: self._deferred,
            CallerLeft: self._left,
            ShutDown: self._shut_down,
            FirstToken: self._first_token,
            ProgressTick: self._tick,
            Ended: self._ended,
            ReplicaUp: self._up,
            ReplicaDown: self._down,
            ReplicaDraining: self._draining,
            Migrated: self._migrated,
            ReplicaReported: self._reported,
            ReplicaForgot: self._forgot,
            GroupTold: self._group_told,
            GroupsListed: self._groups_listed,
            ScaleFrozen: self._scale_frozen,
            WallTold: self._wall_told,
            TimerDue: self._timer,
            Restarted: self._restarted,
        }

    @property
    def state(self) -> PlaneState:
        """Everything it knows; to be read by checkers and reports, never written from outside."""
        return self._machine.state

    @property
    def settings(self) -> Resolved:
        """The configuration it decides by now, as it looks things up; from the first event on."""
        return self._machine.settings

    def handle(self, event: Event, *, now: InstantNs) -> list[Effect]:
        """Take one event at `now` and return what shall be done, in order."""
        machine = self._machine
        state = machine.state
        assert now >= state.now, f"clock ran backwards: {state.now=} {now=}"
        state.now = now
        out: list[Effect] = []
        machine.out = out
        machine.surveyed = NOT_SURVEYED
        self._steps[type(event)](event, now)
        if state.leaving:
            groups.leave(machine, now)
        return out

    def handle_timer(self, *, now: InstantNs) -> list[Effect]:
        """Do whatever is due at `now`."""
        return self.handle(TimerDue(), now=now)

    def next_timer(self) -> InstantNs | None:
        """Return when `handle_timer` has something to do next, or None."""
        best = scaler.next_change(self._machine)
        for known in self._machine.state.models.values():
            listed = known.backlog.next_change()
            waiting = known.held and known.backlog.size
            decays = known.pace.next_change() if waiting else None
            for when in (listed, decays, degrade.next_look(known)):
                if when is not None and (best is None or when < best):
                    best = when
        return best

    def freeze(self) -> bytes:
        """Return the whole state in canonical bytes."""
        return _ENCODER.encode(self._machine.state)

    def views_for(self, live: Live, now: InstantNs) -> list[ReplicaView]:
        """Return every replica that serves a live request's class, as routing would see it."""
        return dispatch.all_views(self._machine, live, now)

    def quote(self, request: Request) -> Quote:
        """Return what the configuration says of a request that does not arrive yet; changes nothing."""
        return quote(self._machine, request)

    def outlook(self, request: Request) -> Outlook:
        """Return in what form a request would be served now; no event, no decision."""
        return outlook(self._machine, request)

    @classmethod
    def thaw(cls, content: bytes) -> "Plane":
        """Return a plane that goes on exactly where `freeze` was called."""
        return cls(_DECODER.decode(content))

    def _config_changed(self, event: ConfigChanged, now: InstantNs) -> None:
        reconfigure.change(self._machine, event, now)

    def _arrived(self, event: RequestArrived, now: InstantNs) -> None:
        machine = self._machine
        model = entry.arrive(machine, event.request, now)
        if model is not None:
            dispatch.run(machine, model, machine.state.models[model], now)

    def _deferred(self, event: RequestDeferred, now: InstantNs) -> None:
        handover.put_aside(self._machine, event.request, now)

    def _left(self, event: CallerLeft, now: InstantNs) -> None:
        streams.caller_left(self._machine, event, now)

    def _shut_down(self, event: ShutDown, now: InstantNs) -> None:
        streams.shut_down(self._machine, event, now)

    def _first_token(self, event: FirstToken, now: InstantNs) -> None:
        streams.first_token(self._machine, event.attempt, now)

    def _tick(self, event: ProgressTick, now: InstantNs) -> None:
        streams.progress(self._machine, event, now)
        migrate.go_on(self._machine, now)

    def _ended(self, event: Ended, now: InstantNs) -> None:
        streams.ended(self._machine, event, now)

    def _up(self, event: ReplicaUp, now: InstantNs) -> None:
        streams.replica_up(self._machine, event, now)

    def _down(self, event: ReplicaDown, now: InstantNs) -> None:
        streams.replica_down(self._machine, event, now)

    def _draining(self, event: ReplicaDraining, now: InstantNs) -> None:
        streams.replica_draining(self._machine, event, now)

    def _migrated(self, event: Migrated, now: InstantNs) -> None:
        migrate.migrated(self._machine, event, now)

    def _reported(self, event: ReplicaReported, now: InstantNs) -> None:
        streams.reported(self._machine, event.snapshot, now)

    def _forgot(self, event: ReplicaForgot, now: InstantNs) -> None:  # noqa: ARG002
        streams.replica_forgot(self._machine, event)

    def _group_told(self, event: GroupTold, now: InstantNs) -> None:
        groups.told(self._machine, event, now)

    def _groups_listed(self, event: GroupsListed, now: InstantNs) -> None:
        groups.listed(self._machine, event, now)

    def _scale_frozen(self, event: ScaleFrozen, now: InstantNs) -> None:  # noqa: ARG002
        scaler.freeze(self._machine, frozen=event.frozen)

    def _wall_told(self, event: WallTold, now: InstantNs) -> None:
        scaler.wall(self._machine, event.wall_s, now)

    def _timer(self, event: TimerDue, now: InstantNs) -> None:  # noqa: ARG002
        machine = self._machine
        degrade.again(machine, now)
        scaler.due(machine, now)
        for model, known in machine.state.models.items():
            dispatch.lapse(machine, model, known, now)
            dispatch.run(machine, model, known, now)

    def _restarted(self, event: Restarted, now: InstantNs) -> None:
        streams.restarted(self._machine, event, now)
        degrade.again(self._machine, now)  # time has passed since the checkpoint
        scaler.restarted(self._machine, now)
