"""The admin listener: every endpoint with and without a key, changes, their audit, and the drain."""

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.config.errors import ConfigError, Fault, Origin
from headrace.config.schema import AdminSpec, ServerSpec, Settings, UpstreamSpec
from headrace.gateway import health
from headrace.gateway.audit import LOG
from headrace.gateway.failures import ADDRESSES, FAILURES
from headrace.gateway.guard import Guard
from headrace.gateway.steward import REVISIONS
from headrace.model.deployment import TenantSpec
from headrace.model.event import ConfigChanged
from headrace.model.slo import Outcome
from headrace.policy.admission.gates import GateMode
from headrace.policy.ordering.orders import Fifo
from headrace.report.decisions import Verified, verify_decisions
from tests.gateway.managed import ADMIN_KEY, SPEC, Managed
from tests.gateway.scenes import KEYS, Caller, ObedientEngine, keys, reach

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

SHOWN = ["/metrics", "/config", "/policy", "/tenants", "/keys", "/state"]
ORDERS = ["/policy", "/reload", "/freeze", "/drain"]
KEY_ORDERS = ["/key/generate", "/key/update", "/key/delete"]
HERE = {"host": "127.0.0.1:9090"}


def obedient(**told: Any) -> tuple[Managed, ObedientEngine]:
    gateway = Managed(lambda clock: [ObedientEngine(clock)], **told)
    (engine,) = gateway.engines
    return gateway, engine


@pytest.mark.parametrize("key", [None, "sk-wrong", KEYS["free"]], ids=["none", "wrong", "tenant's"])
async def test_nothing_is_shown_or_done_without_an_admin_key(key: str | None) -> None:
    for path, method in [
        *((p, "GET") for p in SHOWN),
        *((p, "POST") for p in (*ORDERS, *KEY_ORDERS)),
    ]:
        gateway = Managed()
        caller = await Caller(gateway.admin, path=path, method=method, body=b"", key=key).done()
        assert (caller.status, caller.error["code"]) == (401, "invalid_api_key"), path
        assert caller.headers["www-authenticate"] == "Bearer"
        assert not gateway.driver.draining
        gateway.finish()


async def test_everything_is_shown_to_an_admin_key() -> None:
    gateway = Managed()
    for path in SHOWN:
        caller = await gateway.look(path)
        assert caller.status == 200, path
        assert caller.content
    gateway.finish()


@pytest.mark.parametrize("path", [*health.LIVE, *health.READY])
async def test_probes_need_no_key_on_either_listener(path: str) -> None:
    gateway = Managed()
    for app in (gateway.app, gateway.admin):
        caller = await Caller(app, path=path, method="GET", body=b"", key=None).done()
        assert (caller.status, caller.json) == (200, {"status": "ok"})
    gateway.finish()


async def test_without_a_ready_replica_it_lives_and_is_not_ready() -> None:
    gateway = Managed(lambda _: [])
    live = await Caller(gateway.app, path="/livez", method="GET", key=None).done()
    ready = await Caller(gateway.app, path="/readyz", method="GET", key=None).done()
    assert (live.status, ready.status) == (200, 503)
    assert ready.json == {"status": "no ready replica"}
    gateway.finish()


async def test_probes_are_answered_where_everything_else_is_too_much() -> None:
    gateway, _ = obedient(server=ServerSpec(concurrency=1))
    first = gateway.ask()
    await reach(gateway.clock, 1)
    assert (await gateway.ask().done()).status == 503
    live = await Caller(gateway.app, path="/health", method="GET", key=None).done()
    assert live.status == 200
    first.leave()
    await first.done()
    gateway.finish()


async def test_a_broken_gateway_is_neither_alive_nor_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gateway = Managed()
    with caplog.at_level(logging.CRITICAL):
        gateway.driver.fail(AssertionError("a state that cannot be"))
    for path in ("/livez", "/readyz"):
        assert (await gateway.look(path)).json == {"status": "broken"}
    for path, body in (("/policy", {"admission": {"margin_ms": 1}}), ("/drain", None)):
        assert (await gateway.order(path, body)).status == 503
    gateway.audit.close()


