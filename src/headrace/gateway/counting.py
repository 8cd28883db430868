"""When is a prompt's exact count waited for, and how long?

Only where a tokenizer is configured, for prompts of text that are not too long, for so many at once
and a bounded time each; else the estimate stands. Equal prompts are counted once, and remembered by
a keyed hash: no prompt is kept.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Mapping
from hashlib import blake2b

from headrace.config.schema import TokenCountsSpec
from headrace.gateway.asked import Asked
from headrace.model.ids import ModelName
from headrace.ports.tokens import Count, TokenCounter, UncountedError

_KEY_BYTES = 16


class Counting:
    """The tokenizers of a gateway, with what they counted last. Made inside its event loop."""

    def __init__(
        self, spec: TokenCountsSpec, counters: Mapping[str, tuple[ModelName, TokenCounter]]
    ) -> None:
        """Count for the models named, aliases too, each with its canonical name."""
        self._counters = dict(counters)
        self._wait_s = spec.wait_ms / 1_000
        self._at_once, self._longest, self._kept = spec.at_once, spec.prompt_bytes, spec.cache
        self._secret = secrets.token_bytes(32)
        self._cache: dict[bytes, Count] = {}  # the one used last comes last
        self._running: dict[bytes, asyncio.Task[Count | None]] = {}
        self.results: Counter[tuple[str, str]] = Counter()
        """Requests of such models by (model, what came of it): `counted`, `cached`, or why an
        estimate stands instead: `unfit`, `busy`, `late`, `failed`."""

    async def count(self, asked: Asked, body: bytes) -> Count | None:
        """Return the count of a prompt, or None: estimate it."""
        known = self._counters.get(asked.model)
        if known is None:
            return None
        model, counter = known
        payload = None
        if asked.text is not None and asked.text.total <= self._longest:
            payload = counter.payload(asked.route, body, asked.prompt)
        if payload is None:
            return self._note(model, "unfit")
        key = self._key(model, payload)
        found = self._cache.pop(key, None)
        if found is not None:
            self._cache[key] = found
            return self._note(model, "cached", found)
        task = self._running.get(key)
        if task is None:
            if len(self._running) >= self._at_once:
                return self._note(model, "busy")
            task = asyncio.get_running_loop().create_task(self._counted(key, counter, payload))
            self._running[key] = task
        done, _ = await asyncio.wait([task], timeout=self._wait_s)
        if not done:
            return self._note(model, "late")
        counted = task.result()
        return self._note(model, "failed" if counted is None else "counted", counted)

    def close(self) -> None:
        """Count no more."""
        for task in self._running.values():
            task.cancel()
        for counter in {id(one): one for _, one in self._counters.values()}.values():
            counter.close()

    async def _counted(self, key: bytes, counter: TokenCounter, payload: bytes) -> Count | None:
        """Count, and keep the count even if nobody waits for it any more."""
        try:
            count = await counter.count(payload)
        except UncountedError:
            return None
        finally:
            del self._running[key]
        self._cache[key] = count
        if len(self._cache) > self._kept:
            del self._cache[next(iter(self._cache))]
        return count

    def _key(self, model: str, payload: bytes) -> bytes:
        digest = blake2b(model.encode(), key=self._secret, digest_size=_KEY_BYTES)
        digest.update(b"\0")
        digest.update(payload)
        return digest.digest()

    def _note(self, model: str, result: str, count: Count | None = None) -> Count | None:
        self.results[model, result] += 1
        return count
