"""What is shown of a configuration, and how two differ."""

from pathlib import Path

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from headrace.config.changes import HIDDEN, TOLD_MAX, changes, first, public
from headrace.config.check import is_local, problems
from headrace.config.load import parse
from headrace.config.problem import Problem, Severity
from headrace.config.resolve import resolved
from headrace.config.schema import (
    AdminKeySpec,
    AdminSpec,
    GroupsSpec,
    KeySpec,
    Settings,
    UpstreamSpec,
)
from headrace.model.deployment import TenantSpec
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


def test_what_children_are_given_in_their_environment_is_shown_nowhere() -> None:
    spec = GroupsSpec(pool="p", command=("run",), env={"HF_TOKEN": "hf-of-the-test"})
    old = replace(settings(), groups=(spec,))
    new = replace(settings(), groups=(replace(spec, env={"HF_TOKEN": "hf-another"}),))
    assert public(old)["groups"][0]["command"] == ["run"]
    told = str(public(old)) + str(changes(old, new)) + str(changes(settings(), old))
    assert "hf-" not in told


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
    assert found["keys[k].hash"] == (HIDDEN, HIDDEN)
    assert found["server.port"] == (8_000, 9)
    assert found["admin.open"] == (None, True)
    assert changes(old, replace(old, keys=())) == {"keys[k]": ({"name": "k", "tenant": "t"}, None)}


def rows(*names: str, **more: str) -> Settings:
    """Return settings with tenants and keys of these names."""
    given = settings()
    tenants = tuple(TenantSpec(name=name) for name in names)
    made = tuple(KeySpec(name=one, tenant=one, hash=more.get(one, HASH)) for one in names)
    return replace(given, keys=made, deployment=replace(given.deployment, tenants=tenants))


def test_things_go_by_their_names_whatever_their_places() -> None:
    names = [f"n{nth}" for nth in range(1_000)]
    found = changes(rows(*names), rows("x", *names[1:500], *names[501:], n7=OTHER))
    assert set(found) == {
        *(
            f"{part}[{name}]"
            for name in ("n0", "n500", "x")
            for part in ("deployment.tenants", "keys")
        ),
        "keys[n7].hash",
    }
    assert found["keys[x]"] == (None, {"name": "x", "tenant": "x"})
    assert HASH not in str(found)
    assert OTHER not in str(found)


def test_another_order_is_a_change() -> None:
    found = changes(rows("a", "b", "c", "d"), rows("a", "d", "c", "e"))
    assert found["keys.order"] == found["deployment.tenants.order"] == ("c", "d")
    assert "keys.order" not in changes(rows("a", "b", "c"), rows("x", "b", "y", "c"))


def test_words_are_told_as_one_and_what_has_no_name_by_its_place() -> None:
    old = rows("a")
    config = old.deployment
    tenant = replace(config.tenants[0], models=("m", "n"))
    new = replace(
        old,
        deployment=replace(config, tenants=(tenant,)),
        upstreams=(UpstreamSpec(url="http://h:1", pool="p"),),
    )
    found = changes(old, new)
    assert found["deployment.tenants[a].models"] in (([], ["m", "n"]), ((), ("m", "n")))
    assert found["upstreams[0].url"] == (None, "http://h:1")


def test_whatever_differs_is_told() -> None:
    """Also where names cannot tell two apart."""
    twice = rows("a", "a")
    for old, new in ((twice, rows("a")), (rows("a"), twice), (twice, rows("a", "a", "a"))):
        assert changes(old, new) != {}


def test_many_changes_are_told_in_part() -> None:
    found = changes(rows(), rows(*(f"n{nth}" for nth in range(TOLD_MAX))))
    some, more = first(found)
    assert (len(some), more) == (TOLD_MAX, TOLD_MAX)
    assert first(some) == (some, UNSET)


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