async def test_what_is_not_there_is_told_in_the_traffics_own_words() -> None:
    gateway = Managed()
    missing = await gateway.look("/nothing")
    assert (missing.status, missing.error["code"]) == (404, "not_found")
    wrong = await gateway.order("/state")
    assert (wrong.status, wrong.error["code"]) == (405, "method_not_allowed")
    long = await gateway.order("/policy", b" " * 70_000)
    assert (long.status, long.error["code"]) == (413, "request_too_large")
    gateway.finish()


@pytest.mark.parametrize("path", [*ORDERS, *KEY_ORDERS])
async def test_a_body_that_does_not_come_is_not_waited_for(path: str) -> None:
    gateway = Managed(server=ServerSpec(header_timeout_s=3))
    caller = Caller(gateway.admin, path=path, body=b"{}", key=ADMIN_KEY)
    caller._incoming.get_nowait()
    await reach(gateway.clock, 2_999)
    assert not caller.task.done()
    await caller.done()
    assert (caller.status, caller.error["code"]) == (408, "request_timeout")
    assert caller.headers["connection"] == "close"
    assert not gateway.driver.draining
    gateway.finish()


# The door --------------------------------------------------------------------------------------


async def test_an_address_with_too_many_wrong_keys_is_not_heard_for_a_while() -> None:
    gateway = Managed()
    for _ in range(FAILURES):
        assert (await gateway.look("/state", key="sk-wrong")).status == 401
    shut = await gateway.look("/state")
    assert (shut.status, shut.error["code"]) == (429, "slow_down"), "not even with the right key"
    assert shut.headers["retry-after"] == "60"
    assert (await gateway.look("/state", client="10.0.0.2")).status == 200
    assert (await gateway.look("/healthz", client="10.0.0.2")).status == 404
    assert (await gateway.look("/health")).status == 200, "probes are no guess"
    await reach(gateway.clock, 60_001)
    assert (await gateway.look("/state")).status == 200
    samples = await gateway.scrape()
    assert samples["headrace_admin_denied_total"][0].value == FAILURES + 1
    gateway.finish()


async def test_addresses_that_failed_are_remembered_within_bounds() -> None:
    gateway = Managed()
    guard = Guard(SPEC, gateway.clock)
    for nth in range(ADDRESSES + 5):
        guard.admit({"client": (f"10.0.{nth // 256}.{nth % 256}", 1), "headers": []})
    assert len(guard._failures._seen) == ADDRESSES
    gateway.finish()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (HERE, 200),
        ({"host": "localhost"}, 200),
        ({"host": "[::1]:9090"}, 200),
        (HERE | {"origin": "http://127.0.0.1:9090"}, 200),
        ({}, 403),
        ({"host": "rebound.example:9090"}, 403),
        (HERE | {"origin": "http://evil.example"}, 403),
        (HERE | {"origin": "null"}, 403),
        ({"host": "rebound.example", "origin": "http://rebound.example"}, 403),
    ],
)
async def test_an_open_listener_is_no_way_in_for_web_pages(
    headers: dict[str, str], status: int
) -> None:
    gateway = Managed(spec=AdminSpec(open=True))
    caller = await gateway.order("/freeze", key=None, headers=headers)
    assert caller.status == status
    gateway.finish()


# Changes ---------------------------------------------------------------------------------------


def audited(gateway: Managed, folder: Path) -> list[dict[str, Any]]:
    assert gateway.audit.dropped == 0
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


