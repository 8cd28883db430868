"""A missing service skips a test, unless it was promised."""

import asyncio

import pytest

from tests.conftest import data_path
from tests.support import require_service


def test_a_missing_service_skips_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_TEST_REQUIRE", raising=False)
    with pytest.raises(pytest.skip.Exception, match="valkey: no server on loopback"):
        require_service("valkey", "no server on loopback")


@pytest.mark.parametrize("promised", ["valkey", "postgres, valkey ,"])
def test_a_promised_service_that_is_missing_fails_the_test(
    monkeypatch: pytest.MonkeyPatch, promised: str
) -> None:
    monkeypatch.setenv("HEADRACE_TEST_REQUIRE", promised)
    with pytest.raises(pytest.fail.Exception, match="lists valkey, but: no server"):
        require_service("valkey", "no server on loopback")


def test_a_promise_of_one_service_is_none_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TEST_REQUIRE", "postgres,,")
    with pytest.raises(pytest.skip.Exception):
        require_service("valkey", "no server on loopback")


@pytest.mark.parametrize("value", [None, ""], ids=["unset", "empty"])
def test_absent_data_skips_the_test(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("HEADRACE_TEST_REQUIRE", raising=False)
    monkeypatch.delenv("HEADRACE_DATA", raising=False)
    if value is not None:
        monkeypatch.setenv("HEADRACE_DATA", value)
    with pytest.raises(pytest.skip.Exception, match="HEADRACE_DATA is unset"):
        data_path()


def test_a_wrong_data_folder_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DATA", "no/such/folder")
    with pytest.raises(pytest.fail.Exception, match="names no directory"):
        data_path()


def test_nobody_is_given_a_loop_for_merely_asking() -> None:
    with pytest.raises(RuntimeError, match="no current event loop"):
        asyncio.get_event_loop()
