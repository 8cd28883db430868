"""Flag before environment before file before default, and every value tells where it came from."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import explain, shapes
from headrace.config.errors import ConfigError
from headrace.config.resolve import Resolved, resolve, resolved
from headrace.config.schema import JournalSpec, ServerSpec, Settings
from headrace.policy.ordering.orders import Fifo, Ordering, TenantFirst
from tests.config.configs import BASE

EXAMPLE = Path(__file__).parents[2] / "examples" / "deployment.yaml"
SERVER = "server:\n  port: 8001\n"


def settled(
    text: str = BASE, env: dict[str, str] | None = None, flags: dict[str, str] | None = None
) -> Resolved:
    return resolved(text, "d", Path(), env or {}, flags or {})


def test_flag_beats_environment_beats_file_beats_default() -> None:
    env, flags = {"HEADRACE_SERVER__PORT": "8002"}, {"server.port": "8003"}
    for found, port, source in (
        (settled(), 8_000, "default"),
        (settled(BASE + SERVER), 8_001, "d:11"),
        (settled(BASE + SERVER, env), 8_002, "environment HEADRACE_SERVER__PORT"),
        (settled(BASE + SERVER, env, flags), 8_003, "flag server.port"),
    ):
        assert found.settings.server.port == port
        assert explain.sources(found)["server.port"] == source


@pytest.mark.parametrize(
    ("name", "text", "path", "value"),
    [
        ("DECISION_LOG", "12", "decision_log", "12"),
        ("DECISION_LOG", "null", "decision_log", None),
        ("JOURNAL__KEEP_GIB", "2", "journal.keep_gib", 2.0),
        ("SERVER__TRUSTED_REPLAY", "true", "server.trusted_replay", True),
        ("DEPLOYMENT__MODELS__0__REVISION", "2", "deployment.models[0].revision", "2"),
        ("DEPLOYMENT__MODELS__0__ALIASES", "[a, b]", "deployment.models[0].aliases", ["a", "b"]),
        ("DEPLOYMENT__POOLS__0__PROFILE", "a100-8b-tp1", "deployment.pools[0].profile", "a100-8b-tp1"),
        ("DEPLOYMENT__POOLS__0__PROFILE__TOKEN_BUDGET", "99", "deployment.pools[0].profile.token_budget", 99),
        ("DEPLOYMENT__ORDERING__LEND_AFTER_MS", "7", "deployment.ordering.lend_after_ms", 7.0),
        ("DEPLOYMENT__ORDERING__KIND", "fifo", "deployment.ordering.kind", "fifo"),
        ("DEPLOYMENT__CLASSES__1__WEIGHT", "9", "deployment.classes[1].weight", 9),
    ],
)  # fmt: skip
def test_variable_sets_what_its_name_spells(name: str, text: str, path: str, value: object) -> None:
    found = settled(BASE, {f"HEADRACE_{name}": text})
    (row,) = [row for row in explain.rows(found) if row.path == path]
    assert (row.value, row.source) == (value, f"environment HEADRACE_{name}")


def test_part_of_a_default_can_be_set_without_the_rest() -> None:
    found = settled(BASE, {"HEADRACE_DEPLOYMENT__ORDERING__LEND_AFTER_MS": "7"})
    assert found.settings.deployment.ordering == TenantFirst(lend_after_ms=7.0)
    assert explain.sources(found)["deployment.ordering.kind"] == "default"


FIFO = "  ordering: {kind: fifo}\n  tenants:"
LENDING = "  ordering: {kind: tenant_first, lend_after_ms: 5}\n  tenants:"


@pytest.mark.parametrize(
    ("written", "env", "flags", "expected"),
    [
        ("  tenants:", {}, {"kind": "fifo"}, Fifo()),
        ("  tenants:", {"KIND": "fifo"}, {}, Fifo()),
        ("  tenants:", {"LEND_AFTER_MS": "7"}, {"kind": "fifo"}, Fifo()),
        (LENDING, {}, {"kind": "fifo"}, Fifo()),
        (FIFO, {}, {"kind": "tenant_first"}, TenantFirst()),
        (FIFO, {}, {"kind": "tenant_first", "lend_after_ms": "7"}, TenantFirst(lend_after_ms=7.0)),
        (FIFO, {"KIND": "tenant_first"}, {"lend_after_ms": "7"}, TenantFirst(lend_after_ms=7.0)),
        (FIFO, {"KIND": "tenant_first", "LEND_AFTER_MS": "7"}, {}, TenantFirst(lend_after_ms=7.0)),
        (LENDING, {}, {"kind": "tenant_first"}, TenantFirst(lend_after_ms=5.0)),
        (FIFO, {"KIND": "tenant_first"}, {"kind": "fifo"}, Fifo()),
    ],
)
def test_another_kind_starts_from_its_own_defaults(
    written: str, env: dict[str, str], flags: dict[str, str], expected: Ordering
) -> None:
    found = settled(
        BASE.replace("  tenants:", written),
        {f"HEADRACE_DEPLOYMENT__ORDERING__{name}": text for name, text in env.items()},
        {f"deployment.ordering.{name}": text for name, text in flags.items()},
    )
    assert found.settings.deployment.ordering == expected


def test_a_setting_of_the_kind_that_was_is_an_error_beside_another() -> None:
    given = {"deployment.ordering.kind": "fifo", "deployment.ordering.lend_after_ms": "7"}
    with pytest.raises(ConfigError, match="unknown field `lend_after_ms`"):
        settled(BASE, {}, given)


def test_every_union_is_told_apart_by_its_kind() -> None:
    """Kinds are set first, which takes one name for all."""
    names: set[str | None] = set()
    seen: set[type[msgspec.Struct]] = set()
    left: list[Any] = [Settings]
    while left:
        type_ = left.pop()
        for struct in shapes.structs(type_):
            names.add(struct.__struct_config__.tag_field)
            if struct not in seen:
                seen.add(struct)
                left += [field.type for field in shapes.fields(struct).values()]
        inner = (shapes.item_type(type_, 0), shapes.value_type(type_))
        left += [one for one in inner if one is not None]
    assert names == {None, "kind"}


def test_variables_that_are_no_settings_are_left_alone() -> None:
    found = settled(BASE, {"HEADRACE_DATA": "/x", "HEADRACE": "y", "PATH": "z"})
    assert found.settings == settled().settings


@pytest.mark.parametrize(
    ("env", "flags", "message"),
    [
        (
            {"HEADRACE_SERVER__PRT": "1"},
            {},
            (
                "environment HEADRACE_SERVER__PRT: unknown field `prt` at `$.server` "
                "(did you mean `port`?)"
            ),
        ),
        (
            {"HEADRACE_SERVR__PORT": "1"},
            {},
            (
                "environment HEADRACE_SERVR__PORT: unknown field `servr` at `$` "
                "(did you mean `server`?)"
            ),
        ),
        (
            {"HEADRACE_SERVER__PORT": "x"},
            {},
            "environment HEADRACE_SERVER__PORT: expected `int`, got `str` at `$.server.port`",
        ),
        (
            {"HEADRACE_DEPLOYMENT__POOLS__1__REPLICAS": "1"},
            {},
            (
                "environment HEADRACE_DEPLOYMENT__POOLS__1__REPLICAS: no item `1`: there are 1 "
                "at `$.deployment.pools`"
            ),
        ),
        (
            {},
            {"server.port.x": "1"},
            "flag server.port.x: nothing to set below, so no `x` at `$.server.port`",
        ),
        ({}, {"server.port": "["}, "flag server.port:2:1: not YAML: "),
        (
            {},
            {"deployment.pools[0].model": "n"},
            "flag deployment.pools[0].model: unknown model `n` at `$.deployment.pools[0].model`",
        ),
        (
            {"HEADRACE_DEPLOYMENT__POOLS__0__PROFILE": "x"},
            {},
            "environment HEADRACE_DEPLOYMENT__POOLS__0__PROFILE: unknown profile 'x' ",
        ),
    ],
)
def test_fault_of_a_variable_or_flag_names_it(
    env: dict[str, str], flags: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        settled(BASE, env, flags)
    assert message in str(caught.value)
    assert any(line.startswith(message) for line in str(caught.value).splitlines())


def test_variable_does_not_hide_a_fault_of_the_file() -> None:
    with pytest.raises(ConfigError, match=r"^d:10: expected `mapping`, got `int` at `\$.server`$"):
        settled(BASE + "server: 5\n", {"HEADRACE_SERVER__PORT": "1"})


def test_explain_tells_every_setting_with_its_reason() -> None:
    found = explain.rows(resolve(EXAMPLE, {}, {}))
    by_path = {row.path: row for row in found}
    assert len(by_path) == len(found)
    assert by_path["deployment.pools[0].profile"] == explain.Row(
        path="deployment.pools[0].profile",
        value="h100-8b-tp1",
        source=f"{EXAMPLE}:16",
        about="Hardware profile: step times, KV pool and limits.",
    )
    silent = [row.path for row in found if not row.path.startswith("deployment") and not row.about]
    assert silent == []


def test_docs_are_read_off_the_source() -> None:
    assert explain.docs(JournalSpec)["path"] == "Folder of the segments; none: no journal."
    missing = [f for f in ServerSpec.__struct_fields__ if f not in explain.docs(ServerSpec)]
    assert missing == []


def test_docs_of_a_struct_without_source_are_empty() -> None:
    made = msgspec.defstruct("Made", [("x", int)])
    assert explain.docs(made) == {}


@given(
    st.dictionaries(
        st.sampled_from(
            ["SERVER", "SERVER__PORT", "KEYS", "DEPLOYMENT__POOLS__0__PROFILE", "DEPLOYMENT"]
        ).map("HEADRACE_{}".format),
        st.text(max_size=12),
    ),
    st.dictionaries(
        st.lists(st.sampled_from(["server", "port", "deployment", "pools", "0", ""])).map(".".join),
        st.text(max_size=12),
        max_size=2,
    ),
)
def test_any_override_resolves_or_is_a_config_error(
    env: dict[str, str], flags: dict[str, str]
) -> None:
    try:
        found = settled(BASE, env, flags).settings
    except ConfigError:
        return
    assert isinstance(found, Settings)
