"""How often may one address show a wrong key? Bounded in rate, and in what is remembered."""

from headrace.ports.clock import Clock
from headrace.units import NS_PER_S, InstantNs, ceil_div

FAILURES = 10
"""Wrong keys that one address may show in a minute."""
ADDRESSES = 1_024
"""Addresses whose failures are remembered, the newest."""
_MINUTE = 60 * NS_PER_S


class Failures:
    """Wrong keys by address."""

    def __init__(self, clock: Clock) -> None:
        """Start with none."""
        self._clock = clock
        self._seen: dict[str, tuple[InstantNs, int]] = {}

    def wait_s(self, address: str) -> int | None:
        """Return for how many seconds an address is not heard; None: it is."""
        now = self._clock.now()
        since, count = self._seen.get(address, (now, 0))
        if count < FAILURES or now - since >= _MINUTE:
            return None
        return ceil_div(since + _MINUTE - now, NS_PER_S)

    def note(self, address: str) -> None:
        """Count a wrong key."""
        now = self._clock.now()
        since, count = self._seen.pop(address, (now, 0))
        if now - since >= _MINUTE:
            since, count = now, 0
        self._seen[address] = (since, count + 1)
        if len(self._seen) > ADDRESSES:
            del self._seen[next(iter(self._seen))]
