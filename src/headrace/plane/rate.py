"""At what rate does queued work drain: work-seconds per second and replica, while work waits?

Never taken from a queueing formula (DEM-2): starts from the pool's declared rate and is replaced by
what drained in the spans in which something was waiting, forgetting with a few seconds' half life.
Idle spans teach nothing, since they measure demand. Work counts at its first token with the amount
that was predicted for it, so that a bias of the prediction is in the backlog and in the rate alike
and cancels in the wait.
"""

from msgspec import Struct

from headrace.units import MICRO, NS_PER_MS, NS_PER_S, InstantNs

_KEEP, _OF = 63, 64
"""Forgetting per tick of 100 ms: half is forgotten in about 4.4 s."""
_SPAN_MAX = NS_PER_S
"""A longer pause between ticks is no measurement."""
_PRIOR = 2 * NS_PER_S
"""How long the declared rate outweighs what was measured."""


class Rate(Struct):
    """The measured work rate of one replica of a model, in millionths."""

    done_ns: int = 0
    """Predicted work of first tokens in measured spans, decayed."""
    time_ns: int = 0
    """Replica time of those spans, decayed."""
    fresh_ns: int = 0
    """Predicted work of first tokens since the last tick."""
    at: InstantNs = InstantNs(0)
    """The last tick."""
    waiting: bool = False
    """Whether something was waiting then."""

    @classmethod
    def starting(cls, declared: float) -> "Rate":
        """Return the declared rate, as if measured for two seconds."""
        return cls(time_ns=_PRIOR, done_ns=round(declared * _PRIOR))

    def tick(self, now: InstantNs, replicas: int, *, waiting: bool) -> None:
        """Close a span: count it if work waited at both its ends."""
        span = now - self.at
        if self.waiting and waiting and replicas and NS_PER_MS <= span <= _SPAN_MAX:
            self.done_ns = self.done_ns * _KEEP // _OF + self.fresh_ns
            self.time_ns = self.time_ns * _KEEP // _OF + span * replicas
        self.fresh_ns = 0
        self.at, self.waiting = now, waiting

    def micro(self) -> int:
        """Return work-seconds per second of one replica, in millionths; at least 1 %."""
        if not self.time_ns:
            return MICRO
        return max(MICRO // 100, self.done_ns * MICRO // self.time_ns)
