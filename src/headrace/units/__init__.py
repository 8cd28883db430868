"""Instants, durations, work, tokens, bytes and money: one place for every conversion.

Whatever is summed or compared for equality is an `int`. The types below are `NewType`s: mypy
refuses a swapped, bare or mixed argument, and at run time they cost nothing but the call.
"""

from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    InstantNs = NewType("InstantNs", int)
    """Monotonic time in nanoseconds; the origin means nothing."""
    DurationNs = NewType("DurationNs", int)
    """Time between two instants in nanoseconds, never negative."""
    WorkNs = NewType("WorkNs", int)
    """GPU time in nanoseconds. Divide it by a work rate to get a duration; never add it to one."""
    Ps = NewType("Ps", int)
    """Picoseconds: the emulated engine's clock and the coefficients of its step times."""
    Tokens = NewType("Tokens", int)
    """A count of model tokens."""
    Blocks = NewType("Blocks", int)
    """A count of KV blocks of `BLOCK_TOKENS` tokens."""
    Bytes = NewType("Bytes", int)
    """A count of bytes."""
    MicroUsd = NewType("MicroUsd", int)
    """Money in millionths of a US dollar."""
    Service = NewType("Service", int)
    """Service of the fairness counters, in the unit of their cost: of weighted tokens, millionths of
    one input token (FAIR-1, FAIR-2)."""
else:  # the call is in every decision many times over: a plain int is twice as fast
    InstantNs = DurationNs = WorkNs = Ps = Tokens = Blocks = Bytes = MicroUsd = Service = int

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
PS_PER_NS = 1_000
PS_PER_MS = 1_000_000_000
MICRO = 1_000_000
"""Millionths in one: the scale of `Service`, of rates and of shares."""
MIB = 1 << 20
BLOCK_TOKENS = 16
"""Tokens in one KV block; vLLM's default."""
REQUEST_TOKENS_MAX = 10_000_000
"""Most tokens of one request, on either side, that anybody is believed, caller or engine: ten times the
longest context there is. What is made of them (work, service) then fits the 64 bits of a journal."""
SUM_MAX = 2**63 - 1
"""Where a sum over a life stops: the largest number that a journal holds."""


def elapsed(earlier: InstantNs, now: InstantNs) -> DurationNs:
    """Return the time since `earlier`; a clock that ran backwards is a bug."""
    assert now >= earlier, f"clock ran backwards: {earlier=} {now=}"
    return DurationNs(now - earlier)


def later(instant: InstantNs, duration: int) -> InstantNs:
    """Return the instant `duration` nanoseconds after (before, if negative) `instant`."""
    return InstantNs(instant + duration)


def sooner(one: InstantNs, other: InstantNs | None) -> InstantNs:
    """Return the earlier of two instants; None is never."""
    return one if other is None or one <= other else other


def ms(milliseconds: float) -> DurationNs:
    """Return a duration given in milliseconds, rounded once to whole nanoseconds."""
    return DurationNs(round(milliseconds * NS_PER_MS))


def seconds(value: float) -> DurationNs:
    """Return a duration given in seconds, rounded once to whole nanoseconds."""
    return DurationNs(round(value * NS_PER_S))


def to_ms(nanoseconds: int) -> float:
    """Return nanoseconds as milliseconds, for people and records."""
    return nanoseconds / NS_PER_MS


def to_seconds(nanoseconds: int) -> float:
    """Return nanoseconds as seconds, for people and metrics."""
    return nanoseconds / NS_PER_S


def ps_from_ms(milliseconds: float) -> Ps:
    """Return a coefficient given in milliseconds in whole picoseconds, rounded once."""
    return Ps(round(milliseconds * PS_PER_MS))


def ps_to_ns(picoseconds: int) -> int:
    """Return whole nanoseconds, rounded down: the instant an engine event shows outside."""
    return picoseconds // PS_PER_NS


def time_for(work: int, rate_micro: int) -> DurationNs:
    """Return how long `work` takes at `rate_micro` millionths of a work-second per second."""
    assert rate_micro > 0, "no capacity: the caller must handle it"
    return DurationNs(work * MICRO // rate_micro)


def blocks_for(tokens: int) -> Blocks:
    """Return the KV blocks that hold `tokens`, rounded up."""
    return Blocks(-(-tokens // BLOCK_TOKENS))


def mib_ceil(size: int) -> int:
    """Return whole MiB that hold `size` bytes."""
    return -(-size // MIB)


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the quotient rounded up, exactly; exact quotients do not round up (EX-8)."""
    return -(-numerator // denominator)
