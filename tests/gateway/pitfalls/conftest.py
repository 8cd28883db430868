"""A world for each test; whatever is left of it at its end leaked."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.gateway.pitfalls.scenes import ENGINE_KEY, World


@pytest_asyncio.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """Yield a world that is not started yet; assert that nothing of it is left."""
    monkeypatch.setenv("PITFALLS_ENGINE_KEY", ENGINE_KEY)
    made = World(tmp_path)
    yield made
    loop: Any = made.loop
    with loop.looptime_enabled():  # virtual time stands still outside of tests
        await made.finish()
