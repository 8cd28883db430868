"""vLLM's waiting queue, in the order of our line.

vLLM looks at the first in line, allocates for it, and takes it out; or takes it out, puts it by, and puts
it back at the end of the step. A fault of ours in the midst of that would leave its books torn, so that
none gets out: the queue then goes on in vLLM's own order, and tells its owner.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from headrace.adapters.vllm_plugin.guests import EngineRequest, Guest, Guests
from headrace.units import InstantNs

NONE: Mapping[str, int] = MappingProxyType({})


class OwnQueue(Protocol):
    """vLLM's request queue, as far as it is used."""

    def add_request(self, request: EngineRequest) -> None:
        """Put a request where it belongs."""
        ...

    def prepend_request(self, request: EngineRequest) -> None:
        """Put a request back."""
        ...

    def peek_request(self) -> EngineRequest:
        """Return the first."""
        ...

    def pop_request(self) -> EngineRequest:
        """Take the first."""
        ...

    def remove_requests(self, requests: Iterable[EngineRequest]) -> None:
        """Take out those of them that are there."""
        ...


class Queue(Protocol):
    """What is asked of who waits, beside the turns."""

    @property
    def tokens(self) -> int:
        """To compute, of all that wait."""
        ...

    def in_line(self) -> Iterator[Guest]:
        """Yield who waits in the order of the turns, as far as that is known."""
        ...

    def account(self, tokens: Mapping[str, int] = NONE) -> None:
        """Charge whoever was taken out last, if it got its slot; `tokens` of its step count as computed."""
        ...


class Looked:
    """vLLM's own waiting queue, looked at only."""

    def __init__(self, guests: Guests, scheduler: Any) -> None:
        """Look at a scheduler's."""
        self._guests, self._scheduler = guests, scheduler

    @property
    def tokens(self) -> int:
        """To compute, of all that wait."""
        return sum(one.num_tokens for one in self._scheduler.waiting)

    def in_line(self) -> Iterator[Guest]:
        """Yield who waits in vLLM's order."""
        known = (self._guests.get(one.request_id) for one in self._scheduler.waiting)
        return (guest for guest in known if guest is not None)

    def account(self, tokens: Mapping[str, int] = NONE) -> None:
        """Do nothing: nobody's turn hangs on it."""


class Ordered:
    """Waiting requests in the order of our line; those without metadata in vLLM's among each other."""

    def __init__(
        self,
        guests: Guests,
        own: OwnQueue,
        now: Callable[[], InstantNs],
        runs: Callable[[EngineRequest], bool],
    ) -> None:
        """Start empty.

        `own`: an empty queue of vLLM's; `now`: the instant of the present step; `runs`: whether a
        request has a slot.
        """
        self._guests, self._own, self._now, self._runs = guests, own, now, runs
        self._waiting: dict[int, Guest] = {}
        self._sizes: dict[int, int] = {}
        self._numbers: dict[
            str, int
        ] = {}  # of requests that wait, also of those that vLLM has freed already
        self._head: Guest | None = None
        self._popped: Guest | None = None
        self._settled_at: InstantNs | None = None
        self.tokens = 0
        """To compute, of all that wait."""

    def add(self, request: EngineRequest, *, again: bool) -> None:
        """Let a request wait, for the first time or once more."""
        guest = self._known(request)
        request.priority = guest.own_priority  # which was raised if it is giving way
        self.account()
        self._guests.settle()
        self._guests.stop(guest)
        # What was in flight as it gave way may still add to it.
        self._waiting[guest.n], self._sizes[guest.n] = guest, request.num_tokens
        self._numbers[request.request_id] = guest.n
        self.tokens += request.num_tokens
        self._head = None
        line = self._guests.line
        line.push(guest.seat(lends=line.lends), self._now(), again=again)
        if guest.told is not None:
            return
        if again:
            self._own.prepend_request(request)
        else:
            self._own.add_request(request)

    def first(self) -> Guest:
        """Return whose turn it is."""
        now = self._now()
        self._settle(now)
        if self._head is None:
            serial = self._guests.line.head(now)
            if serial is None:
                raise IndexError("nobody waits")
            self._head = self._own_first(self._waiting[serial])
        return self._head

    def _settle(self, now: InstantNs) -> None:
        """Bring the counters to where they stand at an instant, once."""
        self.account()
        if self._settled_at != now:
            self._guests.settle()
            self._settled_at = now
            self._head = None  # from one step to the next, time or tokens may put another in front

    def _own_first(self, guest: Guest) -> Guest:
        """Return who goes where it is a guest's turn: of those without metadata vLLM's own first."""
        return guest if guest.told is not None else self._known(self._own.peek_request())

    def pop(self) -> EngineRequest:
        """Take the first out; whether it gets a slot shows later."""
        guest = self.first()
        if guest.told is None:
            popped = self._own.pop_request()
            assert popped is guest.request, "vLLM's own queue changed its mind"
        self._drop(guest)
        self._popped = guest
        return guest.request

    def take(self, request: EngineRequest) -> None:
        """Take a request out that is over, wherever it stands."""
        number = self._numbers.get(request.request_id)
        if number is None:
            return
        guest = self._waiting[number]
        if guest.told is None:
            self._own.remove_requests({request})
        self._drop(guest)

    def _drop(self, guest: Guest) -> None:
        del self._waiting[guest.n], self._numbers[guest.request.request_id]
        self.tokens -= self._sizes.pop(guest.n)
        self._head = None
        self._guests.line.take(guest.n, self._now())

    def account(self, tokens: Mapping[str, int] = NONE) -> None:
        """Charge whoever was taken out last, if it got its slot: the next turn hangs on that.

        `tokens`: those of a step that is planned, by request; vLLM counts them as computed already.
        """
        guest, self._popped = self._popped, None
        if guest is not None and not guest.ended and self._runs(guest.request):
            planned = tokens.get(guest.request.request_id, 0)
            self._guests.start(guest, guest.request.num_computed_tokens - planned)

    def in_line(self) -> Iterator[Guest]:
        """Yield who waits in the order of the turns, as far as that is known."""
        self._settle(self._now())
        for serial in self._guests.line.first():
            yield self._own_first(self._waiting[serial])

    def _known(self, request: EngineRequest) -> Guest:
        guest = self._guests.get(request.request_id)
        assert guest is not None, "a request that never arrived"
        return guest


