"""Keys made, changed and withdrawn while the gateway runs, as LiteLLM's callers do it."""

import asyncio
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.adapters.journal.ring import segments
from headrace.config.changes import TOLD_MAX
from headrace.config.errors import ConfigError
from headrace.config.schema import JournalSpec, KeySpec, Settings
from headrace.gateway.auth import key_hash
from headrace.gateway.clock import LoopClock
from headrace.gateway.grants import FILE, Grant, Grants
from headrace.gateway.server import Gateway
from headrace.model.budget import Per, Unit, WindowSpec
from headrace.model.deployment import TenantSpec
from headrace.model.event import ConfigChanged
from headrace.model.price import PriceSpec
from headrace.plane.journal import Verified, verify
from headrace.policy.catalog import PlaneConfig
from headrace.units import NS_PER_S
from tests.gateway.managed import ADMIN_KEY, SPEC, Managed
from tests.gateway.scenes import KEYS, Caller, ObedientEngine, deployment, keys, reach, sha256

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

Told = dict[str, Any]
EMPTY: tuple[Any, ...] = (0, False, "")
"""What says nothing to Python, and something that cannot be done to us."""
NO_LIMITS: Told = {
    "models": [],
    "tpm_limit": None,
    "rpm_limit": None,
    "max_parallel_requests": None,
    "max_budget": None,
    "soft_budget": None,
    "budget_duration": None,
}
UNCOUNTED: Told = {"spend": None, "budget_reset_at": None}
"""What is known of money where nobody counts it."""


async def made(gateway: Managed, **fields: Any) -> Told:
    caller = await gateway.order("/key/generate", fields)
    assert caller.status == 200, caller.content
    told: Told = caller.json
    return told


async def status(gateway: Managed, key: str) -> int | None:
    return (await gateway.ask(key=key, max_tokens=1).done()).status


def files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def audited(folder: Path) -> list[Told]:
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


async def test_a_key_is_made_in_force_at_once_and_told_once(tmp_path: Path) -> None:
    gateway = Managed(folder=tmp_path)
    told = await made(
        gateway, key_alias="app", rpm_limit=2, models=["m"], metadata={}, blocked=False
    )
    key = told.pop("key")
    shown = {**NO_LIMITS, "key_alias": "app", "team_id": "app", "models": ["m"], "rpm_limit": 2}
    assert told == {**shown, "revision": 2}
    assert [await status(gateway, key) for _ in range(3)] == [200, 200, 429]
    denied = await gateway.ask(key=key, model="other").done()
    assert denied.error["code"] == "model_not_allowed"
    for name in (key, "app"):
        info = await gateway.look(f"/key/info?key={name}")
        assert info.json == {"key": "app", "info": {**shown, **UNCOUNTED}}
    events = [event for _, event in gateway.pages.records() if isinstance(event, ConfigChanged)]
    assert [event.revision for event in events] == [1, 2]
    (line,) = audited(tmp_path)
    assert (line["who"], line["what"], line["revision"]) == ("ops", "key generate app", 2)
    assert line["new"]["keys[app]"] == {"name": "app", "tenant": "app"}
    assert line["new"]["deployment.tenants[app]"]["rpm_limit"] == 2
    assert line["old"] == {"keys[app]": None, "deployment.tenants[app]": None}
    gateway.finish()
    for name, content in files(tmp_path).items():
        assert key not in content, name
        assert (sha256(key) in content) is (name == FILE)


async def test_a_key_of_a_team_shares_its_limits() -> None:
    gateway = Managed()
    told = await made(gateway, team_id="slow")
    assert told["key_alias"].startswith("key-")
    assert (told["team_id"], told["rpm_limit"]) == ("slow", 1)
    assert [await status(gateway, one) for one in (KEYS["slow"], told["key"])] == [200, 429]
    gateway.finish()


