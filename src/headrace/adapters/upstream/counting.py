"""How many tokens did a stream make so far, where each of its frames tells the usage so far?"""

from headrace.adapters.upstream.sse import Scanner
from headrace.model.meter import Meter
from headrace.units import InstantNs


class ByUsage:
    """Counts in a meter by the usage that was told; by frames, while none was.

    The first frame with content counts as a token: engines name the speaker when the first one is made.
    """

    __slots__ = ("_meter", "_scanner")

    def __init__(self, meter: Meter, scanner: Scanner) -> None:
        """Stand in for a meter of a stream."""
        self._meter, self._scanner = meter, scanner

    def note(self, now: InstantNs, frames: int) -> None:
        """Count what was made since the last time."""
        usage, meter = self._scanner.usage, self._meter
        made = frames if usage is None else max(1, usage.output_tokens) - meter.tokens
        if made > 0:
            meter.note(now, made)
