"""A key is told once; what is kept of it is its hash."""

import hashlib

import pytest

from headrace.cli import main
from headrace.config.load import parse
from headrace.config.schema import AdminKeySpec, KeySpec

Output = pytest.CaptureFixture[str]


def test_new_key_matches_the_line_that_grants_it(capsys: Output) -> None:
    assert main(["key", "new", "--tenant", "chat", "--name", "laptop"]) == 0
    key, line = capsys.readouterr().out.splitlines()
    (spec,) = parse(line, tuple[KeySpec, ...], "keys")
    assert (spec.name, spec.tenant) == ("laptop", "chat")
    assert spec.hash == f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
    assert key.startswith("sk-hr-")
    assert len(key) >= 32


def test_no_two_keys_are_alike(capsys: Output) -> None:
    for _ in range(2):
        assert main(["key", "new", "--tenant", "chat"]) == 0
    first, _, second, _ = capsys.readouterr().out.splitlines()
    assert first != second


@pytest.mark.parametrize("tenant", ["../x", "", 'a"b', "x" * 65])
def test_key_of_an_impossible_tenant_is_refused(capsys: Output, tenant: str) -> None:
    assert main(["key", "new", f"--tenant={tenant}", "--name", "n"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headrace: ")


def test_an_admin_key_names_no_tenant(capsys: Output) -> None:
    assert main(["key", "new", "--admin", "--name", "ops"]) == 0
    out, err = capsys.readouterr()
    key, line = out.splitlines()
    (spec,) = parse(line, tuple[AdminKeySpec, ...], "keys")
    assert spec.name == "ops"
    assert spec.hash == f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
    assert "`admin.keys:`" in err


@pytest.mark.parametrize("given", [[], ["--admin", "--tenant", "chat"]])
def test_a_key_is_either_a_tenants_or_an_admins(capsys: Output, given: list[str]) -> None:
    assert main(["key", "new", *given]) == 2
    assert "either --tenant or --admin" in capsys.readouterr().err