async def test_limits_of_a_key_change_for_who_comes_and_null_takes_one_away() -> None:
    gateway = Managed()
    key = (await made(gateway, key_alias="app", rpm_limit=1, models=["other"]))["key"]
    assert await status(gateway, key) == 403
    updated = await gateway.order("/key/update", {"key": key, "models": None, "tpm_limit": 9_000})
    assert updated.status == 200
    assert updated.json["key"] == "app", "the key itself is told once"
    assert (updated.json["models"], updated.json["rpm_limit"]) == ([], 1)
    assert [await status(gateway, key) for _ in range(2)] == [200, 429]
    await gateway.order("/key/update", {"key": "app", "rpm_limit": None})
    assert [await status(gateway, key) for _ in range(2)] == [200, 200]
    same = await gateway.order("/key/update", {"key": "app"})
    assert (same.status, same.json["revision"]) == (200, gateway.driver.revision)
    gateway.finish()


async def test_a_withdrawn_key_opens_nothing_and_who_is_in_ends_well() -> None:
    gateway = Managed(lambda clock: [ObedientEngine(clock)])
    (engine,) = gateway.engines
    both = [(await made(gateway, key_alias=name))["key"] for name in ("one", "two")]
    running = gateway.ask(key=both[0])
    await reach(gateway.clock, 1)
    gone = await gateway.order("/key/delete", {"keys": [both[0]], "key_aliases": ["two"]})
    assert gone.json["deleted_keys"] == ["one", "two"]
    assert [await status(gateway, one) for one in both] == [401, 401]
    assert "one" not in {spec.name for spec in gateway.driver.plane.settings.config.tenants}
    engine.say("x")
    engine.end()
    assert (await running.done()).status == 200
    gateway.finish()


async def test_many_keys_are_withdrawn_at_once_and_only_they_are_told(tmp_path: Path) -> None:
    named = [f"k{nth}" for nth in range(300)]
    specs = [KeySpec(name=name, tenant=name, hash=key_hash(name)) for name in named]
    Grants(tmp_path).keep(
        tuple(Grant(key=spec, tenant=TenantSpec(name=spec.name)) for spec in specs)
    )
    gateway = Managed(folder=tmp_path)
    gone = await gateway.order("/key/delete", {"key_aliases": named[:1]})
    assert gone.status == 200
    gone = await gateway.order("/key/delete", {"keys": named[1:200]})
    assert gone.json["deleted_keys"] == named[1:200]
    one, many = audited(tmp_path)
    assert set(one["old"]) == set(one["new"]) == {"deployment.tenants[k0]", "keys[k0]"}
    assert "more" not in one
    assert (len(many["old"]), many["more"]) == (TOLD_MAX, 2 * 199 - TOLD_MAX)
    assert many["what"] == f"key delete {', '.join(named[1:200])}"
    row = (await gateway.look("/policy")).json["revisions"][-1]
    assert (len(row["changes"]), row["more"]) == (TOLD_MAX, many["more"])
    assert len(row["what"]) <= 200
    assert [await status(gateway, name) for name in ("k0", "k199", "k200")] == [401, 401, 200]
    gateway.finish()


async def test_what_is_named_twice_counts_once() -> None:
    gateway = Managed()
    told = await made(gateway, key_alias="one", models=["m", "other", "m"])
    assert told["models"] == ["m", "other"]
    changed = await gateway.order("/key/update", {"key": "one", "models": ["m", "m"]})
    assert changed.json["models"] == ["m"]
    gone = await gateway.order(
        "/key/delete", {"keys": ["one", told["key"], "one"], "key_aliases": ["one"]}
    )
    assert gone.json["deleted_keys"] == ["one"]
    gateway.finish()


def priced() -> PlaneConfig:
    price = PriceSpec(input=1_000.0, output=1_000.0)
    config = deployment()
    return replace(config, models=tuple(replace(one, price=price) for one in config.models))