async def test_a_change_of_policy_is_one_event_one_revision_and_one_audit_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = Managed(folder=tmp_path)
    before = await gateway.ask(max_tokens=1).done()
    with caplog.at_level(logging.INFO, LOG):
        change = await gateway.order(
            "/policy",
            {
                "admission": {"margin_ms": 80, "mode": "audit", "length": "greedy"},
                "window": {"prefill_ms": 200},
            },
        )
    assert change.status == 200
    changes: dict[str, list[Any]] = {
        "deployment.admission.length": ["fair", "greedy"],
        "deployment.admission.margin_ms": [50.0, 80.0],
        "deployment.admission.mode": ["enforce", "audit"],
        "deployment.window.prefill_ms": [150.0, 200.0],
    }
    assert change.json == {"revision": 2, "changes": changes, "warnings": []}
    after = await gateway.ask(max_tokens=1).done()
    revisions = [one.headers["x-headrace-policy-revision"] for one in (before, after)]
    assert revisions == ["1", "2"]

    (line,) = audited(gateway, tmp_path)
    assert (line["who"], line["what"], line["revision"]) == ("ops", "policy", 2)
    assert line["old"] == {path: old_new[0] for path, old_new in changes.items()}
    assert line["new"] == {path: old_new[1] for path, old_new in changes.items()}
    assert line["at"].endswith("Z")
    logged = [record.message for record in caplog.records if record.name == LOG]
    assert [json.loads(one) for one in logged] == [line]

    events = [event for _, event in gateway.pages.records() if isinstance(event, ConfigChanged)]
    assert [event.revision for event in events] == [1, 2]
    shown = (await gateway.look("/policy")).json
    assert shown["revision"] == 2
    assert shown["policy"]["admission"]["margin_ms"] == 80.0
    assert [(one["revision"], one["who"]) for one in shown["revisions"]] == [(1, ""), (2, "ops")]
    gateway.finish()
    assert verify_decisions(tmp_path / "decisions.jsonl") == Verified(count=4)


async def test_requests_that_are_in_end_under_the_revision_they_began_with() -> None:
    gateway, engine = obedient()
    caller = gateway.ask()
    await reach(gateway.clock, 1)
    assert (await gateway.order("/policy", {"admission": {"margin_ms": 60}})).status == 200
    engine.say("x")
    engine.end(outcome=Outcome.ERROR)
    await caller.done()
    assert caller.error["headrace"]["policy_revision"] == 1
    assert caller.headers["x-headrace-policy-revision"] == "1"
    gateway.finish()


async def test_a_rollback_is_a_new_revision_with_the_old_policy(tmp_path: Path) -> None:
    gateway = Managed(folder=tmp_path)
    await gateway.order("/policy", {"admission": {"margin_ms": 80}})
    await gateway.order("/policy", {"admission": {"margin_ms": 90, "wait_margin": 1}})
    back = await gateway.order("/policy", {"rollback": 2})
    assert back.json["revision"] == 4
    assert gateway.driver.plane.settings.config.admission.margin_ms == 80.0
    assert gateway.driver.plane.settings.config.admission.wait_margin == 0.25
    assert audited(gateway, tmp_path)[-1]["what"] == "rollback to 2"
    again = await gateway.order("/policy", {"rollback": 2})
    assert again.json == {"revision": 4, "changes": {}, "warnings": []}, "it is so already"
    assert len(audited(gateway, tmp_path)) == 3
    unknown = await gateway.order("/policy", {"rollback": 99})
    assert (unknown.status, unknown.error["code"]) == (404, "revision_unknown")
    gateway.finish()


