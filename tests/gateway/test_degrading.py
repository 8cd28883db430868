"""What callers say, and are told, of lesser forms of an answer."""

import asyncio
from typing import Any

import pytest

from headrace.gateway.asked import read
from headrace.model.event import RequestArrived
from headrace.model.request import Request
from headrace.ports.engine import Route
from tests.gateway.scenes import Caller, Gateway, ObedientEngine
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