async def test_a_budget_of_a_key_is_charged_shown_and_refuses_when_it_is_spent() -> None:
    gateway = Managed(config=priced())
    key = (await made(gateway, key_alias="app", max_budget=0.05, budget_duration="24h"))["key"]
    fresh = (await gateway.look(f"/key/info?key={key}")).json["info"]
    assert (fresh["max_budget"], fresh["soft_budget"], fresh["budget_duration"]) == (
        0.05,
        None,
        "1d",
    )
    assert fresh["spend"] == 0
    answered = await gateway.ask(key=key, max_tokens=16).done()
    used = answered.json["usage"]["total_tokens"]
    assert answered.status == 200
    spent = (await gateway.look("/key/info?key=app")).json["info"]
    assert spent["spend"] == used * 1_000 / 1_000_000, "the books' own count, by the model's price"
    left = datetime.fromisoformat(spent["budget_reset_at"]).timestamp() - gateway.clock.wall()
    assert 0 < left <= Per.DAY.ns // NS_PER_S
    refused = gateway.ask(key=key, max_tokens=60)
    assert (await refused.done()).error["code"] == "budget_exceeded"
    assert "usd/day" in refused.error["message"]
    raised = await gateway.order("/key/update", {"key": "app", "max_budget": 5})
    assert (raised.json["max_budget"], raised.json["budget_duration"]) == (5.0, "1d")
    kept = (await gateway.look("/key/info?key=app")).json["info"]
    assert kept["spend"] == spent["spend"], "what was spent stays spent under another limit"
    assert (await gateway.ask(key=key, max_tokens=60).done()).status == 200
    gateway.finish()


@pytest.mark.parametrize(
    ("spelled", "per"),
    [
        *((one, Per.MINUTE) for one in ("1m", "60s")),
        *((one, Per.HOUR) for one in ("1h", "60m", "3600s")),
        *((one, Per.DAY) for one in ("1d", "24h", "86400s")),
        *((one, Per.MONTH) for one in ("30d", "1mo", "720h")),
    ],
)
async def test_every_duration_that_the_books_keep_may_be_spelled_as_litellm_does(
    spelled: str, per: Per
) -> None:
    gateway = Managed(config=priced())
    await made(gateway, key_alias="app", soft_budget=0.5, budget_duration=spelled)
    (tenant,) = (one for one in gateway.driver.plane.settings.config.tenants if one.name == "app")
    assert tenant.budgets == (WindowSpec(unit=Unit.USD, per=per, soft=0.5),)
    gone = await gateway.order("/key/update", {"key": "app", "soft_budget": None})
    assert {name: gone.json[name] for name in NO_LIMITS} == NO_LIMITS
    gateway.finish()


async def test_a_budget_of_a_key_outlives_the_process(tmp_path: Path) -> None:
    gateway = Managed(config=priced(), folder=tmp_path)
    await made(gateway, key_alias="app", max_budget=1, budget_duration="1mo")
    gateway.finish()
    again = Managed(config=priced(), folder=tmp_path)
    info = (await again.look("/key/info?key=app")).json["info"]
    assert (info["max_budget"], info["budget_duration"]) == (1.0, "30d")
    again.finish()


async def test_what_says_nothing_asks_for_the_defaults() -> None:
    gateway = Managed()
    nothing = {**NO_LIMITS, "key_alias": None, "team_id": None}
    told = await made(gateway, **nothing)
    assert told["team_id"] == told["key_alias"]
    assert {name: told[name] for name in NO_LIMITS} == NO_LIMITS
    assert (await made(gateway, **{**nothing, "team_id": "free"}))["team_id"] == "free"
    gateway.finish()


async def test_a_tenant_that_other_keys_are_of_is_not_withdrawn() -> None:
    gateway = Managed()
    key = (await made(gateway, key_alias="one"))["key"]
    other = (await made(gateway, key_alias="two", team_id="one"))["key"]
    kept = await gateway.order("/key/delete", {"keys": ["one"]})
    assert (kept.status, kept.error["code"]) == (400, "invalid_value")
    assert "unknown tenant `one`" in kept.error["message"]
    assert [await status(gateway, each) for each in (key, other)] == [200, 200]
    assert (await gateway.order("/key/delete", {"keys": ["one", "two"]})).status == 200
    gateway.finish()


