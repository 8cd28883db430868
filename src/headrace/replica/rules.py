"""Whom may an engine let in, apart from slots and blocks?

Engines that others measured have rules of their own: they look at the waiting ones now and then only,
or set aside what a request may come to hold. With those rules a benchmark can hold its figures against
theirs. A replica of a deployment has none: vLLM looks at every step and reserves nothing.
"""

from collections.abc import Iterable
from enum import Enum
from itertools import chain

from msgspec import Struct

from headrace.replica.job import Job
from headrace.replica.stream import Stream
from headrace.units import Tokens

Held = tuple[int, int]
"""A request's tokens so far, prompt and output, and the output tokens to come."""


class Reserve(Enum):
    """What a request needs room for before it starts."""

    AS_NEEDED = "as_needed"
    """The blocks of its next step; when there are none later, somebody is preempted."""
    WHOLE = "whole"
    """All its tokens to the last, beside all those of the others."""
    PEAK = "peak"
    """The most that all of them will hold at once: those that end first make room for the rest."""


class Rules(Struct, frozen=True, kw_only=True):
    """Rules of admission; the default adds none."""

    admit_every: int = 1
    """Steps of the decodes from one look at the waiting ones to the next; an idle engine looks at once."""
    reserve: Reserve = Reserve.AS_NEEDED
    capacity: Tokens = Tokens(0)
    """Tokens that may be set aside, and that fewer than are held at the peak. A pool holds as many for
    sure if it has a block for each slot besides."""

    def __post_init__(self) -> None:
        """Refuse rules under which nothing could ever start."""
        assert self.admit_every >= 1, f"{self.admit_every=}"
        assert self.reserve is Reserve.AS_NEEDED or self.capacity >= 1, f"{self.capacity=}"

    def allow(self, promised: int, held: Iterable[Held]) -> bool:
        """Return whether requests may run together.

        `promised` is the sum of their tokens to the last; `held` is read only where it matters.
        """
        match self.reserve:
            case Reserve.AS_NEEDED:
                return True
            case Reserve.WHOLE:
                return promised <= self.capacity
            case Reserve.PEAK:
                return peak(held) < self.capacity


NO_RULES = Rules()


def peak(requests: Iterable[Held]) -> int:
    """Return the most tokens that requests will hold at once, if each step makes one for each.

    That is as one of them ends: those with no less to come have grown by as much (LightLLM's rule).
    """
    most = tokens = 0
    for nth, (held, left) in enumerate(sorted(requests, key=lambda one: -one[1]), 1):
        tokens += held
        most = max(most, left * nth + tokens)
    return most


def whole(job: Job) -> int:
    """Return a job's tokens to the last."""
    return job.prompt_tokens + job.output_tokens


class Door:
    """Applies the rules to a batch: when it looks, and what it has promised."""

    __slots__ = ("_looked", "promised", "rules")

    def __init__(self, rules: Rules) -> None:
        """Start with nothing promised."""
        self.rules = rules
        self.promised = 0
        """Tokens to the last of all with a slot."""
        self._looked = -1  # the decodes' clock at the last look

    def opens(self, steps: int, *, idle: bool) -> bool:
        """Return whether to look at the waiting ones at this step of the decodes' clock."""
        every = self.rules.admit_every
        if every == 1:
            return True
        if not idle and (steps % every or steps == self._looked):
            return False
        self._looked = steps
        return True

    def allows(self, newcomer: Stream, running: Iterable[Stream], steps: int) -> bool:
        """Return whether a waiting stream may start beside those with a slot."""
        if self.rules.reserve is Reserve.AS_NEEDED:
            return True
        held = (_held(stream, steps) for stream in chain(running, (newcomer,)))
        return self.rules.allow(self.promised + whole(newcomer.job), held)

    def steps_alike(self, steps: int, most: int, *, waiting: bool) -> int:
        """Return for how many steps, at most `most`, the rules let in nobody whom they do not now."""
        every = self.rules.admit_every
        if every > 1 or (waiting and self.rules.reserve is Reserve.PEAK):
            # Peaks sink while the batch decodes, though nobody ends: look as often as step by step.
            return min(most, every - steps % every)
        return most


def _held(stream: Stream, steps: int) -> Held:
    """Return a stream's tokens so far and those to come."""
    made = stream.made_by(steps)
    return stream.job.prompt_tokens + made, stream.job.output_tokens - made
