"""What is wrong is said in one line with file, line and path; nothing else is ever raised."""

import json
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import tree
from headrace.config.errors import SHOWN_MAX, ConfigError, Origin
from headrace.config.load import load, parse
from headrace.config.schema import JournalSpec, Settings
from headrace.config.tree import BYTES_MAX, DEPTH_MAX, planted, read_tree
from headrace.policy.catalog import PlaneConfig, canonical, decode
from headrace.policy.ordering.orders import TenantFirst
from tests.config.configs import BASE

EXAMPLE = Path(__file__).parents[2] / "examples" / "deployment.yaml"

# (lines after BASE, which has nine, and the one error they make)
BROKEN = {
    "unknown field at the top": ("sever: {}\n", "d:10: unknown field `sever` at `$` (did you mean `server`?)"),
    "unknown field one level down": (
        "server:\n  host: h\n  prot: 1\n",
        "d:12: unknown field `prot` at `$.server` (did you mean `port`?)",
    ),
    "unknown field in an item": (
        "keys:\n  - name: k\n    tenant: t\n    hash: sha256:%s\n    zzz: 1\n" % ("0" * 64),
        "d:14: unknown field `zzz` at `$.keys[0]` (known: name, tenant, hash)",
    ),
    "a field of another time": (
        "upstreams:\n  - url: http://h:1\n    pool: p\n    priority: true\n",
        (
            "d:13: unknown field `priority` at `$.upstreams[0]` "
            "(it is `scheduler` now: `priority` where this was true, else `own`)"
        ),
    ),
    "a scheduler that is none": (
        "upstreams:\n  - url: http://h:1\n    pool: p\n    scheduler: true\n",
        (
            "d:13: expected `str`, got `bool` at `$.upstreams[0].scheduler` "
            "(one of own, priority, headrace)"
        ),
    ),
    "missing field": (
        "keys:\n  - name: k\n    tenant: t\n",
        "d:11: missing field `hash` at `$.keys[0]`",
    ),
    "out of range": (
        "server:\n  port: 70000\n",
        "d:11: expected `int` <= 65535 at `$.server.port` (got 70000)",
    ),
    "wrong type": ("server: {port: '80'}\n", "d:10: expected `int`, got `str` at `$.server.port`"),
    "no mapping": ("server: [1]\n", "d:10: expected `mapping`, got `list` at `$.server`"),
    "YAML 1.1's words are strings": (
        "server: {trusted_replay: yes}\n",
        "d:10: expected `bool`, got `str` at `$.server.trusted_replay`",
    ),
    "a secret is not repeated": (
        "keys: [{name: k, tenant: t, hash: hunter2}]\n",
        "d:10: expected `str` matching regex '^sha256:[0-9a-f]{64}$(?!\\\\n)' at `$.keys[0].hash`",
    ),
    "a struct's own check": (
        "journal:\n  keep_gib: 0.1\n",
        "d:10: keep_gib 0.1 holds fewer than two segments at `$.journal`",
    ),
    "duplicate key": (
        "server: {}\njournal: {}\nserver: {}\n",
        "d:12: duplicate key `server` (first on line 10)",
    ),
    "alias in itself": (
        "server: &a\n  host: *a\n",
        "d:11: alias *a stands inside what it names",
    ),
    "unknown alias": ("server: *a\n", "d:10: unknown alias *a"),
    "tag": ("server: !!python/name:os.system {}\n", "d:10: tag tag:yaml.org,2002:python/name:os.system is not supported"),
    "key that is a list": ("[1]: 2\n", "d:10: a key must be a single word, not a collection"),
    "second document": ("---\na: 1\n", "d:10: a second document: one file, one document"),
    "endless number": ("emulator: {seed: %s}\n" % ("9" * 41), "d:10: a number of more than 40 digits"),
    "infinite number": ("emulator: {noise_percent: 1e999}\n", "d:10: 1e999 is too large a number"),
}  # fmt: skip