@pytest.mark.parametrize(
    ("path", "asked", "status_", "code", "said"),
    [
        ("generate", {"max_budget": 5.0}, 400, "invalid_value", "`30d` (month)"),
        *(
            (
                "generate",
                {"max_budget": 5.0, "budget_duration": value},
                400,
                "invalid_value",
                "`1h`",
            )
            for value in (*EMPTY, [], "7d", "30", "d", "0d", "-1d", "1d ", "9" * 20 + "d", 30)
        ),
        *(
            ("generate", {name: value, "budget_duration": "1d"}, 400, "invalid_value", name)
            for name in ("max_budget", "soft_budget")
            for value in (*EMPTY, [], -1, 2e15, "5")
        ),
        (
            "generate",
            {"max_budget": 1, "soft_budget": 2, "budget_duration": "1d"},
            400,
            "invalid_value",
            "above hard",
        ),
        ("generate", {"budget_duration": "1d"}, 400, "invalid_value", "needs `max_budget`"),
        ("generate", {"team_id": "free", "max_budget": 1}, 400, "invalid_value", "max_budget"),
        (
            "generate",
            {"max_budget": 1, "budget_duration": "1d"},
            400,
            "invalid_value",
            "no `price`",
        ),
        ("generate", {"model_max_budget": {"m": 1}}, 400, "unsupported_parameter", "max_budget"),
        ("generate", {"duration": "30d"}, 400, "unsupported_parameter", "duration"),
        ("generate", {"key": "sk-mine"}, 400, "unsupported_parameter", "key"),
        ("generate", {"team_id": "nope"}, 400, "invalid_value", "unknown tenant `nope`"),
        ("generate", {"team_id": "free", "rpm_limit": 1}, 400, "invalid_value", "rpm_limit"),
        ("generate", {"key_alias": "free"}, 400, "invalid_value", "`free` is already"),
        ("generate", {"key_alias": "a b"}, 400, "invalid_value", "`$.key_alias`"),
        ("generate", {"key_alias": 7}, 400, "invalid_value", "`$.key_alias`"),
        ("generate", {"team_id": 7}, 400, "invalid_value", "`$.team_id`"),
        *(
            ("generate", {name: value}, 400, "invalid_value", name.removeprefix("key_"))
            for name in ("tpm_limit", "rpm_limit", "max_parallel_requests")
            for value in (*EMPTY, [], 0.0)
        ),
        *(
            (path, {**more, "models": value}, 400, "invalid_value", "models")
            for path, more in (("generate", {}), ("update", {"key": "own"}))
            for value in (*EMPTY, {})
        ),
        *(
            ("generate", {name: value}, 400, "invalid_value", said)
            for name, said in (("key_alias", "`$.key_alias`"), ("team_id", "`$.team_id`"))
            for value in (*EMPTY, [], "a\n", "a\n\n", "\na")
        ),
        ("generate", {"team_id": "free", "rpm_limit": 0}, 400, "invalid_value", "rpm_limit"),
        ("generate", {"team_id": "free", "models": ["m"]}, 400, "invalid_value", "models"),
        *(("update", {"key": value}, 400, "invalid_value", "alias") for value in (*EMPTY, [])),
        ("update", {"key": "own", "rpm_limit": 0}, 400, "invalid_value", "rpm_limit"),
        *(
            ("delete", {name: value}, 400, "invalid_value", "array")
            for name in ("keys", "key_aliases")
            for value in (*EMPTY, {})
        ),
        ("delete", {"keys": [""]}, 400, "invalid_value", "alias"),
        ("delete", {"keys": []}, 400, "invalid_value", "key_aliases"),
        ("delete", {"keys": ["own"] * 1_001}, 400, "invalid_value", "1000"),
        ("generate", {"rpm_limit": -1}, 400, "invalid_value", "rpm_limit"),
        ("generate", {"models": ["nope"]}, 400, "invalid_value", "nope"),
        ("generate", [], 400, "invalid_value", "object"),
        ("update", {"key": "own", "soft_budget": 1}, 400, "invalid_value", "budget_duration"),
        ("update", {"key": "own", "tpm_limit": "x"}, 400, "invalid_value", "tpm_limit"),
        ("update", {"key": "team", "rpm_limit": 1}, 409, "not_its_own", "tenant `free`"),
        ("update", {"key": "free", "rpm_limit": 1}, 409, "in_the_file", "free"),
        ("update", {"key": "nope"}, 404, "key_not_found", ""),
        ("update", {}, 400, "invalid_value", "alias"),
        ("delete", {"keys": ["own", "nope"]}, 404, "key_not_found", ""),
        ("delete", {"keys": ["own", "free"]}, 409, "in_the_file", "free"),
        ("delete", {"keys": "own"}, 400, "invalid_value", "array"),
        ("delete", {}, 400, "invalid_value", "key_aliases"),
    ],
)
async def test_what_cannot_be_done_is_refused_and_nothing_is_changed(
    path: str, asked: Any, status_: int, code: str, said: str
) -> None:
    gateway = Managed()
    await made(gateway, key_alias="own")
    await made(gateway, key_alias="team", team_id="free")
    revision = gateway.driver.revision
    caller = await gateway.order(f"/key/{path}", json.dumps(asked).encode())
    assert (caller.status, caller.error["code"]) == (status_, code)
    assert said in caller.error["message"]
    assert gateway.driver.revision == revision
    for query in ("", "?key=", "?key=nope"):
        info = await gateway.look(f"/key/info{query}")
        assert info.status == (404 if "nope" in query else 400)
    gateway.finish()


