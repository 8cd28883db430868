"""What tests of several rooms share: asking for a service that may not be there."""

import os
from typing import NoReturn

import pytest

REQUIRE = "HEADRACE_TEST_REQUIRE"


def required_services() -> frozenset[str]:
    """Return the names in HEADRACE_TEST_REQUIRE, a comma-separated list."""
    return frozenset(name.strip() for name in os.environ.get(REQUIRE, "").split(",")) - {""}


def require_service(name: str, reason: str) -> NoReturn:
    """Skip the running test for want of a service; fail it where that service was promised.

    Call it once `name` is known to be missing. A place that promises a service lists it in
    HEADRACE_TEST_REQUIRE, so that a broken one cannot pass for an absent one.
    """
    if name in required_services():
        pytest.fail(f"{REQUIRE} lists {name}, but: {reason}", pytrace=False)
    pytest.skip(f"{name}: {reason}")
