"""What happened in each step of an engine's scheduler? The records of its step log, JSON lines.

Counts, order, tenants and durations; no prompt, no token, no key. A log begins with a `Head`. Requests
go by a number `n` that counts from the start of the engine, so that a step of a large batch stays
short. Within a step things happen in the order of its fields: requests arrive, are started or resumed
or preempted, their tokens are computed, and some end.
"""

from typing import Literal

from msgspec import Struct

from headrace.model.ids import ClassName, TenantId
from headrace.units import DurationNs, InstantNs, Tokens

VERSION = 1
"""Revision of these records, raised whenever a reader would misread the new ones."""


class Arrived(Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One request, as the scheduler got it."""

    n: int
    """Its number in this log, never given twice in an engine's life."""
    request: str
    """The engine's own id of it."""
    at_ns: InstantNs
    """When the scheduler got it, on the clock of the steps."""
    tenant: TenantId
    slo_class: ClassName
    prompt_tokens: Tokens
    left_ms: int | None = None
    """Time left on arrival until its first token is due, which is negative for what is late.
    None: nobody told."""
    relegated: bool = False
    """It could not meet its objective any more and goes behind those that can."""
    marked: bool = False
    """It came with the gateway's mark; tenant and class of others are defaults."""


class Ended(Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One request that is over."""

    n: int
    reason: str
    """Why, in the engine's words: it was stopped, reached its length, was aborted."""
    output_tokens: Tokens
    cached_tokens: Tokens
    """Prompt tokens that were found in the prefix cache when it was started."""


class Alive(Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One request that was there before the file it stands in began."""

    arrived: Arrived
    started: bool
    """It was scheduled before, be it once."""
    running: bool
    """It held a slot as the last step before ended. Started and not running: preempted."""


class Head(Struct, frozen=True, kw_only=True, tag_field="kind", tag="head"):
    """The first line of each file: what was running, and how it was set up."""

    version: int = VERSION
    engine: str
    """Which software: `vllm 0.32.0`."""
    mode: Literal["enforce", "passive"]
    """passive: the engine's own scheduler decides, and `Step.proposed` is what ours would have set."""
    started_unix_ms: int
    """When the engine started, by its wall clock: tells one life of it from another."""
    block_tokens: int
    """Tokens in one KV block."""
    blocks: int
    """KV blocks in all."""
    ordering: str
    """Kind of the order within a tenant."""
    batching: str
    """Kind of the batching."""
    running_limit: int
    """Most requests that may run at once, as the engine is configured."""
    token_budget: Tokens
    """Most tokens in one step, as the engine is configured."""
    alive: tuple[Alive, ...] = ()
    """Requests from before this file, in the order of their numbers."""


class Step(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="step"):
    """One step of the engine. Fields that are left out have the value given here."""

    step: int
    """Its number, which grows; numbers that are missing were steps without work, or are told of by
    a `Note`."""
    at_ns: InstantNs
    """When scheduling began, on the monotonic clock of the engine's machine."""
    schedule_ns: DurationNs = DurationNs(0)
    """How long scheduling took, all of it."""
    took_ns: DurationNs | None = None
    """From the begin of scheduling to the outputs. None: they are not known yet."""
    running: int = 0
    """Requests that hold a slot, once scheduled."""
    waiting: int = 0
    """Requests that wait, once scheduled, those preempted among them."""
    budget: Tokens = Tokens(0)
    """Most tokens of this step."""
    chunk: Tokens | None = None
    """Most prompt tokens of one request in this step. None: as many as the budget has."""
    limit: int = 0
    """Most requests that may run at once."""
    free_blocks: int = 0
    """KV blocks that hold nothing, or only what may be thrown away, once scheduled."""
    arrived: tuple[Arrived, ...] = ()
    """Requests since the line before, in the order they came."""
    started: tuple[int, ...] = ()
    """Requests scheduled for the first time, in the order they were."""
    resumed: tuple[int, ...] = ()
    """Preempted requests that were scheduled again."""
    preempted: tuple[int, ...] = ()
    """Requests that lost their slot."""
    decodes: tuple[int, ...] = ()
    """Requests with one decode step each."""
    prefills: tuple[tuple[int, int, int], ...] = ()
    """(n, position, tokens): so many tokens of a prompt, or of what a preemption lost, from a position
    on."""
    ended: tuple[Ended, ...] = ()
    """Requests that ended since the line before, by this step's outputs or as they were aborted."""
    proposed: tuple[int, int | None, int] | None = None
    """(budget, chunk, limit) that ours would have set, where the engine's own scheduler decides."""


class Note(Struct, frozen=True, kw_only=True, tag_field="kind", tag="note"):
    """What else befell the scheduler or its log: a fall-back with its reason, lines that were lost."""

    at_ns: InstantNs
    text: str


Line = Head | Step | Note