# (BASE's text, what replaces it, error)
BROKEN_PLANE = {
    "unknown field deep down": (
        "profile: h100-8b-tp1",
        "profile: h100-8b-tp1\n      zone: z\n      replcas: 2",
        "d:9: unknown field `replcas` at `$.deployment.pools[0]` (did you mean `replicas`?)",
    ),
    "unknown profile": (
        "h100-8b-tp1",
        "h100-9b",
        (
            "d:7: unknown profile 'h100-9b' at `$.deployment.pools[0].profile` (a path ending in .yaml, "
            ".yml or .json, or one of a100-70b-tp4, a100-8b-tp1, cpu1-smollm2-135m, h100-70b-tp4, h100-70b-tp8, "
            "h100-8b-tp1, h200-70b-tp2, h200-70b-tp4, h200-8b-tp1)"
        ),
    ),
    "profile file that is not there": (
        "h100-8b-tp1",
        "nowhere.yaml",
        "d:7: profile nowhere.yaml: no such file or directory at `$.deployment.pools[0].profile`",
    ),
    "unknown kind": (
        "  tenants:",
        "  ordering:\n    kind: fifi\n  tenants:",
        (
            "d:9: unknown kind 'fifi' at `$.deployment.ordering.kind` "
            "(one of edf, fifo, least_slack, niyama, score, sjf, tenant_first, vtc)"
        ),
    ),
    "unknown field of a kind": (
        "  tenants:",
        "  ordering:\n    kind: tenant_first\n    lend_after: 3\n  tenants:",
        (
            "d:10: unknown field `lend_after` at `$.deployment.ordering` "
            "(did you mean `lend_after_ms`?)"
        ),
    ),
    "missing kind": (
        "  tenants:",
        "  ordering: {}\n  tenants:",
        "d:8: object missing required field `kind` at `$.deployment.ordering`",
    ),
    "kind that is a number": (
        "  tenants:",
        "  ordering: {kind: 3}\n  tenants:",
        "d:8: expected `str`, got `int` at `$.deployment.ordering.kind`",
    ),
    "word that is none of the enumeration": (
        "  tenants:",
        "  admission:\n    mode: enforc\n  tenants:",
        "d:9: invalid enum value 'enforc' at `$.deployment.admission.mode` (one of enforce, audit, observe)",
    ),
    "stale below poll": (
        "  tenants:",
        "  reports:\n    poll_ms: 1000\n    stale_ms: 10\n  tenants:",
        "d:8: stale_ms 10.0 is below poll_ms 1000.0 at `$.deployment.reports`",
    ),
    "bad name": (
        "- name: t",
        "- name: -t",
        (
            "d:9: expected `str` matching regex '^[A-Za-z0-9][A-Za-z0-9._:/-]*$(?!\\\\n)' "
            "at `$.deployment.tenants[0].name` (got '-t')"
        ),
    ),
    "item of the wrong type": (
        "- name: m",
        "- name: m\n      aliases:\n        - a\n        - 3",
        "d:6: expected `str`, got `int` at `$.deployment.models[0].aliases[1]`",
    ),
    "too short a list": (
        "\n    - name: t",
        " []",
        "d:8: expected `list` of length >= 1 at `$.deployment.tenants`",
    ),
    "null for a mapping": (
        "\n    - name: t",
        "",
        "d:8: expected `list`, got `null` at `$.deployment.tenants`",
    ),
}


def faults(text: str, name: str = "d") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(text, Settings, name)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("case", list(BROKEN))
def test_fault_names_line_path_and_remedy(case: str) -> None:
    text, message = BROKEN[case]
    assert faults(BASE + text) == [message]


@pytest.mark.parametrize("case", list(BROKEN_PLANE))
def test_fault_of_the_deployment_names_line_path_and_remedy(case: str) -> None:
    old, new, message = BROKEN_PLANE[case]
    assert old in BASE
    assert faults(BASE.replace(old, new)) == [message]


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("a: [1\n", "d:2:1: not YAML: "),
        ("a: b: c\n", "d:1:5: not YAML: "),
        ("a: 'x\n", "d:"),
        ("a: \x00", "d"),
        ("a: \ud800", "d: not YAML: "),
        ("a: [" + "[" * 100, "d:1: nested deeper than 32 levels"),
        ("a: %s" % ("x" * BYTES_MAX), "d: longer than 4194304 bytes"),
    ],
    ids=["open list", "two colons", "open quote", "nul", "surrogate", "deep", "long"],
)
def test_text_that_is_no_yaml_is_refused_with_line_and_column(text: str, start: str) -> None:
    (message,) = faults(text)
    assert message.startswith(start)


def test_the_parser_without_libyaml_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = read_tree(EXAMPLE.read_text(), "d")
    monkeypatch.setattr(tree, "_LOADER", yaml.SafeLoader)
    assert read_tree(EXAMPLE.read_text(), "d") == fast
    assert faults("a: [" + "[" * 5_000) == ["d:1: nested deeper than 32 levels"]
    assert faults("a: b: c\n")[0].startswith("d:1:5: not YAML: ")


def test_empty_text_is_no_configuration() -> None:
    assert faults("") == ["d:1: expected `mapping`, got `null` at `$`"]


