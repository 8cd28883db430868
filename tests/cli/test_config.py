"""`headrace config` from the outside: output, errors in one line, exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import __version__
from headrace.cli import COMMANDS, GROUPS, errors, main
from headrace.trace.lines import TraceError
from tests.config.configs import BASE

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "deployment.yaml")

Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_SERVER__PORT", raising=False)


def test_check_says_ok(capsys: Output) -> None:
    assert main(["config", "check", EXAMPLE]) == 0
    assert capsys.readouterr() == (f"{EXAMPLE}: ok\n", "")


def test_check_tells_each_fault_in_one_line(capsys: Output, tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    path.write_text("server: {prot: 1}\ndeployment: {}\n")
    assert main(["config", "check", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"headrace: {path}:1: unknown field `prot` at `$.server` (did you mean `port`?)",
        f"headrace: {path}:2: missing field `models` at `$.deployment`",
        f"headrace: {path}:2: missing field `pools` at `$.deployment`",
        f"headrace: {path}:2: missing field `tenants` at `$.deployment`",
    ]


@pytest.mark.parametrize(
    "command", [("config", "check"), ("config", "explain"), ("serve", "--config")]
)
def test_an_engine_that_cannot_be_ordered_so_is_refused_before_anything_starts(
    capsys: Output, tmp_path: Path, command: tuple[str, ...]
) -> None:
    path = tmp_path / "d.yaml"
    one = "{url: 'http://h:1', pool: p, kind: llamacpp, scheduler: headrace}"
    path.write_text(f"{BASE}upstreams:\n- {one}\n")
    assert main([*command, str(path)]) == 2
    assert capsys.readouterr().err == (
        f"headrace: {path}:11: no engine of kind `llamacpp` has the scheduler `headrace` "
        "at `$.upstreams[0].scheduler` (known: own)\n"
    )


def test_check_warns_and_still_passes(capsys: Output) -> None:
    wide = "--set=deployment.window.prefill_ms=1"
    assert main(["config", "check", EXAMPLE, wide, "--set", "server.port=1"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{EXAMPLE}: ok\n"
    assert err.startswith("headrace: warning: flag deployment.window.prefill_ms: 1 ms is less than")


def test_check_as_json(capsys: Output) -> None:
    assert main(["config", "check", EXAMPLE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "errors": [], "warnings": []}
    assert main(["config", "check", "--json", "--set", "server.port=x", EXAMPLE]) == 2
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out)["errors"] == [
        {
            "origin": {"source": "flag server.port", "line": None, "column": None},
            "message": "expected `int`, got `str`",
            "path": "$.server.port",
            "hint": "",
        }
    ]


def test_explain_shows_value_source_and_reason(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_SERVER__PORT", "9000")
    assert main(["config", "explain", EXAMPLE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "server.port = 9000  [environment HEADRACE_SERVER__PORT]" in lines
    line = Path(EXAMPLE).read_text().splitlines().index("  seed: 0") + 1
    assert f"emulator.seed = 0  [{EXAMPLE}:{line}]" in lines
    assert "    Seed of their noise. 0: same input, same run." in lines
    assert "server.drain_s = 30.0  [default]" in lines
    assert max(map(len, lines)) <= 200


def test_explain_as_json(capsys: Output) -> None:
    assert main(["config", "explain", EXAMPLE, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"path", "value", "source", "about"} == set(rows[0])


def test_set_without_a_value_is_refused(capsys: Output) -> None:
    assert main(["config", "explain", EXAMPLE, "--set", "server.port"]) == 2
    assert capsys.readouterr().err == "headrace: flag --set server.port: give PATH=VALUE\n"


def test_schema_is_json_schema(capsys: Output) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["$ref"] == "#/$defs/Settings"
    assert schema["$defs"]["ServerSpec"]["properties"]["port"]["maximum"] == 65_535


def test_version_and_help(capsys: Output) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"
    assert main([]) == 0
    assert "config" in capsys.readouterr().out


@pytest.mark.parametrize("words", [words for words, _, _ in COMMANDS])
def test_every_command_has_help(capsys: Output, words: str) -> None:
    assert main([*words.split(), "--help"]) == 0
    assert f"Usage: headrace {words}" in capsys.readouterr().out


def test_every_group_has_help() -> None:
    assert {words.split()[0] for words, _, _ in COMMANDS if " " in words} == set(GROUPS)


@pytest.mark.parametrize(
    ("argv", "start"),
    [
        (["bogus"], "headrace: Unknown command"),
        (["config", "check"], "headrace: "),
        (["config", "check", EXAMPLE, "--nope"], "headrace: Unknown option"),
        (["config", "check", "nowhere.yaml"], "headrace: nowhere.yaml: no such file or directory"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(capsys: Output, argv: list[str], start: str) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(start)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (TraceError(Path("t"), 3, "bad"), 2, "headrace: t:3: bad\n"),
        (FileNotFoundError(2, "No such file", "f"), 2, "headrace: f: no such file\n"),
        (PermissionError(13, "Permission denied"), 2, "headrace: permission denied\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_known_faults_become_exit_codes(
    capsys: Output, error: BaseException, code: int, message: str
) -> None:
    def act() -> None:
        raise error

    with errors.reported() as outcome:
        act()
    assert outcome.code == code
    assert capsys.readouterr().err == message


def test_fault_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(ValueError, match="ours"), errors.reported():
        raise ValueError("ours")


def test_reader_that_leaves_ends_the_command_quietly() -> None:
    waits = "import sys; sys.stdin.read()"  # until the reader has gone
    code = "from headrace.cli import main; sys.exit(main(['config', 'schema']))"
    with subprocess.Popen(
        [sys.executable, "-c", f"{waits}; {code}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdin is not None
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_start_imports_neither_the_plane_nor_yaml() -> None:
    code = (
        "import sys; from headrace.cli import app; app();"
        "print([m for m in ('yaml', 'headrace.policy', 'headrace.trace') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
