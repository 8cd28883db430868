"""What is shown of a configuration, and how two differ."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.config.changes import HIDDEN, changes, public
from headrace.config.check import Problem, Severity, is_local, problems
from headrace.config.load import parse
from headrace.config.resolve import resolved
from headrace.config.schema import AdminKeySpec, AdminSpec, KeySpec, Settings
from tests.config.configs import BASE

HASH = "sha256:" + "a" * 64
OTHER = "sha256:" + "b" * 64


def settings() -> Settings:
    given = parse(BASE, Settings, "base")
    return replace(given, keys=(KeySpec(name="k", tenant="t", hash=HASH),))


def errors(given: Settings) -> list[Problem]:
    return [one for one in problems(given) if one.severity is Severity.ERROR]


def test_secrets_are_left_out() -> None:
    shown = public(settings())
    assert shown["keys"] == [{"name": "k", "tenant": "t"}]
    assert shown["server"]["port"] == 8_000
    assert "a" * 64 not in str(shown)


def test_equal_settings_do_not_differ() -> None:
    assert changes(settings(), settings()) == {}


def test_what_differs_is_named_by_its_path_and_secrets_are_not_told() -> None:
    old = settings()
    new = replace(
        old,
        keys=(KeySpec(name="k", tenant="t", hash=OTHER),),
        server=replace(old.server, port=9),
        admin=AdminSpec(open=True),
    )
    found = changes(old, new)
    assert found["keys[0].hash"] == (HIDDEN, HIDDEN)
    assert found["server.port"] == (8_000, 9)
    assert found["admin.open"] == (None, True)
    assert changes(old, replace(old, keys=()))["keys[0].name"] == ("k", None)


@pytest.mark.parametrize(
    ("admin", "words"),
    [
        (AdminSpec(), "give `keys`"),
        (AdminSpec(open=True, host="0.0.0.0"), "only a loopback address"),
        (AdminSpec(open=True, keys=(AdminKeySpec(name="a", hash=OTHER),)), "no key is ever asked"),
        (AdminSpec(open=True, port=8_000), "the traffic's own"),
        (AdminSpec(keys=(AdminKeySpec(name="a", hash=HASH),)), "already at `$.keys[0].hash`"),
        (
            AdminSpec(
                keys=(
                    AdminKeySpec(name="a", hash=OTHER),
                    AdminKeySpec(name="a", hash=OTHER[:-1] + "c"),
                )
            ),
            "admin key `a` is already",
        ),
    ],
)
def test_an_admin_listener_that_is_open_to_many_or_to_none_is_refused(
    admin: AdminSpec, words: str
) -> None:
    (found,) = errors(replace(settings(), admin=admin))
    assert words in found.message
    assert found.path.startswith("$.admin")


@pytest.mark.parametrize(
    "admin",
    [AdminSpec(open=True), AdminSpec(host="0.0.0.0", keys=(AdminKeySpec(name="a", hash=OTHER),))],
)
def test_an_admin_listener_with_a_key_or_on_this_machine_alone_is_right(admin: AdminSpec) -> None:
    assert errors(replace(settings(), admin=admin)) == []


def test_a_part_of_what_is_off_can_be_set_by_flag(tmp_path: Path) -> None:
    found = resolved(BASE, "base", tmp_path, {}, {"admin.open": "true"})
    assert found.settings.admin == AdminSpec(open=True)


@pytest.mark.parametrize(
    ("host", "local"),
    [("localhost", True), ("127.0.0.9", True), ("::1", True), ("10.0.0.1", False), ("x", False)],
)
def test_loopback_is_this_machine(host: str, *, local: bool) -> None:
    assert is_local(host) is local
