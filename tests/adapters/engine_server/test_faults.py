"""What goes wrong on purpose goes wrong as told, and nothing else does."""

import asyncio
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.adapters.engines.server.faults import (
    Damage,
    FaultError,
    Faults,
    draws_error,
    from_json,
    from_words,
)
from tests.adapters.engine_server.serving import ENDLESS, Reply, Served, Talk, chat, serving

live = pytest.mark.asyncio
SHORT = {"stream": True, "ignore_eos": True, "max_tokens": 5}
WHOLE = {"max_tokens": 5}


async def silent(served: Served, talk: Talk) -> bool:
    """Say whether nothing more comes, although others are served meanwhile."""
    reading = asyncio.ensure_future(talk.more())
    for _ in range(3):
        assert (await served.get("/load")).status == 200
    quiet = not reading.done()
    reading.cancel()
    return quiet


async def told(served: Served, **faults: Any) -> None:
    reply = await served.post("/faults", faults)
    assert reply.status == 200
    assert (await served.get("/faults")).json == reply.json


@live
async def test_stalled_requests_are_accepted_and_never_answered() -> None:
    async with serving(faults={"stall": 2}) as served:
        stalled = [await served.talk("POST", "/v1/chat/completions", chat(**SHORT))]
        while (await served.get("/load")).json != {"server_load": 1}:
            pass
        stalled.append(await served.talk("POST", "/v1/completions", {"prompt": "x"}))
        while (await served.get("/load")).json != {"server_load": 2}:
            pass
        assert (await served.get("/faults")).json["stall"] == 0
        assert (await served.chat(**SHORT)).events
        for talk in stalled:
            assert await silent(served, talk)
            assert talk.reply.status == 0
            talk.leave()
        while (await served.get("/load")).json != {"server_load": 0}:
            pass


@live
async def test_an_answer_goes_silent_after_so_many_tokens() -> None:
    async with serving(faults={"stall_after": 3}) as served:
        talk = await served.talk("POST", "/v1/completions", {"prompt": "x", **SHORT})
        # Whatever came together, no more than three words ever come.
        while talk.reply.body.count(b" ") < 2 or not talk.reply.body.endswith(b"\n\n"):
            assert await talk.more()
        assert await silent(served, talk)
        assert sum(len(text.split()) for text in texts(talk.reply)) == 3
        talk.leave()

        whole = await served.talk("POST", "/v1/completions", {"prompt": "x", **WHOLE})
        assert await silent(served, whole)
        whole.leave()
        await told(served)
        assert (await served.chat(**WHOLE)).status == 200


def texts(reply: Reply) -> list[str]:
    return [json.loads(frame)["choices"][0]["text"] for frame in reply.frames]


@live
async def test_a_slow_engine_takes_longer_for_every_step() -> None:
    async with serving(speed=200) as served:
        sums = [0.0]
        for slow in (1.0, 4.0, 1.0):
            await told(served, slow=slow)
            await served.chat(ignore_eos=True, max_tokens=33)
            sums.append(await served.metric("inter_token_latency_seconds_sum"))
        first, second, third = (after - before for before, after in pairwise(sums))
        # Not exact: each request meets another stretch of the step times' noise.
        assert second == pytest.approx(4 * first, rel=0.1)
        assert third == pytest.approx(first, rel=0.1)


@live
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_connection_is_cut_in_the_midst_of_an_event(path: str) -> None:
    async with serving(faults={"die_mid_frame": 3}) as served:
        body = {"prompt": "x", **chat(**SHORT)}
        reply = await served.post(path, body)
        assert (reply.status, reply.complete) == (200, False)
        assert len(reply.frames) == 3
        assert not reply.body.endswith(b"\n\n")
        assert served.server.attempts.count == 0


@live
@pytest.mark.parametrize("frames", [0, 1, 4])
async def test_a_connection_is_cut_after_so_many_events(frames: int) -> None:
    async with serving(faults={"die_after": frames}) as served:
        reply = await served.chat(**SHORT)
        assert (reply.status, reply.complete) == (200, False)
        assert len(reply.frames) == frames
        assert b"".join(b"data: %b\n\n" % frame for frame in reply.frames) == reply.body


@live
async def test_an_event_that_cannot_be_parsed_comes_among_the_others() -> None:
    async with serving() as served:
        await told(served, garbage=2)
        frames = (await served.chat(**SHORT)).frames
        garbage = frames.pop(1)
        with pytest.raises(ValueError, match="Unterminated"):
            json.loads(garbage)
        # The speaker, an event for each token, and the end mark.
        assert len(frames) == 1 + 5 + 1
        assert [json.loads(frame)["object"] for frame in frames[:-1]] == [
            "chat.completion.chunk"
        ] * 6
        assert frames[-1] == b"[DONE]"


