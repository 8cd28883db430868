"""Users of a tenant that shares by them: equal parts, and no name of theirs is kept anywhere."""

import asyncio
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.config.schema import Settings
from headrace.gateway.clock import LoopClock
from headrace.model.deployment import ClassSpec, OrganisationSpec, PoolSpec, TenantSpec
from headrace.model.event import RequestArrived
from headrace.model.paths import SEPARATOR
from headrace.policy.admission.gates import GateMode, Gates
from headrace.policy.catalog import PlaneConfig
from tests.gateway.managed import Managed
from tests.gateway.scenes import KEYS, MODEL, Caller, ObedientEngine, deployment
from tests.plane.scenes import small

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

NAMES = ("margaret@example.org", "søren", "user-ünknown-17")
WAYS = ("header", "user", "safety_identifier")


def told(way: str, user: str) -> dict[str, Any]:
    """Return how a caller tells for whom a request is."""
    return {"headers": {"x-headrace-user": user}} if way == "header" else {way: user}


def shared(*, by_user: bool) -> PlaneConfig:
    """Return an engine with a single slot, before one tenant of many users."""
    plain = deployment(tenants=(TenantSpec(name="free", by_user=by_user),))
    pool = PoolSpec(name="p", model=MODEL, profile=small(65_536, running=1))
    fields = {name: getattr(plain, name) for name in plain.__struct_fields__}
    patient = (ClassSpec(name="interactive", ttft_ms=8_000.0),)
    audit = Gates(mode=GateMode.AUDIT)
    changed = {"pools": (pool, plain.pools[1]), "classes": patient, "admission": audit}
    return PlaneConfig(**(fields | changed))


async def served(engine: ObedientEngine, most: int) -> list[str | None]:
    """Let one request after the other be answered; return whose they were, the first left out."""
    for nth in range(most):
        attempt = engine.calls[nth].dispatch.attempt
        engine.say(
            "word " * 200, attempt
        )  # as long as is predicted: what is given back moves turns
        engine.end(attempt)
        await asyncio.sleep(0.01)
    return [call.request.user for call in engine.calls[1 : most + 1]]


def files(folder: Path) -> list[Path]:
    """Return every file below a folder."""
    return [path for path in folder.rglob("*") if path.is_file()]


def ways(held: Managed) -> list[list[str]]:
    """Return where in the tree what was charged stands, of nodes that are remembered."""
    trees = held.driver.plane.state.ledger.shares.values()
    return [
        [part[1:] for part in key.split(SEPARATOR)[1:]] for one in trees for key in one.counters
    ]


async def settle(callers: list[Caller]) -> None:
    """Let the rest go."""
    for caller in callers:
        caller.leave()
    await asyncio.gather(*(caller.task for caller in callers))


@pytest.mark.parametrize("way", WAYS)
async def test_two_users_share_equally_whoever_asks_more(way: str) -> None:
    engine = ObedientEngine(LoopClock(asyncio.get_running_loop()))
    held = Managed(lambda _: [engine], config=shared(by_user=True))
    callers = [held.ask(**told(way, NAMES[0])) for _ in range(30)]
    callers += [held.ask(**told(WAYS[nth % 3], NAMES[1])) for nth in range(10)]
    await asyncio.sleep(1)
    turns = await served(engine, 16)
    assert sorted(Counter(turns).values()) == [8, 8], "however it is told, it is one user"
    await settle(callers)
    held.finish()


async def test_without_users_of_its_own_a_tenant_is_one_queue_and_nothing_is_kept() -> None:
    engine = ObedientEngine(LoopClock(asyncio.get_running_loop()))
    held = Managed(lambda _: [engine], config=shared(by_user=False))
    callers = [held.ask(**told(way, NAMES[0])) for way in WAYS for _ in range(4)]
    callers += [held.ask(**told(way, NAMES[1])) for way in WAYS]
    await asyncio.sleep(1)
    assert await served(engine, 12) == [None] * 12
    arrived = [event for _, event in held.pages.records() if isinstance(event, RequestArrived)]
    assert {event.request.user for event in arrived} == {None}
    assert [call.request.id for call in engine.calls] == sorted(
        call.request.id for call in engine.calls
    )
    await settle(callers)
    held.finish()


