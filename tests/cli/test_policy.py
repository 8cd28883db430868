"""`headrace policy` from the outside: what it asks of the listener, what it prints, and what goes wrong."""

import json
from typing import Any

import msgspec
import pytest

from headrace.cli import main
from tests.cli.test_top import KEY, Answering, answering

Output = pytest.CaptureFixture[str]
REVISIONS = [
    {"revision": 1, "at": "2026-03-01T09:00:00Z", "who": "", "what": "start", "changes": {}},
    {
        "revision": 2,
        "at": "2026-03-01T09:30:00Z",
        "who": "ops",
        "what": "policy",
        "changes": {"deployment.admission.margin_ms": [50.0, 80.0]},
        "more": 3,
    },
]
STANDING = {
    "revision": 2,
    "frozen": True,
    "policy": {
        "admission": {"mode": "enforce", "margin_ms": 80.0, "modes": {"budget": None}},
        "output_budget": {"tokens": None, "classes": {}},
    },
    "revisions": REVISIONS,
}
APPLIED: dict[str, Any] = {
    "revision": 3,
    "changes": {"deployment.window.prefill_ms": [150.0, 80.0]},
    "warnings": ["80 ms is less than one full step"],
}


class Listener(Answering):
    asked: list[Any] = []  # noqa: RUF012
    said: Any = APPLIED
    status = 200

    def do_GET(self) -> None:  # noqa: N802 - the library calls it so
        self.answer(STANDING)

    def do_POST(self) -> None:  # noqa: N802 - as above
        self.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.answer(self.said)

    def answer(self, said: Any) -> None:
        right = self.headers["authorization"] == f"Bearer {KEY}" and self.path == "/policy"
        content = json.dumps(said).encode()
        self.send_response(self.status if right else 401)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_ADMIN_KEY", KEY)
    monkeypatch.setattr(Listener, "asked", [])


def run(*words: str, kind: type[Answering] = Listener) -> int:
    with answering(kind) as url:
        return main(["policy", *words, "--url", url])


def test_settings_are_asked_for_as_the_file_has_them(capsys: Output) -> None:
    given = (
        "admission.margin_ms=80",
        "admission.modes.deadline=audit",
        "admission.modes.budget=null",
        "deployment.window.prefill_ms=80.5",
        "output_budget.models.qwen2.5-0.5b=300",
        "ordering.kind=fifo",
        'output_budget.classes={"batch": 5}',
    )
    assert run("set", *given, "--expect", "2") == 0
    assert Listener.asked == [
        {
            "admission": {"margin_ms": 80, "modes": {"deadline": "audit", "budget": None}},
            "window": {"prefill_ms": 80.5},
            "output_budget": {"models": {"qwen2.5-0.5b": 300}, "classes": {"batch": 5}},
            "ordering": {"kind": "fifo"},
            "expect": 2,
            "dry_run": False,
        }
    ]
    out, err = capsys.readouterr()
    assert out == "revision 3\n  window.prefill_ms: 150.0 -> 80.0\n"
    assert err == "headrace: warning: 80 ms is less than one full step\n"


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["rollback"], {"rollback": "previous", "dry_run": False}),
        (["rollback", "7", "--dry-run"], {"rollback": 7, "dry_run": True}),
        (
            ["set", "window.prefill_ms=1", "--dry-run"],
            {"window": {"prefill_ms": 1}, "dry_run": True},
        ),
    ],
)
def test_a_rollback_and_a_dry_run_are_asked_for(words: list[str], asked: Any) -> None:
    assert run(*words) == 0
    assert Listener.asked == [asked]


def test_a_dry_run_says_that_nothing_changed(capsys: Output) -> None:
    run("set", "window.prefill_ms=80", "--dry-run")
    out = capsys.readouterr().out
    assert out.startswith(
        "not changed, revision 3 stays in force; it would be:\n  window.prefill_ms"
    )


def test_what_is_so_already_is_said(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Listener, "said", APPLIED | {"changes": {}, "warnings": []})
    assert run("set", "window.prefill_ms=80") == 0
    assert capsys.readouterr().out == "it is so already: revision 3\n"