def test_all_independent_faults_are_told_at_once() -> None:
    text = BASE.replace("- name: t", "- name: t\n      weigth: 2\n    - weight: 0")
    assert faults(text + "server:\n  port: x\n  drain_s: -1\nfoo: 1\n") == [
        "d:10: unknown field `weigth` at `$.deployment.tenants[0]` (did you mean `weight`?)",
        "d:11: missing field `name` at `$.deployment.tenants[1]`",
        "d:11: expected `int` >= 1 at `$.deployment.tenants[1].weight` (got 0)",
        "d:13: expected `int`, got `str` at `$.server.port`",
        "d:14: expected `float` >= 0.0 at `$.server.drain_s` (got -1)",
        (
            "d:15: unknown field `foo` at `$` "
            "(known: deployment, keys, server, upstreams, groups, token_counts, admin, emulator, "
            "journal, decision_log, jobs)"
        ),
    ]


def test_many_faults_are_told_in_part() -> None:
    many = "".join(f"x{i}: 1\n" for i in range(SHOWN_MAX + 5))
    lines = faults(BASE + many)
    assert len(lines) == SHOWN_MAX + 1
    assert lines[-1] == "and 5 more"


def test_arithmetic_that_overflows_in_a_check_is_a_fault_with_a_path() -> None:
    profile = msgspec.to_builtins(parse(BASE, Settings, "d").deployment.pools[0].profile)
    profile["decode"]["a_ms"] = 1e308
    text = BASE.replace("h100-8b-tp1", json.dumps(profile))
    (message,) = faults(text)
    assert message.startswith("d:7: out of range: ")
    assert message.endswith(" at `$.deployment.pools[0].profile`")


def test_aliases_repeat_values_but_cannot_explode() -> None:
    shared = read_tree("a: &x {p: 1}\nb: *x\nc: [*x, *x]\n", "d")
    assert shared.plain() == {"a": {"p": 1}, "b": {"p": 1}, "c": [{"p": 1}, {"p": 1}]}
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 20)
    )
    with pytest.raises(ConfigError, match=r"^d:5: more than 100000 values$"):
        read_tree(bomb, "d")
    ladder = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 99))
    with pytest.raises(ConfigError, match=rf"nested deeper than {DEPTH_MAX} levels"):
        read_tree(ladder, "d")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("-3", -3),
        ("007", 7),
        ("0x1f", 31),
        ("0o17", 15),
        ("1e-5", 1e-5),
        ("1.", 1.0),
        (".5", 0.5),
        ("~", None),
        ("", None),
        ("True", True),
        ("no", "no"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        (".inf", ".inf"),
        ("2001-01-01", "2001-01-01"),
        ("'12'", "12"),
        ("<<", "<<"),
    ],
)
def test_scalars_are_those_of_the_core_schema(text: str, value: object) -> None:
    got = read_tree(f"a: {text}", "d").plain()
    assert got == {"a": value}
    assert isinstance(got, dict)
    assert type(got["a"]) is type(value)


def test_profile_is_named_or_given_or_in_a_file_beside_the_configuration(tmp_path: Path) -> None:
    named = parse(BASE, Settings, "d").deployment.pools[0].profile
    assert named.name == "h100-8b-tp1"
    given_text = json.dumps(msgspec.to_builtins(named))
    given_here = parse(BASE.replace("h100-8b-tp1", given_text), Settings, "d")
    (tmp_path / "own.yaml").write_text(given_text)
    (tmp_path / "d.yaml").write_text(BASE.replace("h100-8b-tp1", "own.yaml"))
    in_file = load(tmp_path / "d.yaml", Settings)
    assert given_here.deployment.pools[0].profile == named
    assert in_file.deployment.pools[0].profile == named


def test_fault_in_a_profile_file_is_told_at_its_own_line(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("name: own\nsource: s\nhardwar: h\n")
    (tmp_path / "d.yaml").write_text(BASE.replace("h100-8b-tp1", "own.yaml"))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "d.yaml", Settings)
    assert str(caught.value).splitlines()[-1] == (
        f"{tmp_path}/own.yaml:3: unknown field `hardwar` at `$.deployment.pools[0].profile` "
        "(did you mean `hardware`?)"
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, ": no such file or directory"),
        (b"name: own\nsource: \xff\n", ":2: not UTF-8"),
        (b"#" * (BYTES_MAX + 1), f": longer than {BYTES_MAX} bytes"),
    ],
    ids=["missing", "not UTF-8", "too long"],
)
def test_profile_file_that_cannot_be_read_is_told_where_it_is_named(
    tmp_path: Path, content: bytes | None, told: str
) -> None:
    if content is not None:
        (tmp_path / "own.yaml").write_bytes(content)
    (tmp_path / "d.yaml").write_text(BASE.replace("h100-8b-tp1", "own.yaml"))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "d.yaml", Settings)
    assert str(caught.value) == (
        f"{tmp_path}/d.yaml:7: profile {tmp_path}/own.yaml{told} at `$.deployment.pools[0].profile`"
    )