async def test_revisions_are_kept_within_bounds() -> None:
    gateway = Managed()
    for nth in range(REVISIONS + 5):
        await gateway.order("/policy", {"admission": {"margin_ms": nth}})
    assert len((await gateway.look("/policy")).json["revisions"]) == REVISIONS
    assert (await gateway.order("/policy", {"rollback": 1})).status == 404
    oldest = gateway.driver.revision - REVISIONS + 1
    assert (await gateway.order("/policy", {"rollback": oldest})).status == 200
    gateway.finish()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "truncated"),
        (b"\xff", ""),
        ({"admission": {"margin_ms": -1}}, "`$.admission.margin_ms`"),
        ({"admission": {"margin_ms": 1e9}}, "`$.admission.margin_ms`"),
        ({"admission": {"mode": "off"}}, "'off'"),
        ({"admission": {"margn_ms": 1}}, "margn_ms"),
        ({"window": {"prefill_ms": 0}}, "`$.window.prefill_ms`"),
        ({"tenants": []}, "tenants"),
        ({"rollback": 1, "window": {"prefill_ms": 100}}, "not both"),
        ({"rollback": "last"}, "`$.rollback`"),
        ({"ordering": {"kind": "lifo"}}, "`$.ordering.kind`"),
        ({"ordering": {"kind": "fifo", "lend_after_ms": 1}}, "lend_after_ms"),
        ({"output_budget": {"tokens": 0}}, "`$.output_budget.tokens`"),
        ({"output_budget": {"classes": {"nobody": 5}}}, "unknown class `nobody`"),
        ({"output_budget": {"models": 5}}, "`$.output_budget.models`"),
        ({"admission": {"margin_ms": {"x": 1}}}, "`$.admission.margin_ms`"),
        ({"admission": {"modes": {"deadline": {"x": {}}}}}, "`$.admission.modes.deadline`"),
        ({"prediction": {"prior_p90": 1}}, "prior_p90 1 is below"),
    ],
)
async def test_a_wrong_change_changes_nothing(body: Any, words: str, tmp_path: Path) -> None:
    gateway = Managed(folder=tmp_path)
    caller = await gateway.order("/policy", body)
    assert (caller.status, caller.error["code"]) == (400, "invalid_value")
    assert words in caller.error["message"]
    assert gateway.driver.revision == 1
    (line,) = audited(gateway, tmp_path)
    assert (line["who"], line["outcome"], line["revision"]) == ("ops", "refused", 1)
    assert (line["why"], line["new"]) == ("invalid_value", {})
    gateway.finish()


@pytest.mark.parametrize(
    "path",
    [
        *("/policy", "/reload", "/freeze", "/drain"),
        *("/key/generate", "/key/update", "/key/delete"),
    ],
)
@pytest.mark.parametrize("body", [b"[" * 60_000, b'{"keys":' * 8_000, b'{"a":' + b"[" * 60_000])
async def test_what_is_nested_too_deeply_is_refused(path: str, body: bytes) -> None:
    gateway = Managed(reread=lambda: gateway.settings)
    caller = await gateway.order(path, body)
    assert (caller.status, caller.error["code"]) == (400, "invalid_value")
    gateway.finish()


async def test_a_change_that_makes_little_sense_is_made_with_a_warning() -> None:
    gateway = Managed()
    caller = await gateway.order("/policy", {"window": {"prefill_ms": 1}})
    assert caller.status == 200
    assert "less than one full step" in caller.json["warnings"][0]
    gateway.finish()


async def test_two_operators_do_not_undo_each_other() -> None:
    gateway = Managed()
    first = {"expect": 1, "admission": {"margin_ms": 80}}
    assert (await gateway.order("/policy", first)).status == 200
    second = await gateway.order("/policy", {"expect": 1, "admission": {"mode": "audit"}})
    assert (second.status, second.error["code"]) == (409, "revision_differs")
    assert gateway.driver.plane.settings.config.admission.mode is GateMode.ENFORCE
    gateway.finish()


async def test_a_freeze_refuses_every_change_until_it_is_lifted(tmp_path: Path) -> None:
    gateway = Managed(folder=tmp_path, reread=lambda: gateway.settings)
    assert (await gateway.order("/freeze")).json == {"frozen": True}
    assert (await gateway.order("/freeze")).json == {"frozen": True}
    for path, body in (("/policy", {"admission": {"margin_ms": 1}}), ("/reload", None)):
        caller = await gateway.order(path, body)
        assert (caller.status, caller.error["code"]) == (409, "frozen")
    assert (await gateway.look("/policy")).json["frozen"] is True
    assert (await gateway.scrape())["headrace_frozen"][0].value == 1
    assert (await gateway.order("/freeze", {"frozen": False})).json == {"frozen": False}
    assert (await gateway.order("/policy", {"admission": {"margin_ms": 1}})).status == 200
    lines = [(line["what"], line["outcome"]) for line in audited(gateway, tmp_path)]
    assert lines == [
        ("freeze", "made"),
        ("policy", "refused"),
        ("reload", "refused"),
        ("thaw", "made"),
        ("policy", "made"),
    ]
    gateway.finish()