async def test_keys_are_made_where_keys_are_asked_for_and_nothing_is_frozen() -> None:
    open_ = Managed(keyed=False)
    caller = await open_.order("/key/generate", {})
    assert (caller.status, caller.error["code"]) == (409, "needs_restart")
    open_.finish()
    watching = Managed(observing=True)
    assert (await watching.order("/key/generate", {})).error["code"] == "observing"
    watching.finish()
    frozen = Managed()
    await frozen.order("/freeze")
    assert (await frozen.order("/key/generate", {})).error["code"] == "frozen"
    frozen.finish()


async def test_a_key_is_withdrawn_while_changes_are_frozen() -> None:
    gateway = Managed()
    key = (await made(gateway, key_alias="leaked"))["key"]
    await gateway.order("/freeze")
    for path, asked in (("generate", {}), ("update", {"key": "leaked", "rpm_limit": 1})):
        assert (await gateway.order(f"/key/{path}", asked)).error["code"] == "frozen"
    gone = await gateway.order("/key/delete", {"keys": [key]})
    assert (gone.status, gone.json["deleted_keys"]) == (200, ["leaked"])
    assert await status(gateway, key) == 401
    assert (await gateway.look("/policy")).json["frozen"] is True
    gateway.finish()


async def test_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.gateway.litellm.GRANTS_MAX", 1)
    gateway = Managed()
    await made(gateway)
    caller = await gateway.order("/key/generate", {})
    assert (caller.status, caller.error["code"]) == (409, "too_many_keys")
    gateway.finish()


async def test_a_reload_leaves_keys_that_were_made_here() -> None:
    file: list[Settings] = []
    gateway = Managed(reread=lambda: file[-1])
    plain = gateway.settings
    key = (await made(gateway, key_alias="app", rpm_limit=5))["key"]
    file.append(replace(plain, keys=plain.keys[:2]))
    reloaded = await gateway.order("/reload")
    assert reloaded.status == 200, reloaded.content
    assert [await status(gateway, one) for one in (key, KEYS["free"], KEYS["narrow"])] == [
        *(200, 200, 401)
    ]
    file.append(
        replace(plain, keys=(*plain.keys, replace(plain.keys[0], name="app", hash=key_hash("x"))))
    )
    clash = await gateway.order("/reload")
    assert (clash.status, "`app` is already" in clash.error["message"]) == (400, True)
    gateway.finish()


