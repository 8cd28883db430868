"""A scene for each test, on asyncio's own loop and on uvloop; whatever is open at its end leaked."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest_asyncio
import uvloop

from tests.adapters.upstream.scenes import Scene


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Name the loops that serve live."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture
async def scene() -> AsyncIterator[Scene]:
    """Yield a scene; assert that nothing of it is left."""
    made = Scene()
    yield made
    await made.assert_nothing_left()
