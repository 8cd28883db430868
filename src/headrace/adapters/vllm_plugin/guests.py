"""Who is in this vLLM, what did a gateway tell of them, and what have their tenants had?

A request that comes without metadata belongs to one more tenant, at the root of the share tree: among
its own it keeps vLLM's order, beside the others it has one tenant's share. Everything here is ours; of
vLLM's requests only counts are read.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from headrace.model.ids import AttemptId, ClassName, TenantId
from headrace.model.paths import Level, Link, Path, path, tenant_parent
from headrace.model.told import Told, heard
from headrace.policy.batching.knobs import Entry
from headrace.policy.fairness.line import Line, Seat
from headrace.units import NS_PER_MS, DurationNs, InstantNs, Tokens, later

UNMARKED = TenantId("")
"""The tenant of requests that came without metadata."""
_UNMARKED_WAY = path(Link(Level.TENANT, UNMARKED))
_UNMARKED_GAP = DurationNs(80 * NS_PER_MS)
"""Their ITL bound, for who gives way: that of a class by default, so that going round a gateway is no gain."""
NODES_MAX = 100_000
"""Nodes of the share tree; beyond, whoever is new in it counts as unmarked."""


class EngineRequest(Protocol):
    """What is read of vLLM's request, and the one field that is written."""

    request_id: str
    priority: int
    num_prompt_tokens: int
    num_computed_tokens: int
    is_prefill_chunk: bool
    status: Any

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Made so far."""
        ...


class Guest:
    """One request, from its arrival to its end."""

    __slots__ = (
        "arrived_at", "cached", "charged", "deadline", "ended", "gap_ns", "logged", "n",
        "own_priority", "prefilled", "relegated", "request", "seated", "slo_class", "started",
        "target", "tenant", "told", "way",
    )  # fmt: skip

    def __init__(
        self, n: int, request: EngineRequest, told: Told | None, now: InstantNs, late_ns: DurationNs
    ) -> None:
        """Take what was told; `n` counts arrivals."""
        self.n, self.request, self.told, self.arrived_at = n, request, told, now
        self.own_priority = request.priority
        self.charged = 0
        """Output tokens that its queue was charged for."""
        self.prefilled = self.ended = False
        self.cached = self.target = self.started = 0
        """Prompt tokens found in the prefix cache at the first start; where it decodes from; which start
        of all was its last."""
        self.seated = self.logged = False
        """For the step log: it got a slot that was not told yet, and it had one before."""
        if told is None:
            # Due when it may wait no longer.
            self.tenant, self.slo_class, self.way = UNMARKED, ClassName(""), _UNMARKED_WAY
            self.deadline, self.relegated, self.gap_ns = later(now, late_ns), False, _UNMARKED_GAP
        else:
            self.tenant, self.slo_class, self.way = told.tenant, told.slo_class, told.way
            self.deadline, self.relegated = InstantNs(now + told.left_ns), told.relegated
            self.gap_ns = told.gap_ns

    def seat(self, *, lends: bool = False) -> Seat:
        """Return what the line for a slot may know.

        `lends`: work that nobody is in a hurry for lets others pass there. Nobody knows of a hurry without
        metadata, and going round a gateway must be no gain: it lets others pass for as long as it may.
        """
        request = self.request
        return Seat(
            serial=self.n,
            tenant=self.tenant,
            way=self.way,
            # What was told on arrival is old once it was started.
            counters=() if self.told is None or self.prefilled else self.told.counters,
            arrived_at=self.arrived_at,
            deadline=self.deadline,
            prompt_tokens=Tokens(request.num_prompt_tokens),
            target=request.num_tokens,
            relegated=self.relegated or (lends and self.told is None),
        )


class Tally:
    """The output of one queue."""

    __slots__ = ("guests", "made", "way")

    def __init__(self, way: Path) -> None:
        """Start with none."""
        self.way, self.guests, self.made = way, 0, 0


class Guests:
    """All requests that are not over, and the counters of their tenants."""

    def __init__(self, line: Line, late_ns: DurationNs) -> None:
        """Start empty; `line` has the counters."""
        self.line = line
        self._late_ns = late_ns
        self._guests: dict[str, Guest] = {}
        self._tallies: dict[str, Tally] = {}
        self._count = 0
        self.running: dict[str, Guest] = {}
        """Those with a slot."""
        self.starts = 0
        """How often one got a slot."""
        self.marked = 0
        """Of those that are not over, how many came with metadata."""
        self.unreadable = 0
        """Requests whose metadata was none of ours, or too much."""

    def __len__(self) -> int:
        """Return how many are not over."""
        return len(self._guests)

    def __contains__(self, request_id: str) -> bool:
        """Return whether a request is known."""
        return request_id in self._guests

    def get(self, request_id: str) -> Guest | None:
        """Return a request's record, if it is known."""
        return self._guests.get(request_id)

    def arrive(
        self, request: EngineRequest, scalars: Mapping[str, object] | None, now: InstantNs
    ) -> Guest:
        """Return a request's record, made on its arrival from the metadata that came with it."""
        assert request.request_id not in self._guests, "it arrived before"
        self._count += 1
        guest = Guest(self._count, request, self._heard(scalars), now, self._late_ns)
        self._guests[request.request_id] = guest
        self.marked += guest.told is not None
        self._tally(guest).guests += 1
        return guest

    def _heard(self, scalars: Mapping[str, object] | None) -> Told | None:
        try:
            told = heard(scalars)
        except ValueError:
            self.unreadable += 1
            return None
        if told is not None and self.line.nodes >= NODES_MAX and not self.line.knows(told.way):
            self.unreadable += 1
            return None
        return told

    def _tally(self, guest: Guest) -> Tally:
        key = guest.way[-1].key
        tally = self._tallies.get(key)
        if tally is None:
            tally = self._tallies[key] = Tally(guest.way)
        return tally

    def start(self, guest: Guest, computed: int) -> None:
        """Give a slot to a request of which so many tokens are computed.

        Its prompt is charged once: what a preemption lost is computed free of charge.
        """
        self.running[guest.request.request_id] = guest
        self.starts += 1
        request = guest.request
        guest.seated, guest.target, guest.started = True, request.num_tokens, self.starts
        if (
            request.num_output_tokens < guest.charged
        ):  # a session's next turn, with input of its own
            guest.charged, guest.prefilled = 0, False
        if guest.prefilled:
            return
        guest.prefilled = True
        guest.cached = cached = min(computed, request.num_prompt_tokens)
        self.line.charge_prompt(guest.way, request.num_prompt_tokens - cached, cached)

    def stop(self, guest: Guest) -> None:
        """Take a slot away."""
        self.running.pop(guest.request.request_id, None)

    def follow(self, running: Iterable[EngineRequest], tokens: Mapping[str, int]) -> None:
        """Take it from vLLM who has a slot, after a step of so many tokens each.

        For those that did not wait in our line: whose KV came from elsewhere, or where vLLM decides.
        """
        before, self.running = self.running, {}
        for request in running:
            name = request.request_id
            guest = self._guests.get(name)
            if guest is None:
                continue  # it came before there were records
            if name in before:
                self.running[name] = guest
            else:
                self.start(guest, request.num_computed_tokens - tokens.get(name, 0))

    def leave(self, guest: Guest) -> None:
        """Forget a request that is over, all its tokens charged."""
        if guest.ended:
            return
        guest.ended = True
        self.stop(guest)
        self._made(guest)
        tally = self._tally(guest)
        tally.guests -= 1
        if not tally.guests:
            del self._tallies[guest.way[-1].key]
        self.marked -= guest.told is not None
        self._guests.pop(guest.request.request_id, None)

    def settle(self) -> None:
        """Charge every queue for the tokens that its requests made."""
        for guest in self.running.values():
            if guest.request.num_output_tokens != guest.charged:
                self._made(guest)

    def _made(self, guest: Guest) -> None:
        made = guest.request.num_output_tokens - guest.charged
        if made <= 0:
            return
        guest.charged += made
        tally = self._tally(guest)
        self.line.charge_output(tally.way, tally.made, tally.made + made)
        tally.made += made

    def entry(self, guest: Guest) -> Entry:
        """Return what a policy may know of a request."""
        request = guest.request
        return Entry(
            attempt=AttemptId(guest.n),
            tenant=guest.tenant,
            arrived_at=guest.arrived_at,
            deadline=guest.deadline,
            relegated=guest.relegated,
            counter=self.line.counter(guest.way),
            among=tenant_parent(guest.way),
            weight=guest.way[-1].weight,
            prompt_tokens=Tokens(request.num_prompt_tokens),
            computed=Tokens(request.num_computed_tokens),
            made=Tokens(request.num_output_tokens),
            gap_ns=guest.gap_ns,
        )
