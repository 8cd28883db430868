"""`headrace policy` before a real process: each lever, its undoing, and what a restart keeps of it."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.adapters.journal.ring import segments
from headrace.cli import main
from headrace.plane.journal import Verified, verify
from tests.e2e.test_admin import ADMIN, KEY, call, finished, served, written

pytestmark = pytest.mark.service

Output = pytest.CaptureFixture[str]
PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")


def answered(traffic: str) -> Any:
    """Ask for an answer without a limit; return it."""
    with openai.OpenAI(api_key=KEY, base_url=f"{traffic}/v1", max_retries=0) as sdk:
        return sdk.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Hello"}]
        )


def commands(
    admin: str, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, Any, str]]:
    """Return what runs `headrace policy` and returns its code, its JSON and its errors."""
    monkeypatch.setenv("HEADRACE_ADMIN_KEY", ADMIN)

    def run(*words: str) -> tuple[int, Any, str]:
        code = main(["policy", *words, "--url", admin, "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else None, err

    return run


def test_each_lever_acts_at_once_and_is_undone(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(written(tmp_path)) as (process, traffic, admin):
        policy = commands(admin, capsys, monkeypatch)
        assert policy("set", "output_budget.models.m=5", "--expect", "1")[0] == 0
        assert answered(traffic).usage.completion_tokens == 5
        assert policy("set", "admission.margin_ms=6e3")[0] == 0
        with pytest.raises(openai.InternalServerError) as refused:
            answered(traffic)
        assert refused.value.status_code == 503
        code, told, _ = policy("rollback", "--dry-run")
        assert (code, told["revision"], told["dry_run"]) == (0, 3, True)
        code, told, _ = policy("rollback", "--expect", "3")
        assert told["changes"] == {"deployment.admission.margin_ms": [6_000.0, 50.0]}
        assert answered(traffic).usage.completion_tokens == 5, "of revision 2"
        code, told, err = policy("set", "window.prefill_ms=20", "--expect", "3")
        assert (code, told) == (1, None)
        assert "Revision 4 is in force, not 3." in err
        code, _, err = policy("set", "window.prefill_ms=none")
        assert code == 1
        assert "`$.window.prefill_ms`" in err
        assert policy("rollback", "1")[0] == 0
        assert policy("show")[1]["policy"]["output_budget"]["models"] == {}
        code, told, _ = policy("history")
        assert [one["what"] for one in told] == [
            "start",
            "policy",
            "policy",
            "rollback to 2",
            "rollback to 1",
        ]
        assert call(f"{admin}/freeze", {})[0] == 200
        code, _, err = policy("set", "window.prefill_ms=100")
        assert (code, "thaw with POST /freeze" in err) == (1, True)
        finished(process)
    lines = [json.loads(one) for one in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [(one["what"], one["outcome"], one["revision"]) for one in lines] == [
        ("policy", "made", 2),
        ("policy", "made", 3),
        ("rollback to 2", "made", 4),
        ("policy", "refused", 4),
        ("policy", "refused", 4),
        ("rollback to 1", "made", 5),
        ("freeze", "made", 5),
        ("policy", "refused", 5),
    ]
    assert isinstance(verify(segments(tmp_path / "journal")), Verified)


def test_every_first_action_of_the_page_is_a_command_that_does_something(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = PAGE.partition("## Knobs")[2].partition("\n## ")[0]
    actions = re.findall(r"^\|.*\| `headrace policy (.*)` \|$", table, re.MULTILINE)
    assert len(actions) >= 5
    with served(written(tmp_path)) as (process, _, admin):
        policy = commands(admin, capsys, monkeypatch)
        for action in actions:
            code, told, err = policy(*shlex.split(action))
            assert (code, bool(told["changes"])) == (0, True), (action, err)
        finished(process)
    lines = [json.loads(one) for one in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [one["outcome"] for one in lines] == ["made"] * len(actions)


def test_a_policy_outlives_a_crash_and_ends_with_the_files_word(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = written(tmp_path)
    with served(config) as (_, traffic, admin):
        policy = commands(admin, capsys, monkeypatch)
        policy("set", "admission.margin_ms=70")
        policy("set", "output_budget.tokens=4", "ordering.kind=fifo")
        policy("rollback")
        policy("rollback")
        assert answered(traffic).usage.completion_tokens == 4
    with served(config) as (process, traffic, admin):
        policy = commands(admin, capsys, monkeypatch)
        told = policy("show")[1]
        assert (told["revision"], told["policy"]["ordering"]) == (5, {"kind": "fifo"})
        assert answered(traffic).usage.completion_tokens == 4
        code, told, err = policy("rollback")
        assert (code, told) == (1, None)
        assert "since the start" in err
        (first,) = policy("history")[1]
        assert first["changes"]["deployment.output_budget.tokens"] == [None, 4]
        assert call(f"{admin}/reload", {})[0] == 200
        assert policy("show")[1]["policy"]["output_budget"]["tokens"] is None
        finished(process)