@live
async def test_an_answer_in_one_piece_is_its_own_first_event() -> None:
    async with serving() as served:
        await told(served, die_mid_frame=1)
        reply = await served.chat(**WHOLE)
        assert (reply.status, reply.complete) == (200, False)
        assert reply.body
        await told(served, die_after=0)
        reply = await served.chat(**WHOLE)
        assert (reply.status, reply.complete, reply.body) == (200, False, b"")
        await told(served, garbage=1)
        reply = await served.chat(**WHOLE)
        assert reply.complete
        with pytest.raises(ValueError, match="Unterminated"):
            _ = reply.json
        await told(served, garbage=2, die_mid_frame=2, die_after=1)
        assert (await served.chat(**WHOLE)).json["usage"]["completion_tokens"] == 5


@live
async def test_errors_come_at_their_rate_and_by_the_seed() -> None:
    async with serving(faults={"error_rate": 0.5}, emulator={"seed": 3}) as served:
        replies = [await served.chat(max_tokens=1, stream=nth % 2 == 0) for nth in range(12)]
        failed = [reply.status == 500 for reply in replies]
        assert failed == [draws_error(3, nth, 0.5) for nth in range(12)]
        assert {True, False} == set(failed)
        fault = replies[failed.index(True)].json["error"]
        assert (fault["type"], fault["code"]) == ("InternalServerError", 500)


def test_chance_errors_are_as_many_as_told() -> None:
    drawn = sum(draws_error(1, nth, 0.2) for nth in range(5_000))
    assert 900 < drawn < 1_100
    assert not any(draws_error(1, nth, 0.0) for nth in range(100))
    assert all(draws_error(1, nth, 1.0) for nth in range(100))


@live
async def test_health_hangs_while_the_engine_serves() -> None:
    async with serving(faults={"hang_health": True}) as served:
        talk = await served.talk("GET", "/health")
        assert (await served.chat(**WHOLE)).status == 200
        assert await silent(served, talk)
        talk.leave()
        await told(served)
        assert (await served.get("/health")).status == 200


@live
async def test_usage_is_not_told_to_whoever_asks() -> None:
    async with serving(faults={"drop_usage": True}) as served:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = (await served.chat(stream_options=options, **SHORT)).events
        assert all("usage" not in event for event in events)
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert "usage" not in (await served.chat(**WHOLE)).json


@live
async def test_a_stream_ends_without_its_end_mark() -> None:
    async with serving(faults={"no_done": True}) as served:
        reply = await served.chat(**SHORT)
        assert reply.complete
        assert b"[DONE]" not in reply.body
        assert b'"finish_reason":"length"' in reply.frames[-1]


@live
async def test_a_cut_stream_frees_its_slot() -> None:
    async with serving(speed=1, faults={"die_after": 2}) as served:
        reply = await served.chat(stream=True, **ENDLESS)
        assert not reply.complete
        while await served.metric("num_requests_running"):
            pass
        assert served.server.attempts.count == 0


@live
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_faults_are_nobody_elses_business(method: str) -> None:
    async with serving() as served:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b'{"stall": 9}', "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": "/faults", "headers": []}
        await served.server.app({**scope, "client": ("192.0.2.7", 5)}, receive, send)
        assert sent[0]["status"] == 403
        assert (await served.get("/faults")).json["stall"] == 0


def test_page_lists_every_fault() -> None:
    page = Path(__file__).parents[3].joinpath("docs", "engine.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `(\w+)(?:=\w+)?` \|", page, re.MULTILINE)
    assert told == [field.name for field in msgspec.structs.fields(Faults)]


def test_faults_are_told_in_words_or_in_json() -> None:
    words = ["stall=3", "slow=2.5", "hang-health", "no_done=false", "error_rate=0.1"]
    assert from_words(words) == Faults(stall=3, slow=2.5, hang_health=True, error_rate=0.1)
    assert from_json(b'{"die_after":2,"slow":3}') == Faults(die_after=2, slow=3.0)
    assert from_words([]) == from_json(b"{}") == Faults()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("stal=3", "stal"),
        ("stall", "stall: Expected `int`"),
        ("error_rate=1.5", "error_rate: .* <= 1"),
        ("die_mid_frame=0", "die_mid_frame: .* >= 1"),
        ("slow=0", "slow: .* >= 0.01"),
        ("slow=nan", "slow"),
        ("hang_health=perhaps", "hang_health"),
    ],
)
def test_a_fault_that_there_is_not_is_refused(word: str, message: str) -> None:
    with pytest.raises(FaultError, match=message):
        from_words([word])


def test_events_are_counted_however_they_come_together() -> None:
    events = [b"data: %d\n\n" % nth for nth in range(1, 7)]
    for size in (1, 2, 4, 6):
        damage, out = Damage(Faults(die_mid_frame=4)), b""
        for at in range(0, 6, size):
            sent, cut = damage.events(events[at : at + size])
            out += sent
            if cut:
                break
        assert out == b"".join(events[:3]) + events[3][: len(events[3]) // 2]