class TurnQueue:
    """`Ordered` as vLLM's queue, and vLLM's own in its place once it fails."""

    def __init__(
        self,
        ordered: Ordered,
        own: Callable[[], OwnQueue],
        failed: Callable[[Exception], None],
    ) -> None:
        """Start empty. `own` makes an empty queue of vLLM's; `failed` is told of a fault, once."""
        self._ours: Ordered | None = ordered
        self._make, self._failed = own, failed
        self._own = own()
        self._here: OrderedDict[str, EngineRequest] = OrderedDict()
        self._looked: EngineRequest | None = None

    def give_up(self) -> None:
        """Go on in vLLM's own order, for good."""
        if self._ours is None:
            return
        self._ours = None
        self._own = self._make()
        for request in self._here.values():
            self._own.add_request(request)

    def _fault(self, fault: Exception) -> None:
        self.give_up()
        self._failed(fault)

    def add_request(self, request: EngineRequest) -> None:
        """Put a request where it belongs."""
        self._add(request, again=False)

    def prepend_request(self, request: EngineRequest) -> None:
        """Put a request back where it belongs: that may be behind others."""
        self._add(request, again=True)

    def prepend_requests(self, requests: Iterable[EngineRequest]) -> None:
        """Put several back."""
        for request in requests:
            self._add(request, again=True)

    def _add(self, request: EngineRequest, *, again: bool) -> None:
        self._looked = None
        self._here[request.request_id] = request
        if again:
            self._here.move_to_end(request.request_id, last=False)
        if self._ours is not None:
            try:
                self._ours.take(request)  # vLLM may put a session in that waits already
                self._ours.add(request, again=again)
            except Exception as fault:  # noqa: BLE001  none may get out
                self._fault(fault)  # which puts it into vLLM's with all others
        elif again:
            self._own.prepend_request(request)
        else:
            self._own.add_request(request)

    def peek_request(self) -> EngineRequest:
        """Return the first. IndexError if nobody waits."""
        self._looked = self._first()
        return self._looked

    def _first(self) -> EngineRequest:
        if self._ours is not None and self._here:
            try:
                return self._here[self._ours.first().request.request_id]
            except Exception as fault:  # noqa: BLE001
                self._fault(fault)
        return self._own.peek_request()

    def pop_request(self) -> EngineRequest:
        """Take the first out: that which was looked at last, for it vLLM allocated. IndexError if nobody waits."""
        request, self._looked = self._looked or self._first(), None
        del self._here[request.request_id]
        if self._ours is None:
            self._own.remove_requests({request})
            return request
        try:
            popped = self._ours.pop()
            assert popped is request, "another was looked at"
        except Exception as fault:  # noqa: BLE001
            self._fault(fault)
        return request

    def remove_request(self, request: EngineRequest) -> None:
        """Take a request out."""
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[EngineRequest]) -> None:
        """Take out those of them that are there."""
        self._looked = None
        gone = [one for one in requests if self._here.pop(one.request_id, None) is not None]
        if self._ours is None:
            self._own.remove_requests(gone)
            return
        try:
            for request in gone:
                self._ours.take(request)
        except Exception as fault:  # noqa: BLE001
            self._fault(fault)

    def __bool__(self) -> bool:
        """Return whether anybody waits."""
        return bool(self._here)

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._here)

    def __iter__(self) -> Iterator[EngineRequest]:
        """Yield who waits, in order of arrival."""
        return iter(tuple(self._here.values()))
