"""What a batching policy sees and what it may turn.

The engine plans each step itself: decodes first, one token each, then unfinished prompts, then
waiting ones in the order of its line, under the limits below; unmixed, prompts first and whole. A
policy sees no true output length. What vLLM's scheduler cannot do is said where it is declared.
"""

from enum import IntFlag
from typing import Protocol

from msgspec import Struct

from headrace.model.ids import AttemptId, TenantId
from headrace.model.profile import Profile
from headrace.units import Blocks, DurationNs, InstantNs, Ps, Tokens

Key = tuple[int, ...]
"""A sort key: compared element by element, ties broken by order of submission."""


class Break(IntFlag):
    """What may end the time for which knobs hold."""

    NOTHING = 0
    ARRIVAL = 1
    """A request joins the waiting ones."""
    START = 2
    """A waiting request gets a slot."""
    FIRST_TOKEN = 4
    """A prompt is done and its request decodes from now on."""
    END = 8
    """A request finishes or is aborted."""
    PREEMPTION = 16
    COMPOSITION = START | FIRST_TOKEN | END | PREEMPTION
    """Any change of who is in the batch and what they do there."""
    ANYTHING = ARRIVAL | COMPOSITION


class Holds(Struct, frozen=True, kw_only=True, gc=False):
    """For how long the policy would answer the same: the engine need not ask again before.

    A promise, checked by running it step by step. The default asks again at every step.
    """

    max_steps: int | None = 1
    """None: any number of steps."""
    until: InstantNs | None = None
    """Steps that start at or after this instant need new knobs."""
    breaks_on: Break = Break.ANYTHING

    def is_over(self, steps: int, now: InstantNs, changed: Break) -> bool:
        """Return whether new knobs are needed, after so many steps and what has changed since."""
        return (
            (self.max_steps is not None and steps >= self.max_steps)
            or (self.until is not None and now >= self.until)
            or bool(changed & self.breaks_on)
        )


ONE_STEP = Holds()
"""What a policy holds that says nothing."""
ALWAYS = Holds(max_steps=None, breaks_on=Break.NOTHING)
"""What a policy holds whose answer never changes."""


class Knobs(Struct, frozen=True, kw_only=True):
    """The limits of a step; the engine does the rest as vLLM does."""

    token_budget: int
    """Tokens of a step. Decodes always run: below their number it counts as their number."""
    running_limit: int
    """Most requests with a slot; waiting ones start below it, running ones stay above it."""
    chunk_limit: int | None = None
    """Most prompt tokens of one request in a step; None: the budget alone bounds them. Not where a request
    is alone in the engine: nobody is there to be kept waiting."""
    mixed: bool = True
    """False: a step that has prompts leaves the decodes out, which stand still. The prompts are then
    whole, together within the budget or one alone. Emulated engines alone are able to."""
    holds: Holds = ONE_STEP

    def __post_init__(self) -> None:
        """Refuse limits under which nothing could ever run."""
        assert self.token_budget >= 1, f"{self.token_budget=}"
        assert self.running_limit >= 1, f"{self.running_limit=}"
        assert self.chunk_limit is None or self.chunk_limit >= 1, f"{self.chunk_limit=}"
        assert self.mixed or self.chunk_limit is None, (
            f"unmixed prompts are whole: {self.chunk_limit=}"
        )
        steps = self.holds.max_steps
        assert steps is None or steps >= 1, f"{steps=}"


class Entry(Struct, frozen=True, kw_only=True):
    """One waiting or running request, as far as a policy may know it."""

    attempt: AttemptId
    tenant: TenantId
    arrived_at: InstantNs
    """When the engine got it; a preempted request keeps it."""
    deadline: InstantNs
    relegated: bool
    counter: int
    """Where its tenant's virtual counter stands in this engine; 0 where nobody goes by counters."""
    among: str = ""
    """The node of the share tree that its tenant stands under: only counters there compare."""
    weight: int
    prompt_tokens: Tokens
    computed: Tokens
    """Tokens whose KV there is, on the GPU or the host; 0 while it waits for its first start."""
    made: Tokens
    """Output tokens so far."""
    gap_ns: DurationNs = DurationNs(0)
    """The ITL bound of its class: the larger, the looser."""
    below_share: bool = False
    """Whether its tenant's counter is strictly the least there of those that run; of victims only."""


def arrival(entry: Entry) -> Key:
    """Return the key of first come first served; what the gateway relegated goes behind all the rest."""
    return (entry.relegated, entry.arrived_at)


FRONT_PROMPTS = 16
"""How many prompts a view tells one by one: enough for several steps, so that nothing is lost by leaving
the rest to later ones, and to see an urgent prompt behind long ones."""


class Front(Struct, frozen=True, kw_only=True, gc=False):
    """A prompt that is among the next to be computed."""

    position: Tokens
    """Tokens whose KV it has, or finds in the prefix cache when it starts."""
    left: Tokens
    """Tokens to compute before it makes its next one, at least 1."""
    deadline: InstantNs
    """Of its first token."""
    relegated: bool
    resumes: bool = False
    """Whether it gave way and has all its KV again: its one token costs what that of a decode does."""
    transfer_ps: Ps = Ps(0)
    """The most that its start adds to a step, in ps, to bring its KV back from the host."""


class BatchView(Struct, frozen=True, kw_only=True):
    """The engine at a step boundary, before the step is planned."""

    now: InstantNs
    profile: Profile
    """Its limits and step costs, noise apart."""
    decodes: int
    context: Tokens
    """Total context of the decodes."""
    prefills: int
    """Running requests whose prompt is not done."""
    waiting: int
    prefill_tokens: Tokens
    """Prompt tokens still to be computed of running and waiting requests."""
    free_blocks: Blocks
    """Blocks that are free or could be at once: prefix cache that nobody uses counts."""
    tightest_gap_ns: DurationNs | None
    """The least ITL bound among the decodes; None without decodes."""
    contests: bool = False
    """Whether a waiting request may get the slot of a running one, which keeps its memory."""
    fronts: tuple[Front, ...] = ()
    """The first prompts in the order in which a step computes them: the unfinished, then the waiting
    ones. It stops before a prompt whose position depends on what the same step caches."""


class BatchingPolicy(Protocol):
    """Which knobs for the next steps, and who goes first?"""

    def knobs(self, view: BatchView) -> Knobs:
        """Return the knobs of the next step and for how long they hold."""
        ...

    def victim_key(self, entry: Entry) -> Key:
        """Return the key of a running request when blocks run out: the greatest gives way.

        Equal keys: the cheapest pause for each block that it frees.
        """
        ...
