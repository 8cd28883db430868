"""A publisher as vLLM's is, on loopback, that does what a test says and nothing by itself."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from headrace.adapters.engines.kv.follower import Follower

TOPIC = b"kv"
PATIENCE_S = 20.0
"""For what must come; nothing is measured by it."""


class Noted(Follower):
    """A follower that wakes whoever waits for it."""

    changed: asyncio.Event

    def heard(self, number: int, payload: bytes) -> None:
        super().heard(number, payload)
        self.changed.set()

    def replayed(self, number: int, payload: bytes) -> None:
        super().replayed(number, payload)
        self.changed.set()

    def replay_over(self) -> None:
        super().replay_over()
        self.changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self.changed.clear()
                await self.changed.wait()


class Publisher:
    """One life of an engine's publisher; told apart by where it binds, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.endpoint, self.replay_endpoint = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        self.kept: list[tuple[int, bytes]] = []
        self.number = 0
        context = zmq.asyncio.Context.instance()
        self._events: Any = context.socket(zmq.XPUB)
        self._replay: Any = context.socket(zmq.ROUTER)
        for socket, endpoint in (
            (self._events, self.endpoint),
            (self._replay, self.replay_endpoint),
        ):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(endpoint)

    async def subscribed(self) -> bytes:
        """Wait for a subscriber; return the topic it wants."""
        async with asyncio.timeout(PATIENCE_S):
            told: bytes = await self._events.recv()
        assert told[:1] == b"\x01"
        return told[1:]

    async def publish(self, payload: bytes, *, lost: bool = False) -> int:
        """Publish a batch, or keep it as if it had been lost on its way; return its number."""
        number, self.number = self.number, self.number + 1
        self.kept.append((number, payload))
        if not lost:
            await self.send([TOPIC, number.to_bytes(8, "big"), payload])
        return number

    async def send(self, frames: list[bytes]) -> None:
        await self._events.send_multipart(frames)

    async def asked(self) -> tuple[bytes, int]:
        """Wait for a question; return who asks, and from which number on."""
        async with asyncio.timeout(PATIENCE_S):
            who, empty, start = await self._replay.recv_multipart()
        assert empty == b""
        return who, int.from_bytes(start, "big")

    async def answer(self, who: bytes, start: int, *, topics: bool = True) -> None:
        """Answer in full; older versions do so without the topic."""
        middle = [TOPIC] if topics else []
        for number, payload in self.kept:
            if number >= start:
                await self.tell(who, [*middle, number.to_bytes(8, "big"), payload])
        await self.tell(who, [b"", b"\xff" * 8, b""] if topics else [b"\xff" * 8, b""])

    async def tell(self, who: bytes, frames: list[bytes]) -> None:
        await self._replay.send_multipart([who, b"", *frames])

    def close(self) -> None:
        self._events.close()
        self._replay.close()