async def test_a_drain_refuses_newcomers_and_lets_streams_finish(tmp_path: Path) -> None:
    gateway, engine = obedient(folder=tmp_path)
    running = gateway.ask(stream=True)
    await reach(gateway.clock, 1)
    engine.say("one")
    assert (await gateway.order("/drain")).json == {"draining": True, "live": 1}
    newcomer = await gateway.ask().done()
    assert (newcomer.status, newcomer.error["headrace"]["reason"]) == (503, "shutting_down")
    assert newcomer.headers["x-llm-d-request-dropped-reason"] == "rejected-shutting-down"
    for app in (gateway.app, gateway.admin):
        for path, status in (("/readyz", 503), ("/livez", 200), ("/health", 200)):
            assert (await Caller(app, path=path, method="GET", key=None).done()).status == status
    engine.say("data: [DONE]\n\n")
    engine.end()
    assert (await running.done()).content.endswith(b"data: [DONE]\n\n")
    assert (await gateway.order("/drain")).json == {"draining": True, "live": 0}
    assert [line["what"] for line in audited(gateway, tmp_path)] == ["drain"], "once"
    assert (await gateway.scrape())["headrace_draining"][0].value == 1
    gateway.finish()


async def test_a_full_disk_keeps_the_audit_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = Managed(folder=tmp_path)

    def full(_file: int, _content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headrace.adapters.journal.append.os.write", full)
    with caplog.at_level(logging.INFO, LOG):
        assert (await gateway.order("/freeze")).status == 200
    assert gateway.audit.dropped == 1
    assert '"what":"freeze"' in caplog.text
    monkeypatch.undo()
    gateway.finish()


# Reload ----------------------------------------------------------------------------------------


def changing(change: Callable[[Settings], Settings], **told: Any) -> Managed:
    """Return a gateway whose file has changed since the start."""
    gateway: Managed = Managed(reread=lambda: change(gateway.settings), **told)
    return gateway


async def test_a_reload_goes_by_the_file_for_tenants_keys_and_policy(tmp_path: Path) -> None:
    def change(old: Settings) -> Settings:
        config = old.deployment
        tenants = (TenantSpec(name="free", rpm_limit=1), TenantSpec(name="new"))
        given = replace(keys()[0], name="new", tenant="new", hash="sha256:" + "0" * 64)
        return replace(
            old,
            deployment=replace(config, tenants=tenants, ordering=Fifo()),
            keys=(keys()[0], given),
        )

    gateway = changing(change, folder=tmp_path)
    await gateway.ask(key=KEYS["slow"], max_tokens=1).done()
    caller = await gateway.order("/reload")
    assert caller.status == 200, caller.content
    assert caller.json["revision"] == 2
    assert caller.json["changes"]["deployment.tenants[free].rpm_limit"] == [None, 1]
    assert (await gateway.ask(key=KEYS["slow"]).done()).status == 401
    first = await gateway.ask(max_tokens=1).done()
    assert (first.status, first.headers["x-ratelimit-remaining-requests"]) == (200, "0")
    assert (await gateway.ask(max_tokens=1).done()).status == 429
    shown = (await gateway.look("/keys")).json
    assert shown == {
        "total": 2,
        "keys": [{"name": "free", "tenant": "free"}, {"name": "new", "tenant": "new"}],
        "admin": ["ops"],
    }
    (line,) = audited(gateway, tmp_path)
    assert line["what"] == "reload"
    assert "0" * 64 not in json.dumps(line)
    assert line["new"]["keys[new]"] == {"name": "new", "tenant": "new"}
    offered = (await gateway.scrape())["headrace_offered_requests_total"]
    assert {sample.labels["tenant"] for sample in offered} == {"free", "other"}
    gateway.finish()
    assert isinstance(verify_decisions(tmp_path / "decisions.jsonl"), Verified)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda s: replace(s, server=replace(s.server, port=1)), "server.port"),
        (
            lambda s: replace(
                s,
                deployment=replace(
                    s.deployment, pools=(replace(s.deployment.pools[0], replicas=9),)
                ),
            ),
            "deployment.pools[p].replicas",
        ),
        (
            lambda s: replace(s, upstreams=(UpstreamSpec(url="http://127.0.0.1:1", pool="p"),)),
            "upstreams[0].url",
        ),
        (lambda s: replace(s, keys=()), "from some to none"),
        (lambda s: replace(s, admin=None), "admin"),
    ],
)
async def test_a_reload_refuses_what_needs_a_restart(
    change: Callable[[Settings], Settings], path: str
) -> None:
    gateway = changing(change)
    caller = await gateway.order("/reload")
    assert (caller.status, caller.error["code"]) == (409, "needs_restart")
    assert path in caller.error["message"]
    assert gateway.driver.revision == 1
    gateway.finish()