@pytest.mark.parametrize("by_user", [False, True])
async def test_no_name_is_in_journal_logs_metrics_or_decisions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, by_user: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    engine = ObedientEngine(LoopClock(asyncio.get_running_loop()))
    held = Managed(lambda _: [engine], config=shared(by_user=by_user), folder=tmp_path)
    callers = [held.ask(**told(way, name)) for way in WAYS for name in NAMES]
    callers.append(held.ask(**told("header", NAMES[0]), max_tokens=-1))
    await asyncio.sleep(1)
    await served(engine, 4)
    metrics = (await held.look("/metrics")).content
    frozen = held.driver.plane.freeze()
    await settle(callers)
    held.finish()
    kept = [metrics, frozen, caplog.text.encode(), *map(bytes, held.pages.segments)]
    kept += [path.read_bytes() for path in files(tmp_path)]
    assert len(kept) > 5
    for content in kept:
        for name in NAMES:
            assert name.encode() not in content
            assert name.encode("latin-1") not in content
            assert json.dumps(name).encode()[1:-1] not in content


async def test_of_two_tenants_no_user_is_the_same() -> None:
    """Nor can either learn the other's users by a name it tries."""
    two = tuple(TenantSpec(name=name, by_user=True) for name in ("free", "slow"))
    held = Managed(config=deployment(tenants=two))
    for tenant in ("free", "slow"):
        await held.ask(key=KEYS[tenant], **told("user", NAMES[0])).done()
    arrived = [event for _, event in held.pages.records() if isinstance(event, RequestArrived)]
    users = [event.request.user for event in arrived]
    assert len(set(users)) == 2
    assert None not in users
    held.finish()


@pytest.mark.parametrize(
    ("fields", "known"),
    [
        ({"metadata": {"user_id": NAMES[0]}}, True),
        ({"metadata": {"user_id": 7}, "user": NAMES[0]}, True),
        ({"metadata": None}, False),
        ({"metadata": "x", "safety_identifier": ["odd"]}, False),
        ({"user": ""}, False),
        ({"user": "\ud800"}, None),
    ],
)
async def test_messages_tell_a_user_in_a_field_of_their_own(
    fields: dict[str, Any], known: bool | None
) -> None:
    held = Managed(config=deployment(tenants=(TenantSpec(name="free", by_user=True),)))
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    caller = await held.ask(path="/v1/messages", body=body | fields).done()
    assert caller.status == (200 if known is not None else 400)
    arrived = [event for _, event in held.pages.records() if isinstance(event, RequestArrived)]
    same = held.ask(**told("header", NAMES[0]))
    await same.done()
    again = [event for _, event in held.pages.records() if isinstance(event, RequestArrived)][-1]
    assert [event.request.user == again.request.user for event in arrived] == [known] * len(arrived)
    held.finish()


async def test_keys_made_at_run_time_and_reloads_leave_the_tree_sound() -> None:
    """A key of a team is in the team's place; one of its own stands beside the organisations."""
    tree = PlaneConfig(
        **{
            **{name: getattr(deployment(), name) for name in PlaneConfig.__struct_fields__},
            "organisations": (OrganisationSpec(name="acme", minimum=0.2),),
            "tenants": (
                TenantSpec(name="free", organisation="acme", by_user=True, maximum=0.9),
                TenantSpec(name="slow", organisation="acme"),
                *(TenantSpec(name=name) for name in ("single", "narrow")),
            ),
        }
    )
    file: list[Settings] = []
    held = Managed(config=tree, reread=lambda: file[-1])
    file.append(held.settings)
    team = (await held.order("/key/generate", {"team_id": "free"})).json["key"]
    own = (await held.order("/key/generate", {"key_alias": "own", "rpm_limit": 9})).json["key"]
    for key in (team, own):
        assert (await held.ask(key=key, user="u").done()).status == 200
    found = ways(held)
    assert ["interactive", "acme", "free"] in found
    assert ["interactive", "own"] in found
    moved = replace(tree, tenants=(replace(tree.tenants[0], organisation=None), *tree.tenants[1:]))
    file.append(replace(held.settings, deployment=moved))
    assert (await held.order("/reload")).status == 200
    assert (await held.ask(key=team, user="u").done()).status == 200
    assert (await held.order("/key/delete", {"key_aliases": ["own"]})).status == 200
    found = ways(held)
    assert ["interactive", "free"] in found
    assert not [way for way in found if "own" in way or ("acme" in way and "free" in way)]
    held.finish()