@pytest.mark.parametrize("content", [b"a: \xff\n", b"\n\xc3\x28"])
def test_file_that_is_not_utf8_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "d.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^{path}:[12]: not UTF-8$"):
        load(path, Settings)


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or directory"):
        load(tmp_path / "none.yaml", Settings)
    with pytest.raises(ConfigError, match="is a directory"):
        load(tmp_path, Settings)
    (tmp_path / "long.yaml").write_bytes(b"#" * (BYTES_MAX + 1))
    with pytest.raises(ConfigError, match="longer than"):
        load(tmp_path / "long.yaml", Settings)


def test_json_and_yaml_give_the_same_canonical_bytes(tmp_path: Path) -> None:
    yaml_one = load(EXAMPLE, Settings)
    as_json = json.dumps(msgspec.to_builtins(yaml_one), indent="\t")
    (tmp_path / "d.json").write_text("\ufeff" + as_json, encoding="utf-8")
    json_one = load(tmp_path / "d.json", Settings)
    assert json_one == yaml_one
    again = canonical(decode(canonical(yaml_one.deployment)))
    assert canonical(json_one.deployment) == again


def test_any_struct_can_be_loaded() -> None:
    assert parse("{kind: tenant_first}", TenantFirst, "x") == TenantFirst()
    plane = parse(BASE, Settings, "d").deployment
    text = canonical(plane).decode()
    assert canonical(parse(text, PlaneConfig, "d.json")) == text.encode()


def refusal(text: str, name: str) -> str | None:
    """Return what a text is refused with; None: it parses."""
    try:
        parse(text, Settings, name)
    except ConfigError as error:
        return str(error)
    return None


@given(st.text(max_size=200))
def test_any_text_parses_or_is_a_config_error(text: str) -> None:
    assert refusal(text, "d") != ""


LINES = [*BASE.splitlines(), *(line for text, _ in BROKEN.values() for line in text.splitlines())]


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(LINES), max_size=25),
    st.text(alphabet=" \t&*a[]{}:-!|>'\"0", max_size=8),
)
def test_any_mixture_of_lines_parses_or_is_a_config_error(lines: list[str], noise: str) -> None:
    assert refusal("\n".join(lines) + noise, "d") != ""


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)


@settings(max_examples=200)
@given(
    st.sampled_from(["models", "pools", "tenants", "classes", "slos", "ordering", "reports"]), JSONS
)
def test_any_value_of_a_section_parses_or_is_a_config_error(key: str, value: object) -> None:
    base = msgspec.to_builtins(parse(BASE, Settings, "d"))
    base["deployment"][key] = value
    assert (refusal(json.dumps(base), "d.json") or "d.json").startswith("d.json")


def test_faults_below_free_keys_and_fixed_places_have_paths() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("a: {path: p}\nb: {pth: q}\n", dict[str, JournalSpec], "d")
    assert str(caught.value) == "d:2: unknown field `pth` at `$.b` (did you mean `path`?)"
    with pytest.raises(ConfigError) as caught:
        parse("- 1\n- x\n", tuple[int, int], "d")
    assert str(caught.value) == "d:2: expected `int`, got `str` at `$[1]`"
    with pytest.raises(ConfigError) as caught:
        parse("[1, 2, 3]", tuple[int, int], "d")
    assert str(caught.value) == "d:1: expected `list` of length 2, got 3 at `$`"


def test_key_may_be_named_but_not_borrowed() -> None:
    assert read_tree("&k a: *k\n", "d").plain() == {"a": "a"}
    with pytest.raises(ConfigError, match=r"^d:2: a key must be a single word, not an alias$"):
        read_tree("a: &k b\n*k : c\n", "d")


def test_only_plain_values_are_planted() -> None:
    assert planted({"a": (1, None)}, Origin("here")).plain() == {"a": [1, None]}
    with pytest.raises(TypeError, match="object"):
        planted(object(), Origin("here"))


def test_an_address_with_a_password_in_it_is_not_repeated() -> None:
    """It is refused, and whoever reads the log must not learn it."""
    with pytest.raises(ConfigError) as refused:
        parse(BASE + 'upstreams: [{url: "http://me:hunter2@host:1", pool: p}]\n', Settings, "d")
    assert "url" in str(refused.value)
    assert "hunter2" not in str(refused.value)
