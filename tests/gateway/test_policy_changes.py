"""Levers of an operator: each changes what is decided at once, is undone by a rollback, and is written down."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.gateway.steward import REVISIONS
from headrace.policy.catalog import POLICY
from headrace.policy.ordering.orders import TenantFirst
from tests.gateway.managed import Managed, value
from tests.gateway.scenes import Caller, ObedientEngine, reach

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


def long(word: str) -> list[dict[str, str]]:
    """Return a prompt of its own, some 250 ms of prefill."""
    return [{"role": "user", "content": f"{word} " * 4_000}]


def obedient(**told: Any) -> tuple[Managed, ObedientEngine]:
    gateway = Managed(lambda clock: [ObedientEngine(clock)], **told)
    (engine,) = gateway.engines
    return gateway, engine


async def changed(gateway: Managed, **asked: Any) -> dict[str, Any]:
    """Change the policy; return the answer."""
    caller = await gateway.order("/policy", asked)
    assert caller.status == 200, caller.content
    found: dict[str, Any] = caller.json
    return found


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


async def leave(*callers: Caller) -> None:
    for caller in callers:
        caller.leave()
        await caller.done()


async def test_a_larger_margin_refuses_what_was_let_in_and_a_rollback_lets_it_in_again() -> None:
    gateway = Managed()
    assert (await gateway.ask(max_tokens=1).done()).status == 200
    await changed(gateway, admission={"margin_ms": 5_000})
    refused = await gateway.ask(max_tokens=1).done()
    assert (refused.status, refused.error["headrace"]["reason"]) == (503, "deadline_impossible")
    back = await changed(gateway, rollback="previous")
    assert back["changes"] == {"deployment.admission.margin_ms": [5_000.0, 50.0]}
    assert (await gateway.ask(max_tokens=1).done()).status == 200
    gateway.finish()


async def test_an_output_budget_reaches_the_engine_and_its_caller() -> None:
    gateway, engine = obedient()
    await changed(gateway, output_budget={"tokens": 300, "classes": {"batch": None}})
    callers = [
        gateway.ask(max_tokens=None),
        gateway.ask(max_tokens=9_000),
        gateway.ask(max_tokens=None, headers={"x-gateway-inference-objective": "batch"}),
    ]
    await reach(gateway.clock, 1)
    assert [call.dispatch.output_limit for call in engine.calls] == [300, 9_000, 16_384]
    for call in engine.calls:
        engine.say("x", call.dispatch.attempt)
        engine.end(call.dispatch.attempt)
    told = [(await one.done()).headers.get("x-headrace-output-limit") for one in callers]
    assert told == ["300", None, "16384"]
    await changed(gateway, rollback="previous")
    last = gateway.ask(max_tokens=None)
    await reach(gateway.clock, 1)
    assert engine.calls[-1].dispatch.output_limit == 16_384
    await leave(last)
    gateway.finish()


async def test_an_emulated_answer_ends_at_the_budget_as_at_its_callers_own_limit() -> None:
    gateway = Managed()
    await changed(gateway, output_budget={"models": {"m": 3}})
    answer = await gateway.ask(max_tokens=None).done()
    assert answer.json["choices"][0]["finish_reason"] == "length"
    assert answer.json["usage"]["completion_tokens"] == 3
    gateway.finish()


async def test_a_smaller_window_keeps_prompts_here_that_were_sent_at_once() -> None:
    gateway, engine = obedient()
    await changed(gateway, admission={"mode": "audit"}, window={"prefill_ms": 1_000})
    wide = [gateway.ask(messages=long(word)) for word in ("one", "two", "six")]
    await reach(gateway.clock, 1)
    assert len(engine.calls) == 3
    await leave(*wide)
    await changed(gateway, window={"prefill_ms": 1})
    narrow = [gateway.ask(messages=long(word)) for word in ("red", "tan", "sky")]
    await reach(gateway.clock, 2)
    assert len(engine.calls) < 6
    await changed(gateway, rollback="previous")
    assert len(engine.calls) == 6, "what waits goes by the new window"
    await leave(*narrow)
    gateway.finish()


async def test_smaller_steps_of_emulated_engines_take_longer_for_a_prompt() -> None:
    gateway = Managed()

    async def first_ms(word: str) -> float:
        answer = await gateway.ask(messages=long(word), stream=True, max_tokens=2).done()
        assert answer.status == 200
        return float(answer.headers["openai-processing-ms"])

    before = await first_ms("one")
    await changed(gateway, window={"step_tokens": {"p": 64}})
    assert await first_ms("two") > 2 * before
    await changed(gateway, rollback="previous")
    assert await first_ms("six") == pytest.approx(before, rel=0.05)
    wrong = await gateway.order("/policy", {"window": {"step_tokens": {"z": 64}}})
    assert "unknown pool `z`" in wrong.error["message"]
    gateway.finish()


async def test_the_order_can_be_changed_and_rolled_back_as_a_whole() -> None:
    gateway = Managed()
    await changed(gateway, ordering={"lend_after_ms": 500})
    await changed(gateway, ordering={"kind": "fifo"})
    shown = (await gateway.look("/policy")).json["policy"]
    assert shown["ordering"] == {"kind": "fifo"}
    await changed(gateway, rollback="previous")
    shown = (await gateway.look("/policy")).json["policy"]
    assert (shown["ordering"]["kind"], shown["ordering"]["lend_after_ms"]) == ("tenant_first", 500)
    await changed(gateway, rollback=1)
    assert gateway.driver.plane.settings.config.ordering == TenantFirst()
    gateway.finish()


async def test_previous_is_the_newest_revision_that_decides_otherwise() -> None:
    gateway = Managed()
    none = await gateway.order("/policy", {"rollback": "previous"})
    assert (none.status, none.error["code"]) == (404, "revision_unknown")
    await changed(gateway, admission={"margin_ms": 60})
    made = await gateway.order("/key/generate", {"key_alias": "app"})
    assert (made.status, gateway.driver.revision) == (200, 3)
    back = await changed(gateway, rollback="previous")
    assert back["changes"] == {"deployment.admission.margin_ms": [60.0, 50.0]}, (
        "and no key is undone"
    )
    assert gateway.admin._steward.revisions[-1].what == "rollback to 1"
    forth = await changed(gateway, rollback="previous")
    assert forth["changes"] == {"deployment.admission.margin_ms": [50.0, 60.0]}
    gateway.finish()


async def test_a_dry_run_tells_what_would_change_and_changes_nothing(tmp_path: Path) -> None:
    gateway = Managed(folder=tmp_path)
    asked = {"window": {"prefill_ms": 1}, "dry_run": True}
    told = await changed(gateway, **asked)
    assert (told["revision"], told["dry_run"]) == (1, True)
    assert told["changes"] == {"deployment.window.prefill_ms": [150.0, 1.0]}
    assert "less than one full step" in told["warnings"][0]
    await gateway.order("/freeze")
    assert (await changed(gateway, **asked))["changes"], "who may not change may look"
    wrong = await gateway.order("/policy", {"window": {"prefill_ms": 0}, "dry_run": True})
    assert (wrong.status, gateway.driver.revision) == (400, 1)
    assert [line["what"] for line in lines(tmp_path)] == ["freeze"]
    gateway.finish()


async def test_what_is_refused_is_written_down_and_counted(tmp_path: Path) -> None:
    gateway = Managed(folder=tmp_path)
    await changed(gateway, admission={"margin_ms": 60})
    for path, body in (
        ("/policy", {"expect": 1, "admission": {"margin_ms": 70}}),
        ("/policy", {"rollback": 77}),
        ("/policy", b"{"),
        ("/reload", None),
        ("/key/generate", {"key_alias": "free", "key": "sk-never-to-be-seen"}),
        ("/policy", {"admission": {"margin_ms": "x" * 5_000}}),
        ("/policy", b'{"window":' + b'{"a":' * 400 + b"1" + b"}" * 401),
    ):
        status = (await gateway.order(path, body)).status
        assert status is not None
        assert status >= 400
    made, *refused = lines(tmp_path)
    assert (made["outcome"], made["new"]) == ("made", {"deployment.admission.margin_ms": 60.0})
    assert [(one["what"], one["outcome"]) for one in refused] == [
        ("policy", "refused"),
        ("rollback to 77", "refused"),
        ("policy", "refused"),
        ("reload", "refused"),
        ("key generate", "refused"),
        ("policy", "refused"),
        ("policy", "refused"),
    ]
    assert [one["why"] for one in refused[:4]] == [
        "revision_differs",
        "revision_unknown",
        "invalid_value",
        "no_file",
    ]
    assert refused[0]["old"] == {"deployment.admission.margin_ms": 60.0}
    assert refused[0]["new"] == {"deployment.admission.margin_ms": 70.0}
    assert not any(one["new"] for one in refused[1:])
    content = (tmp_path / "audit.jsonl").read_text()
    assert "sk-never" not in content
    assert max(map(len, content.splitlines())) < 1_000
    found = await gateway.scrape()
    for action, result, count in (
        ("policy", "made", 1),
        ("policy", "refused", 4),
        ("rollback", "refused", 1),
        ("reload", "refused", 1),
        ("key", "refused", 1),
    ):
        name = "headrace_admin_changes_total"
        assert value(found, name, action=action, result=result) == count, action
    gateway.finish()


async def test_every_part_of_the_policy_can_be_shown_and_set() -> None:
    gateway = Managed()
    shown = (await gateway.look("/policy")).json["policy"]
    assert set(shown) == set(POLICY)
    same = await changed(gateway, **shown)
    assert same == {"revision": 1, "changes": {}, "warnings": []}
    gateway.finish()


async def test_there_is_a_way_back_however_many_keys_were_made_since() -> None:
    gateway = Managed()
    await changed(gateway, admission={"margin_ms": 60})
    for nth in range(REVISIONS + 5):
        made = await gateway.order("/key/generate", {"key_alias": f"app-{nth}"})
        assert made.status == 200
    steward = gateway.admin._steward
    assert len(steward.revisions) == REVISIONS
    assert len(steward._kept) == REVISIONS + 1, "and none is kept for nothing"
    back = await changed(gateway, rollback="previous")
    assert back["changes"] == {"deployment.admission.margin_ms": [60.0, 50.0]}
    assert len(steward._kept) == REVISIONS
    forth = await changed(gateway, rollback="previous")
    assert forth["changes"] == {"deployment.admission.margin_ms": [50.0, 60.0]}
    gateway.finish()
