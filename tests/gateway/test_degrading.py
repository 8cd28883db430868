"""What callers say, and are told, of lesser forms of an answer."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.adapters.engines.answer import lengths
from headrace.adapters.engines.emulated import EmulatedEngine
from headrace.adapters.engines.inprocess import InProcessEngine
from headrace.config.schema import ServerSpec
from headrace.gateway.asked import read
from headrace.model.deployment import ClassSpec, Defer, ModelSpec, TenantSpec
from headrace.model.event import RequestArrived
from headrace.model.ids import ClassName, Incarnation, ModelName, PoolName, ReplicaName, TenantId
from headrace.model.ladder import LadderSpec
from headrace.model.request import Request
from headrace.plane.levels import Standing
from headrace.policy.batching.chunked import ChunkedPrefill
from headrace.policy.catalog import PlaneConfig
from headrace.ports.clock import Clock
from headrace.ports.engine import Route
from headrace.ports.job import JobId
from headrace.ports.jobs import Limits
from headrace.replica.core import Replica
from tests.conformance.jobs.naive_batches import NaiveBatches
from tests.gateway.deferring import Deferring
from tests.gateway.managed import Managed, value
from tests.gateway.scenes import (
    KEYS,
    PROFILE,
    Caller,
    Gateway,
    ObedientEngine,
    assert_books_closed,
    deployment,
    reach,
)
from tests.gateway.test_counting import Obedient, counting, turns

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

QUESTION = {"role": "user", "content": "why?"}
MARKED = [
    {"role": "system", "content": "s" * 4_096},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "a" * 400, "headrace": {"optional": 2}},
            {"type": "text", "text": "b" * 800, "headrace": {"optional": 1}},
            {"type": "text", "text": "c" * 80, "headrace": {"optional": 1, "kind": "citation"}},
        ],
    },
    QUESTION,
]


def arrived(world: Gateway) -> Request:
    """Return the newest request that the plane was told of."""
    events = [event for _, event in world.pages.records() if isinstance(event, RequestArrived)]
    return events[-1].request


async def over(world: Gateway, caller: Caller) -> None:
    """Have a caller leave, and check the books."""
    caller.leave()
    await caller.done()
    world.finish()


@pytest.mark.parametrize(
    ("told", "lowest"), [({}, 3), *(({"x-headrace-degrade": f"{n}"}, n) for n in range(4))]
)
async def test_a_caller_says_how_far_down_it_goes(told: dict[str, str], lowest: int) -> None:
    world = Gateway(lambda clock: [ObedientEngine(clock)])
    caller = world.ask(headers=told)
    await turns()
    assert arrived(world).lowest == lowest
    await over(world, caller)


@pytest.mark.parametrize(
    "told", ["4", "-1", "", "00", "1.0", "one", "٣".encode().decode("latin-1")]
)
async def test_a_level_that_is_none_is_blamed(told: str) -> None:
    world = Gateway(lambda clock: [ObedientEngine(clock)])
    caller = await world.ask(headers={"x-headrace-degrade": told}).done()
    assert (caller.status, caller.error["param"]) == (400, "x-headrace-degrade")
    world.finish()


async def test_the_plane_knows_how_much_may_be_left_out_and_the_engine_nothing_of_it() -> None:
    made: list[ObedientEngine] = []

    def engines(clock: Any) -> list[Any]:
        made.append(ObedientEngine(clock))
        return list(made)

    world = Gateway(engines)
    caller = world.ask(messages=MARKED)
    await turns()
    request = arrived(world)
    assert request.optional == (200, 100)
    assert len(request.prefix) > request.prefix_kept == 4, "what stands before the first of them"
    (call,) = made[0].calls
    assert b"headrace" not in call.ask.body
    assert call.ask.optional == ((1, 1), (1, 0))
    await over(world, caller)


async def test_parts_of_a_counted_prompt_are_scaled_and_the_tokenizer_sees_no_marks() -> None:
    bodies: list[bytes] = []

    class Seeing(Obedient):
        def payload(self, route: Route, body: bytes, prompt: bytes) -> bytes | None:
            bodies.append(body)
            return super().payload(route, body, prompt)

    counter = Seeing()
    world = Gateway(lambda clock: [ObedientEngine(clock)], counting=counting(counter))
    caller = world.ask(messages=MARKED)
    await turns()
    estimate = read(Route.CHAT, bodies[0]).input_tokens
    counter.say(2 * estimate)
    await turns()
    request = arrived(world)
    assert request.input_tokens == 2 * estimate
    assert request.optional == (400, 200), "the estimate was half as much"
    assert b"headrace" not in bodies[0]
    await over(world, caller)


async def test_a_mark_that_is_none_is_refused_with_its_field() -> None:
    world = Gateway(lambda clock: [ObedientEngine(clock)])
    part = {"type": "text", "text": "x", "headrace": {"optional": 0}}
    caller = await world.ask(messages=[{"role": "user", "content": [part]}, QUESTION]).done()
    assert caller.status == 400
    assert caller.error["param"].endswith("headrace.optional")
    assert caller.error["code"] == "invalid_value"
    world.finish()


async def test_a_request_that_is_served_as_asked_says_so() -> None:
    world = Gateway()
    caller = await world.ask(messages=MARKED, max_tokens=3).done()
    told = {name for name in caller.headers if name.startswith("x-headrace-")}
    assert caller.headers["x-headrace-degrade-level"] == "0"
    assert caller.headers["x-headrace-model-revision"] == "1"
    assert not told & {
        "x-headrace-degrade-reason",
        "x-headrace-optional-kept",
        "x-headrace-output-limit",
    }
    await asyncio.sleep(0)
    world.finish()


# Under load -----------------------------------------------------------------------------------

LADDER = LadderSpec(level=2, keep=1)
FORM = ("reason", "optional-kept", "output-limit")


def agreed(ladder: LadderSpec = LADDER, **of_class: Any) -> PlaneConfig:
    """Return a deployment in which `free` agreed to all of a ladder, `single` to one step, others to none."""
    tenants = (
        TenantSpec(name="free", degrade=3),
        TenantSpec(name="single", degrade=1),
        TenantSpec(name="slow"),
        TenantSpec(name="narrow", models=("other",)),
    )
    spec = ClassSpec(name="interactive", degrade=ladder, **of_class)
    return replace(deployment(tenants=tenants), classes=(spec, ClassSpec(name="batch")))


def talk(nth: int, *, parts: int = 8_000) -> list[dict[str, Any]]:
    """Return a prompt that no cache has, two parts of it optional."""
    marks = ({"optional": 1}, {"optional": 2}, {"optional": 3, "kind": "citation"}, None)
    texts = [
        {"type": "text", "text": f"{nth:04} " * (parts // 5), "headrace": mark} for mark in marks
    ]
    return [{"role": "user", "content": texts}]


def standing(world: Gateway, level: int) -> None:
    """Have the class at a level, as if load had brought it there."""
    plane = world.driver.plane
    known, now = plane.state.models[ModelName("m")], plane.state.now
    known.standings[ClassName("interactive")] = Standing(
        level=level, since=now, quiet_from=now, left_at=now
    )


def told(caller: Caller) -> dict[str, str]:
    """Return what an answer says of its form."""
    names = {f"x-headrace-degrade-{FORM[0]}": FORM[0], "x-headrace-degrade-level": "level"}
    names |= {f"x-headrace-{name}": name for name in FORM[1:]}
    return {names[name]: value for name, value in caller.headers.items() if name in names}


def poked(world: Gateway) -> None:
    """Stop; a journal does not verify where a level came from nowhere."""
    world.driver.stop()
    assert_books_closed(world.driver.plane)


async def level_now(world: Gateway, **fields: Any) -> Any:
    path = "/v1/headrace/ladder?model=m"
    return (await world.ask(path=path, method="GET", **fields).done()).json


async def rush(world: Gateway | Managed, gap_ms: float, count: int) -> list[tuple[str, Caller]]:
    """Have so many requests come at equal gaps, of one who agreed to less and one who did not."""

    async def one(nth: int) -> tuple[str, Caller]:
        await reach(world.clock, nth * gap_ms)
        who = "free" if nth % 2 else "slow"
        caller = world.ask(key=KEYS[who], messages=talk(nth), max_tokens=200)
        return who, await caller.done()

    return await asyncio.gather(*map(one, range(count)))


@pytest.mark.parametrize(("gap_ms", "count"), [(150, 200), (75, 200)])
async def test_who_agreed_is_served_in_a_lesser_form_until_the_load_is_over(
    gap_ms: float, count: int
) -> None:
    world = Gateway(config=agreed())
    served: Counter[str] = Counter()
    levels: Counter[str] = Counter()
    for who, caller in await rush(world, gap_ms, count):
        form = told(caller)
        if caller.status != 200:
            assert caller.status in (503, 504)
            assert not form
            continue
        served[who] += 1
        level = form["level"]
        levels[level] += who == "free"
        assert caller.headers["x-headrace-policy-revision"] == "1"
        assert caller.headers["x-headrace-model-revision"] == "1"
        if level == "0":
            assert form == {"level": "0"}
            continue
        assert who == "free"
        assert form["reason"] in ("overload", "deadline_queue")
        assert form["output-limit"] == "100"
        assert form["optional-kept"] == {"1": "2/2", "2": "1/2"}[level]
        usage = caller.json["usage"]
        assert usage["completion_tokens"] <= 100
        assert (usage["prompt_tokens"] < 7_000) == (level == "2")
    assert served["free"] > served["slow"]
    assert levels["2"] > levels["0"]
    assert (await level_now(world))["level"] == 2
    await reach(world.clock, count * gap_ms + 60_000)
    assert (await level_now(world))["level"] == 0
    assert told(await world.ask(messages=talk(-1), max_tokens=200).done()) == {"level": "0"}
    world.finish()


async def test_a_caller_may_agree_to_less_than_its_tenant_did() -> None:
    world = Gateway(config=agreed())
    standing(world, 2)
    for said, level in (("0", "0"), ("1", "1"), ("2", "2"), ("3", "2"), (None, "2")):
        headers = {} if said is None else {"x-headrace-degrade": said}
        caller = await world.ask(headers=headers, messages=talk(1), max_tokens=20).done()
        assert told(caller)["level"] == level
    for who, level in (("single", "1"), ("slow", "0")):
        caller = await world.ask(
            key=KEYS[who], headers={"x-headrace-degrade": "3"}, messages=talk(1), max_tokens=20
        ).done()
        assert told(caller)["level"] == level, "never wider"
    poked(world)


def replica(clock: Clock, pool: str, nth: int) -> InProcessEngine:
    """Return an emulated replica of a pool."""
    made = Replica(ReplicaName(f"{pool}-0"), Incarnation(nth), PROFILE, ChunkedPrefill())
    return InProcessEngine(EmulatedEngine(made, PoolName(pool), clock, lengths(0)), clock)


async def test_a_smaller_model_says_who_it_is() -> None:
    plain = agreed(LadderSpec(level=3, model="other"))
    world = Gateway(
        lambda clock: [replica(clock, "p", 1), replica(clock, "q", 2)],
        config=replace(plain, models=(ModelSpec(name="m"), ModelSpec(name="other", revision="s7"))),
    )
    standing(world, 3)
    found = await level_now(world)
    assert (found["level"], found["answering_model"], found["top_k"]) == (3, "other", 0)
    caller = await world.ask(messages=talk(1), max_tokens=20).done()
    assert told(caller) | {"reason": ""} == {
        "level": "3",
        "reason": "",
        "optional-kept": "0/2",
        "output-limit": "10",
    }
    assert caller.json["model"] == "other"
    assert caller.headers["x-headrace-model-revision"] == "s7"
    poked(world)


async def test_a_head_that_went_out_early_is_followed_by_the_form() -> None:
    world = Gateway(config=agreed(early_200=True))
    standing(world, 2)
    caller = await world.ask(messages=talk(1), max_tokens=20, stream=True).done()
    assert "x-headrace-degrade-level" not in caller.headers
    first = caller.content.split(b"\n\n")[0].split(b"\n")
    assert b": x-headrace-degrade-level: 2" in first
    assert b": x-headrace-optional-kept: 1/2" in first
    poked(world)


async def test_operators_see_levels_and_what_was_left_out() -> None:
    world = Managed(config=agreed())
    await rush(world, 150, 100)
    found = await world.scrape()
    who, queue = {"tenant": "free", "class": "interactive"}, {"model": "m", "class": "interactive"}
    tallies = world.driver.plane.state.accounts.tallies[TenantId("free")]
    degraded = tallies[ClassName("interactive")].degraded
    assert degraded[2] > 0
    for level, count in degraded.items():
        told = {**who, "level": str(level)}
        assert value(found, "headrace_degraded_requests_total", **told) == count
    assert value(found, "headrace_left_out_parts_total", **who) == degraded[2], "one of each"
    assert value(found, "headrace_degrade_level", **queue) == 2
    times = [
        value(found, "headrace_degrade_level_seconds_total", **queue, level=str(level)) or 0
        for level in range(4)
    ]
    assert times[2] > 0
    assert times[3] == 0
    assert "headrace_degrade_recovery_seconds" not in found
    state = (await world.look("/state")).json
    levels = {(one["model"], one["slo_class"]): one["level"] for one in state["queues"]}
    assert levels["m", "interactive"] == 2
    assert levels["m", "batch"] == 0
    await reach(world.clock, 80_000)
    found = await world.scrape()
    assert value(found, "headrace_degrade_level", **queue) == 0
    assert (value(found, "headrace_degrade_recovery_seconds", **queue) or 0) > 10
    world.finish()


# Before there is a prompt ---------------------------------------------------------------------


async def test_who_retrieves_is_told_how_much_is_kept() -> None:
    world = Gateway(config=agreed())
    as_asked = {
        "object": "headrace.ladder",
        "model": "m",
        "class": "interactive",
        "level": 0,
        "top_k": None,
        "output_part": 1.0,
        "effort": None,
        "answering_model": "m",
        "policy_revision": 1,
        "valid_ms": 1_000,
    }
    assert await level_now(world) == as_asked
    standing(world, 2)
    less = as_asked | {"level": 2, "top_k": 1, "output_part": 0.5, "effort": "low"}
    assert await level_now(world) == less
    bound = {"x-headrace-degrade": "1"}
    assert await level_now(world, headers=bound) == less | {"level": 1, "top_k": None}
    assert await level_now(world, key=KEYS["single"]) == less | {"level": 1, "top_k": None}
    assert await level_now(world, key=KEYS["slow"]) == as_asked
    batch = {"x-llm-d-inference-objective": "batch"}
    assert await level_now(world, headers=batch) == as_asked | {"class": "batch"}
    assert world.driver.plane.state.live == {}, "nothing was asked of anybody"
    poked(world)


@pytest.mark.parametrize(
    ("query", "key", "headers", "status", "param"),
    [
        ("?model=m", None, {}, 401, None),
        ("?model=m", "sk-wrong", {}, 401, None),
        ("", KEYS["free"], {}, 400, "model"),
        ("?model=", KEYS["free"], {}, 400, "model"),
        ("?" + "&".join(["model=m"] * 9), KEYS["free"], {}, 400, None),
        ("?model=%ff", KEYS["free"], {}, 400, None),
        ("?model=unknown", KEYS["free"], {}, 404, "model"),
        ("?model=m", KEYS["narrow"], {}, 403, "model"),
        ("?model=m", KEYS["free"], {"x-headrace-degrade": "9"}, 400, "x-headrace-degrade"),
    ],
)
async def test_who_may_not_ask_is_not_told(
    query: str, key: str | None, headers: dict[str, str], status: int, param: str | None
) -> None:
    world = Gateway(config=agreed())
    path = "/v1/headrace/ladder" + query
    caller = await world.ask(path=path, method="GET", key=key, headers=headers).done()
    assert (caller.status, caller.error["param"]) == (status, param)
    wrong = await world.ask(path=path, method="POST").done()
    assert (wrong.status, wrong.headers["allow"]) == (405, "GET, HEAD")
    world.finish()


# Later instead of not at all ------------------------------------------------------------------

LATER = LadderSpec(level=1, defer=True)


async def hopeless(world: Gateway, **fields: Any) -> Caller:
    """Ask for what cannot come in time behind what is there already."""
    asked = {"messages": talk(-1), "max_tokens": 20, "key": KEYS["free"], **fields}
    for nth in range(30):
        world.ask(key=asked["key"], messages=talk(nth), max_tokens=20, stream=True)
    await turns()
    return await world.ask(**asked).done()


async def test_what_no_step_can_save_is_answered_later() -> None:
    world = Deferring(plane=agreed(LATER))
    caller = await hopeless(world)
    assert caller.status == 202, caller.content
    assert caller.headers["x-headrace-degrade-level"] == "4"
    assert caller.headers["x-headrace-degrade-reason"] == "deadline_queue"
    assert caller.headers["x-headrace-policy-revision"] == "1"
    assert int(caller.headers["x-headrace-decision-id"]) > 0
    assert "retry-after" not in caller.headers
    place = caller.headers["location"]
    answer = await world.look(place, wait=60)
    assert answer.status == 200, answer.content
    assert answer.json["object"] == "chat.completion"
    assert answer.headers["x-headrace-degrade-level"] in ("0", "1")
    assert answer.headers["x-headrace-model-revision"] == "1"
    assert answer.headers["x-headrace-policy-revision"] == "1"
    await world.end()


async def test_what_is_answered_later_instead_is_served_as_its_headers_said() -> None:
    headers = {"x-headrace-degrade": "1", "x-slo-tpot-ms": "70", "x-headrace-replay-output": "3"}
    world = Deferring(plane=agreed(LATER), running=False, server=ServerSpec(trusted_replay=True))
    caller = await hopeless(world, headers={**headers, "x-other": "1"})
    assert caller.status == 202, caller.content
    job = await world.store.get(TenantId("free"), JobId(caller.json["id"]))
    assert job is not None
    assert dict(job.spec.headers) == headers
    await world.end()


async def test_a_deferred_request_goes_no_further_down_than_its_caller_said() -> None:
    world = Deferring(plane=agreed(defer=Defer.ASKED))
    for said, level in ((None, "2"), ("1", "1"), ("0", "0")):
        standing(world, 2)
        headers = {"prefer": "respond-async"}
        if said is not None:
            headers["x-headrace-degrade"] = said
        caller = await world.ask(headers=headers, messages=talk(1), max_tokens=20).done()
        assert caller.status == 202
        answer = await world.look(caller.headers["location"], wait=60)
        assert (answer.status, told(answer)["level"]) == (200, level)
    await world.dispatcher.close()
    poked(world)


@pytest.mark.parametrize(
    ("ladder", "fields"),
    [
        (LATER, {"stream": True}),
        (LATER, {"headers": {"x-headrace-degrade": "0"}}),
        (LATER, {"key": KEYS["slow"]}),
        (LadderSpec(level=1), {}),
        (LadderSpec(level=2, defer=True), {"headers": {"x-headrace-degrade": "1"}}),
        (LadderSpec(level=2, defer=True), {"key": KEYS["single"]}),
    ],
)
async def test_who_did_not_agree_to_wait_is_refused(
    ladder: LadderSpec, fields: dict[str, Any]
) -> None:
    world = Deferring(plane=agreed(ladder))
    caller = await hopeless(world, **fields)
    assert caller.status == 503
    assert caller.error["headrace"]["reason"] == "deadline_queue"
    assert "location" not in caller.headers
    assert "x-headrace-degrade-level" not in caller.headers
    await world.end()


async def test_where_nothing_can_be_kept_the_refusal_stands() -> None:
    world = Deferring(plane=agreed(LATER), store=NaiveBatches(Limits(tenant_jobs=1)), running=False)
    assert (await hopeless(world)).status == 202
    caller = await hopeless(world)
    assert caller.status == 503
    assert caller.error["headrace"]["reason"] == "deadline_queue"
    await world.end()


async def test_what_would_never_come_in_time_is_not_kept_either() -> None:
    world = Deferring(plane=agreed(LATER))
    caller = await world.ask(messages=talk(1, parts=40_000)).done()
    assert caller.status == 503
    assert caller.error["headrace"]["reason"] == "deadline_impossible"
    await world.end()


async def test_without_a_queue_the_refusal_stands() -> None:
    world = Gateway(config=agreed(LATER))
    assert (await hopeless(world)).status == 503
    await reach(world.clock, 60_000)
    world.finish()