def test_the_answer_is_printed_as_json(capsys: Output) -> None:
    assert run("set", "window.prefill_ms=80", "--json") == 0
    assert json.loads(capsys.readouterr().out) == APPLIED
    assert run("show", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {name: STANDING[name] for name in ("revision", "frozen", "policy")}
    assert run("history", "--json") == 0
    assert json.loads(capsys.readouterr().out) == REVISIONS


def test_what_is_shown_can_be_set(capsys: Output) -> None:
    assert run("show") == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "revision 2, changes are frozen"
    assert "admission.modes.budget = null" in lines
    assert run("set", *(line.replace(" = ", "=") for line in lines)) == 0
    assert Listener.asked == [STANDING["policy"] | {"dry_run": False}]  # type: ignore[operator]


def test_the_history_tells_who_changed_what(capsys: Output) -> None:
    assert run("history") == 0
    assert capsys.readouterr().out.splitlines() == [
        "1  2026-03-01T09:00:00Z  -  start",
        "2  2026-03-01T09:30:00Z  ops  policy",
        "  admission.margin_ms: 50.0 -> 80.0",
        "  and 3 more",
    ]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ([], "name settings as PATH=VALUE"),
        (["admission.margin_ms"], "setting admission.margin_ms: give PATH=VALUE"),
        (["admission..x=1"], "setting admission..x: give PATH=VALUE"),
        (["=1"], "give PATH=VALUE"),
        (["window.b=1", "window.b.c=2"], "setting window.b.c: `b` has a value already"),
        (["window.b.c=2", "window.b=1"], "setting window.b: told twice"),
        (["window.b=1", "window.b=1"], "setting window.b: told twice"),
        (["window.b=\udcff"], "give PATH=VALUE"),
    ],
)
def test_what_is_no_setting_is_told_and_not_asked(
    settings: list[str], told: str, capsys: Output
) -> None:
    assert run("set", *settings) == 2
    assert told in capsys.readouterr().err
    assert not Listener.asked


def test_a_refusal_is_told_in_the_listeners_words(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = {"message": "Changes are frozen; thaw with POST /freeze.", "code": "frozen"}
    monkeypatch.setattr(Listener, "said", {"error": error})
    monkeypatch.setattr(Listener, "status", 409)
    assert run("set", "window.prefill_ms=80") == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "headrace: Changes are frozen; thaw with POST /freeze. (409)\n")


@pytest.mark.parametrize("words", [["show"], ["history"], ["set", "window.b=1"], ["rollback"]])
@pytest.mark.parametrize("key", [None, "sk-planted"])
def test_a_wrong_key_is_told_and_not_repeated(
    words: list[str], key: str | None, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_ADMIN_KEY")
    if key is not None:
        monkeypatch.setenv("HEADRACE_ADMIN_KEY", key)
    assert run(*words) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "wants an admin key, in HEADRACE_ADMIN_KEY" in err
    assert "sk-planted" not in err


def test_a_key_that_is_none_is_not_sent(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_ADMIN_KEY", "sk-planted\nx-evil: 1")
    assert run("show") == 2
    assert "no admin key" in (err := capsys.readouterr().err)
    assert "planted" not in err


def test_a_key_is_no_flag(capsys: Output) -> None:
    assert run("show", "--key", KEY) == 2
    assert "--key" in capsys.readouterr().err


def test_another_listener_is_told_apart(capsys: Output) -> None:
    class Other(Answering):
        content = msgspec.json.encode({"status": "ok"})

        def do_GET(self) -> None:  # noqa: N802 - the library calls it so
            self.path = "/state"
            super().do_GET()

    assert run("show", kind=Other) == 2
    assert "no policy of a gateway" in capsys.readouterr().err


@pytest.mark.parametrize(
    "setting",
    [
        "rollback=previous",
        "rollback=1",
        "expect=7",
        "dry_run=false",
        "tenants.free=1",
        "admision.x=1",
    ],
)
def test_only_parts_of_the_policy_are_set(setting: str, capsys: Output) -> None:
    """No word of a call passes for a setting: a rollback is asked for by its own name."""
    assert run("set", "window.prefill_ms=80", setting) == 2
    assert not Listener.asked
    assert "no part of the policy: admission, " in capsys.readouterr().err
