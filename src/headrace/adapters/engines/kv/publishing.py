"""A real engine that publishes what enters and leaves its KV cache, and whoever listens to it."""

import logging
import secrets
from collections.abc import Sequence

from headrace.adapters.engines.kv.follower import Counts, Follower, Reset
from headrace.adapters.engines.kv.index import BlockIndex
from headrace.adapters.engines.kv.subscriber import Source, Subscriber
from headrace.adapters.engines.remote import LOG, RemoteEngine
from headrace.ports.engine import Listener
from headrace.units import Tokens

_log = logging.getLogger(LOG)
_KEY_BYTES = 32


class PublishingEngine(RemoteEngine):
    """One server, its lives and its cache."""

    _subscriber: Subscriber
    _follower: Follower

    def follow(self, source: Source) -> None:
        """Say where it publishes, before `connect`; raises ImportError without pyzmq."""
        self._subscriber = subscriber = Subscriber(source)
        index = BlockIndex(secrets.token_bytes(_KEY_BYTES))
        ask = None if source.replay_endpoint is None else subscriber.ask
        self._follower = Follower(index, self._forgot, ask)

    @property
    def heard(self) -> Counts:
        """What it has told of its cache so far."""
        return self._follower.counts

    @property
    def unread(self) -> dict[str, int]:
        """What of that was passed over, by reason."""
        counts, index = self._follower.counts, self._follower.index
        return {
            "malformed": counts.malformed,
            "unknown": counts.unknown,
            "elsewhere": index.elsewhere,
            "left_out": index.left_out,
        }

    @property
    def blocks(self) -> int:
        """How many blocks of its cache are known."""
        return len(self._follower.index)

    def cached_tokens(
        self, tokens: Sequence[int], *, adapter: str | int | None = None, salt: str | None = None
    ) -> Tokens:
        """Return how many leading tokens of a prompt it holds, as far as it has told; see BlockIndex."""
        return self._follower.index.cached_tokens(tokens, adapter=adapter, salt=salt)

    def connect(self, listener: Listener) -> None:
        """Say who listens, and begin to listen to its cache."""
        super().connect(listener)
        self._subscriber.start(self._follower)

    def close(self) -> None:
        """Close every connection."""
        self._subscriber.close()
        super().close()

    def _fall(self, why: str) -> None:
        """Its cache is gone with it."""
        if self.is_up:
            self._follower.begin_anew()
        super()._fall(why)

    def _forgot(self, reset: Reset) -> None:
        _log.info("engine %s: its cache counts as empty: %s", self.name, reset)
        if self.is_up:
            self.tell.forgot(self)
