"""What every test runs under: repeatable property tests, and data that may be absent."""

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support import require_service

# One commit, one verdict: examples are drawn from the test itself, and a busy machine is no
# failure. To explore further: pytest --hypothesis-profile=default.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


def pytest_configure() -> None:
    """Say that there is no event loop yet, so that nobody who merely asks for one makes one.

    looptime asks before every test, and before Python 3.14 the first to ask is given a new loop that
    nobody closes; whichever later test it is collected in then fails.
    """
    asyncio.set_event_loop(None)


def data_path() -> Path:
    """Return the data directory, or skip the running test if HEADRACE_DATA is unset."""
    name = os.environ.get("HEADRACE_DATA")
    if not name:
        require_service("data", "HEADRACE_DATA is unset; it names the folder of public traces")
    path = Path(name)
    if not path.is_dir():
        pytest.fail(f"HEADRACE_DATA names no directory: {name}", pytrace=False)
    return path


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `data` before its fixtures run, if there is no data."""
    if item.get_closest_marker("data"):
        data_path()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Return the folder of public traces, hardware profiles and measured runs."""
    return data_path()
