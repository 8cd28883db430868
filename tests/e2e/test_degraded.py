"""Answers in a lesser form, over real sockets: SDKs that we did not write, and the prompt as an engine sees it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from headrace.adapters.engines.server import asked
from headrace.config.schema import ServerSpec, Settings, UpstreamSpec
from headrace.gateway.clock import LoopClock
from headrace.gateway.server import Gateway, listen
from headrace.model.ids import ClassName, ModelName
from headrace.plane.levels import Standing
from tests.adapters.engine_server.serving import MODEL as SERVED
from tests.adapters.engine_server.serving import serving as engine
from tests.e2e.test_upstream import until
from tests.gateway.scenes import KEYS, MODEL, assert_books_closed, keys
from tests.gateway.test_degrading import agreed

pytestmark = [pytest.mark.asyncio, pytest.mark.service]

CITED = "[7] ships are slow"


class Front:
    """A gateway that serves, and what the engine behind it was sent."""

    def __init__(self, gateway: Gateway, base: str, bodies: list[bytes]) -> None:
        self.gateway, self.base, self.bodies = gateway, base, bodies

    @asynccontextmanager
    async def sdk(self, tenant: str) -> AsyncIterator[AsyncOpenAI]:
        base = f"{self.base}/v1"
        async with AsyncOpenAI(api_key=KEYS[tenant], base_url=base, max_retries=0) as one:
            yield one

    def stand(self, level: int) -> None:
        """Have the class at a level, as if load had brought it there."""
        plane = self.gateway.driver.plane
        known, now = plane.state.models[ModelName(MODEL)], plane.state.now
        known.standings[ClassName("interactive")] = Standing(
            level=level, since=now, quiet_from=now, left_at=now
        )

    def seen(self) -> Any:
        """Return the newest body that the engine was sent."""
        assert b'"headrace"' not in self.bodies[-1]
        return json.loads(self.bodies[-1])


@asynccontextmanager
async def fronted(patch: pytest.MonkeyPatch) -> AsyncIterator[Front]:
    """Serve an engine that tells what it was sent, and a gateway before it."""
    bodies: list[bytes] = []
    decoded = asked.decoded

    def heard(body: bytes, kind: Any) -> Any:
        bodies.append(body)
        return decoded(body, kind)

    patch.setattr(asked, "decoded", heard)
    async with engine() as served:
        settings = Settings(
            deployment=agreed(),
            keys=keys(),
            server=ServerSpec(port=0, drain_s=0),
            upstreams=(UpstreamSpec(url=served.base, pool="p", model=SERVED),),
        )
        gateway = Gateway(settings, LoopClock(asyncio.get_running_loop()))
        sock = listen("127.0.0.1", 0)
        host, port = sock.getsockname()
        running = asyncio.create_task(gateway.serve(sock))
        try:
            await until(lambda: bool(gateway.driver.ready_replicas))
            bodies.clear()  # whoever probed it
            yield Front(gateway, f"http://{host}:{port}", bodies)
        finally:
            gateway.stop()
            assert await running
            assert_books_closed(gateway.driver.plane)


def part(said: str, rank: int | None = None, kind: str = "context", name: str = "text") -> Any:
    """Return a part as each of the APIs calls it, marked or not."""
    plain = {"type": name, "text": said}
    return plain if rank is None else plain | {"headrace": {"optional": rank, "kind": kind}}


def parts(filler: str, size: int, name: str = "text") -> list[Any]:
    """Return a prompt of a citation, context of two ranks, and a question."""
    return [
        part(f"{filler} less " * 20 * size, 2, name=name),
        part(CITED, 1, "citation", name=name),
        part(f"{filler} more " * size, 1, name=name),
        part("Why?", name=name),
    ]


def kept(size: int, filler: str, name: str = "text") -> list[Any]:
    """Return what is left of it where one part is kept."""
    return [
        part(CITED, name=name),
        part(f"{filler} more " * size, name=name),
        part("Why?", name=name),
    ]


async def test_a_rush_is_served_in_a_lesser_form_to_who_agreed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        fronted(monkeypatch) as front,
        front.sdk("free") as free,
        front.sdk("slow") as slow,
    ):

        async def one(sdk: AsyncOpenAI, nth: int) -> dict[str, str] | int:
            told = parts(f"{nth:04}", 160)
            messages: Any = [{"role": "user", "content": told}]
            try:
                raw = await sdk.chat.completions.with_raw_response.create(
                    model=MODEL, messages=messages, max_tokens=8
                )
            except openai.InternalServerError as error:
                return error.status_code
            assert raw.parse().choices[0].message.content
            return dict(raw.headers)

        front.stand(2)
        asking = (one(free if nth % 2 else slow, nth) for nth in range(64))
        ends = await asyncio.gather(*asking)
        others, agreeing = ends[::2], ends[1::2]
        assert 503 in others
        assert {end for end in ends if isinstance(end, int)} <= {503, 504}
        levels = [
            "none" if isinstance(end, int) else end["x-headrace-degrade-level"] for end in others
        ]
        assert set(levels) <= {"0", "none"}
        less = [end for end in agreeing if not isinstance(end, int)]
        forms = {end["x-headrace-degrade-level"] for end in less}
        assert "2" in forms
        assert len(less) > sum(level == "0" for level in levels)
        for end in less:
            if end["x-headrace-degrade-level"] == "2":
                assert end["x-headrace-optional-kept"] == "1/2"
                assert end["x-headrace-output-limit"] == "4"
        served = [json.loads(body)["messages"][0]["content"] for body in front.bodies]
        assert all(part(CITED) in content for content in served)
        assert {len(content) for content in served} == {3, 4}
        for content in (one for one in served if len(one) == 3):
            assert content == kept(160, content[1]["text"][:4])


async def test_each_api_is_served_in_a_lesser_form(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        fronted(monkeypatch) as front,
        front.sdk("free") as sdk,
        AsyncAnthropic(api_key=KEYS["free"], base_url=front.base, max_retries=0) as messages,
    ):
        front.stand(2)
        content: Any = parts("x", 9, "input_text")
        response = await sdk.responses.with_raw_response.create(
            model=MODEL,
            input=[{"role": "user", "content": content}],
            max_output_tokens=8,
            reasoning={"effort": "high"},
        )
        assert response.headers["x-headrace-degrade-level"] == "2"
        assert response.parse().output_text
        seen = front.seen()
        assert seen["input"][0]["content"] == kept(9, "x", "input_text")
        assert (seen["max_output_tokens"], seen["reasoning"]) == (4, {"effort": "low"})

        asked_for: list[Any] = [
            {"role": "user", "content": "long ago", "headrace": {"optional": 3}},
            {"role": "user", "content": parts("x", 9)},
        ]
        raw = await messages.messages.with_raw_response.create(
            model=MODEL, messages=asked_for, max_tokens=8
        )
        assert raw.headers["x-headrace-degrade-level"] == "2"
        assert raw.headers["x-headrace-degrade-reason"] == "overload"
        assert raw.headers["x-headrace-optional-kept"] == "1/3"
        message = await raw.parse()
        assert message.usage.output_tokens == 4
        assert front.seen()["messages"] == [{"role": "user", "content": kept(9, "x")}]

        front.stand(0)
        again = await sdk.chat.completions.with_raw_response.create(
            model=MODEL, messages=[{"role": "user", "content": parts("x", 9)}], max_tokens=8
        )
        assert again.headers["x-headrace-degrade-level"] == "0"
        assert len(front.seen()["messages"][0]["content"]) == 4


async def test_who_retrieves_asks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fronted(monkeypatch) as front, front.sdk("free") as sdk:
        front.stand(2)
        told = await sdk.get(f"/headrace/ladder?model={MODEL}", cast_to=dict[str, Any])
        assert (told["level"], told["top_k"], told["answering_model"]) == (2, 1, MODEL)
        assert front.bodies == []