async def test_a_reload_of_a_wrong_file_or_of_none_changes_nothing() -> None:
    def wrong() -> Settings:
        raise ConfigError([Fault(Origin("d.yaml", 3), "unknown field `x`", "$.server")])

    gateway = Managed(reread=wrong)
    caller = await gateway.order("/reload")
    assert (caller.status, caller.error["code"]) == (400, "invalid_value")
    assert "d.yaml:3: unknown field `x`" in caller.error["message"]
    gateway.finish()
    gateway = Managed()
    caller = await gateway.order("/reload")
    assert (caller.status, caller.error["code"]) == (409, "no_file")
    gateway.finish()


async def test_a_reload_that_makes_no_sense_changes_nothing() -> None:
    gateway = changing(lambda old: replace(old, keys=(replace(old.keys[0], tenant="nobody"),)))
    caller = await gateway.order("/reload")
    assert (caller.status, caller.error["code"]) == (400, "invalid_value")
    assert "unknown tenant `nobody` at `$.keys[0].tenant`" in caller.error["message"]
    assert gateway.driver.revision == 1
    gateway.finish()


async def test_a_reload_of_the_same_file_is_no_revision() -> None:
    gateway = changing(lambda settings: settings)
    assert (await gateway.order("/reload")).json == {"revision": 1, "changes": {}, "warnings": []}
    gateway.finish()


# What is shown ---------------------------------------------------------------------------------


async def test_tenants_show_what_is_left_of_their_limits() -> None:
    gateway, engine = obedient()
    caller = gateway.ask(key=KEYS["single"])
    await reach(gateway.clock, 1)
    rows = {row["name"]: row for row in (await gateway.look("/tenants")).json["tenants"]}
    assert rows["single"]["parallel"] == 1
    assert rows["slow"]["balances"]["requests"] == {"limit": 1, "remaining": 1, "full_in_s": 0.0}
    assert rows["free"]["balances"] == {}
    engine.say("x")
    engine.end()
    await caller.done()
    rest = (await gateway.look("/tenants?offset=3")).json
    assert (rest["total"], [row["name"] for row in rest["tenants"]]) == (4, ["narrow"])
    assert (await gateway.look("/tenants?offset=-1")).status == 400
    gateway.finish()


async def test_the_configuration_is_shown_whole_but_for_its_secrets() -> None:
    gateway = Managed()
    shown = (await gateway.look("/config")).json
    assert shown["revision"] == 1
    assert shown["keys"][0] == {"name": "free", "tenant": "free"}
    assert shown["admin"]["keys"] == [{"name": "ops"}]
    assert shown["deployment"]["admission"]["margin_ms"] == 50.0
    gateway.finish()


async def test_a_caller_that_leaves_before_its_body_is_read_is_nobodys_fault() -> None:
    gateway = Managed()
    incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    incoming.put_nowait({"type": "http.disconnect"})
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/freeze",
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {ADMIN_KEY}".encode())],
    }
    await gateway.admin(scope, incoming.get, send)
    assert sent[0]["status"] == 499
    assert not (await gateway.look("/policy")).json["frozen"]
    gateway.finish()


async def test_a_single_gate_can_be_set_to_record_alone_and_back() -> None:
    gateway = Managed()
    for modes, said in (
        ({"deadline": "audit"}, "audit"),
        ({"budget": "audit"}, "audit:budget+deadline"),
        ({"deadline": None}, "audit:budget"),
    ):
        assert (await gateway.order("/policy", {"admission": {"modes": modes}})).status == 200
        assert gateway.driver.plane.settings.config.admission.summary() == said
    wrong = await gateway.order("/policy", {"admission": {"modes": {"memory": "observe"}}})
    assert wrong.status == 400
    gateway.finish()