# Kept ------------------------------------------------------------------------------------------


async def test_keys_outlive_the_process(tmp_path: Path) -> None:
    first = Managed(folder=tmp_path)
    key = (await made(first, key_alias="app", rpm_limit=7))["key"]
    lost = (await made(first, key_alias="lost"))["key"]
    await first.order("/key/delete", {"keys": ["lost"]})
    first.finish()
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    second = Managed(folder=tmp_path)
    assert [await status(second, one) for one in (key, lost)] == [200, 401]
    assert (await second.look("/key/info?key=app")).json["info"]["rpm_limit"] == 7
    assert (await second.order("/key/delete", {"keys": [key]})).status == 200
    second.finish()


async def test_a_key_that_cannot_be_kept_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Managed(folder=tmp_path)
    kept = (await made(gateway, key_alias="kept"))["key"]
    before = (tmp_path / FILE).read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headrace.gateway.grants.os.fsync", full)
    caller = await gateway.order("/key/generate", {"key_alias": "app"})
    assert (caller.status, caller.error["code"]) == (500, "internal_error")
    assert "No space left" in caller.error["message"]
    assert (await gateway.look("/key/info?key=app")).status == 404
    assert (tmp_path / FILE).read_bytes() == before
    assert [name for name in files(tmp_path) if name.startswith("keys")] == [FILE]
    assert await status(gateway, kept) == 200
    gateway.finish()


async def test_a_restart_on_a_journal_goes_on_with_the_keys_under_the_same_revision(
    tmp_path: Path,
) -> None:
    settings = Settings(
        deployment=deployment(),
        keys=keys(),
        admin=SPEC,
        journal=JournalSpec(path=str(tmp_path / "journal")),
    )
    key = ""
    for life in range(2):
        gateway = Gateway(settings, LoopClock(asyncio.get_running_loop()))
        assert gateway.admin is not None
        gateway.driver.start(gateway._config, gateway._revision)
        if not life:
            asked = Caller(
                gateway.admin, path="/key/generate", body={"key_alias": "a"}, key=ADMIN_KEY
            )
            key = (await asked.done()).json["key"]
        assert gateway.driver.revision == 2
        assert (await Caller(gateway.app, key=key, max_tokens=1).done()).status == 200
        gateway.driver.stop()
        gateway.driver.unrecord()
        gateway._files.close()
    assert isinstance(verify(segments(tmp_path / "journal")), Verified)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"\xff", b"[" * 100_000),
        *(b'{"version":1,"grants":[{"key":1}]}', b'{"version":2}', b'{"version":2,"more":[]}'),
    ],
)
async def test_a_file_that_cannot_be_read_stops_the_start(tmp_path: Path, content: bytes) -> None:
    """Better none than one in which keys that were withdrawn, or made, are forgotten."""
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ConfigError, match=r"keys\.json: cannot be read"):
        Grants(tmp_path)


async def test_a_file_of_another_version_is_named_so(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b'{"version":2,"grants":[],"more":1}')
    with pytest.raises(ConfigError, match="of version 2, and only 1 is known"):
        Grants(tmp_path)


async def test_kept_keys_that_do_not_fit_the_configuration_stop_the_start(tmp_path: Path) -> None:
    first = Managed(folder=tmp_path)
    await made(first, team_id="free")
    first.finish()
    config = first.settings.deployment
    with pytest.raises(ConfigError, match="unknown tenant `free`"):
        Grants(tmp_path).beside(
            Settings(deployment=replace(config, tenants=config.tenants[1:]), keys=())
        )


async def test_callers_do_not_reach_these_calls() -> None:
    gateway = Managed()
    caller = await Caller(gateway.app, path="/key/generate", body={}).done()
    assert caller.status == 404
    await asyncio.sleep(0)
    gateway.finish()
