"""A tokenizer of our own, read from a `tokenizer.json`: exact for text; a chat's template is not in it.

Needs the library `tokenizers`, an extra. It runs in threads, and lets go of the interpreter's lock
while it works.
"""

import asyncio
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from headrace.ports.engine import Route
from headrace.ports.tokens import Count, UncountedError
from headrace.units import Tokens

_REVISION = "file"
_MESSAGE = b"\x1e"  # how a message begins in the canonical prompt
_MESSAGE_MARGIN = 4
"""Tokens that a template may add to each message beside what its role comes to here. 4: ChatML's."""
_BARE = frozenset({Route.COMPLETIONS, Route.EMBEDDINGS})
"""Routes without a template."""


class LocalTokenizer:
    """A tokenizer from a file."""

    def __init__(self, path: Path, threads: Executor) -> None:
        """Read it; raises ImportError without the library, OSError and ValueError of the file."""
        from tokenizers import Tokenizer  # noqa: PLC0415 - an extra, needed where it is configured

        content = path.read_text(encoding="utf-8")
        try:
            self._tokenizer: Any = Tokenizer.from_str(content)
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            raise ValueError(f"no tokenizer: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._threads = threads

    def payload(self, route: Route, body: bytes, prompt: bytes) -> bytes | None:  # noqa: ARG002
        """Return the canonical prompt, and before it whether a template will be added."""
        return (b"0" if route in _BARE else b"1") + prompt

    async def count(self, payload: bytes) -> Count:
        """Return the count, made in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._count, payload)

    def close(self) -> None:
        """Have no thread go on waiting for work."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _count(self, payload: bytes) -> Count:
        text = payload[1:].decode()
        try:
            # The library holds the lock for a single text, and not for a batch.
            found = self._tokenizer.encode_batch_fast([text])[0]
        except Exception as error:  # noqa: BLE001 - as above
            raise UncountedError(str(error)) from None
        messages = payload.count(_MESSAGE) if payload[:1] == b"1" else 0
        return Count(Tokens(max(1, len(found))), _REVISION, Tokens(messages * _MESSAGE_MARGIN))
