"""A live gateway on a real socket, judged by a client we did not write."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import openai
import pytest
from msgspec.structs import replace
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from headrace.adapters.journal.ring import segment_paths, segments
from headrace.config.schema import EmulatorSpec, JournalSpec, ServerSpec, Settings
from headrace.gateway.clock import LoopClock
from headrace.gateway.server import Gateway, listen
from headrace.model.effect import Concluded
from headrace.model.event import RequestArrived
from headrace.plane.journal import Differs, Frame, Record, Verified, frame_bytes, frames, verify
from headrace.replica.core import Replica
from headrace.report.decisions import Verified as DecisionsVerified
from headrace.report.decisions import verify_decisions
from tests.gateway.scenes import KEYS, MODEL, assert_books_closed, deployment, keys

pytestmark = [pytest.mark.asyncio, pytest.mark.service]
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello there"}]


def settings(folder: Path, *, replicas: int = 2) -> Settings:
    return Settings(
        deployment=deployment(replicas=replicas),
        keys=keys(),
        server=ServerSpec(port=0, drain_s=0, trusted_replay=True),
        emulator=EmulatorSpec(noise_percent=0),
        journal=JournalSpec(path=str(folder / "journal")),
        decision_log=str(folder / "decisions.jsonl"),
    )


@asynccontextmanager
async def serving(given: Settings) -> AsyncIterator[tuple[Gateway, str]]:
    """Serve; the socket listens before the server runs, so nobody waits for anything."""
    gateway = Gateway(given, LoopClock(asyncio.get_running_loop()))
    sock = listen(given.server.host, given.server.port)
    host, port = sock.getsockname()
    running = asyncio.create_task(gateway.serve(sock))
    try:
        yield gateway, f"http://{host}:{port}/v1"
    finally:
        gateway.stop()
        assert await running
        assert_books_closed(gateway.driver.plane)


@asynccontextmanager
async def client(base: str, tenant: str = "free") -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(api_key=KEYS.get(tenant, tenant), base_url=base, max_retries=0) as one:
        yield one


async def test_chat_streams_models_and_refusals(tmp_path: Path) -> None:
    async with serving(settings(tmp_path)) as (_, base):
        async with client(base) as sdk:
            answer = await sdk.chat.completions.create(
                model=MODEL, messages=HELLO, max_completion_tokens=6
            )
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 6
            content = answer.choices[0].message.content
            assert content is not None
            assert len(content.split()) == 6

            stream = await sdk.chat.completions.create(
                model=MODEL,
                messages=HELLO,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={"x-headrace-replay-output": "30"},
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert len(text.split()) == 30
            assert chunks[-2].choices[0].finish_reason == "stop"
            usage = chunks[-1].usage
            assert usage is not None
            assert usage.completion_tokens == 30

            assert [model.id async for model in sdk.models.list()] == ["m", "other"]
            with pytest.raises(openai.NotFoundError) as missing:
                await sdk.chat.completions.create(model="nope", messages=HELLO)
            assert missing.value.code == "model_not_found"
        async with client(base, "sk-unknown") as sdk:
            with pytest.raises(openai.AuthenticationError) as unknown:
                await sdk.models.list()
            assert unknown.value.code == "invalid_api_key"
        async with client(base, "slow") as sdk:
            await sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
            with pytest.raises(openai.RateLimitError) as limited:
                await sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
            assert limited.value.code == "rate_limit_exceeded"
            assert int(limited.value.response.headers["retry-after"]) > 50
            assert limited.value.type == "rate_limit_error"


async def test_an_sdk_gives_up_at_once_where_repeating_does_not_help(tmp_path: Path) -> None:
    given = settings(tmp_path)
    async with (
        serving(given) as (gateway, base),
        AsyncOpenAI(api_key=KEYS["narrow"], base_url=base, max_retries=5) as sdk,
    ):
        with pytest.raises(openai.RateLimitError) as hopeless:
            await sdk.chat.completions.create(model="other", messages=HELLO, max_tokens=500)
        assert hopeless.value.code == "insufficient_quota"
        assert len(gateway.driver.recent) == 1, "x-should-retry: false was obeyed"


async def test_a_caller_that_leaves_frees_its_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(settings(tmp_path)) as (gateway, base), client(base) as sdk:
        stream = await sdk.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            stream=True,
            extra_headers={"x-headrace-replay-output": "10000"},
        )
        left = asyncio.Event()
        conclude = gateway.driver._conclude

        def concluded(row: Concluded) -> None:
            conclude(row)
            left.set()

        monkeypatch.setattr(gateway.driver, "_conclude", concluded)
        async for _ in stream:
            break
        assert gateway.driver.live == 1
        await stream.close()
        await left.wait()
        assert gateway.driver.live == 0
        assert gateway.driver.outcomes == {"client_cancel": 1}
        assert_books_closed(gateway.driver.plane)


async def test_shutdown_ends_open_streams_with_an_error(tmp_path: Path) -> None:
    async with serving(settings(tmp_path)) as (gateway, base), client(base) as sdk:
        stream = await sdk.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            stream=True,
            extra_headers={"x-headrace-replay-output": "10000"},
        )
        gateway.stop()
        with pytest.raises(openai.APIError, match="shut down before"):
            async for _ in stream:
                pass


async def test_a_broken_engine_ends_the_server_and_tells_its_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = settings(tmp_path, replicas=1)
    gateway = Gateway(given, LoopClock(asyncio.get_running_loop()))
    sock = listen(given.server.host, given.server.port)
    host, port = sock.getsockname()
    running = asyncio.create_task(gateway.serve(sock))

    def impossible(*_: object) -> None:
        raise AssertionError("a state that cannot be")

    monkeypatch.setattr(Replica, "advance", impossible)
    async with client(f"http://{host}:{port}/v1") as sdk:
        with pytest.raises(openai.InternalServerError) as failed:
            await sdk.chat.completions.create(model=MODEL, messages=HELLO)
    assert failed.value.code == "internal_error"
    assert await running is False
    assert "a state that cannot be" in caplog.text
    assert isinstance(verify(segments(tmp_path / "journal")), Verified)


async def test_a_full_disk_stops_nobody_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(settings(tmp_path)) as (_, base), client(base) as sdk:

        def full(_file: int, _content: bytes) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as disk:
            disk.setattr("headrace.adapters.journal.append.os.write", full)
            answer = await sdk.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    assert "frames of the journal could not be written" in caplog.text
    assert "2 lines of the decision log could not be written" in caplog.text
    assert isinstance(verify(segments(tmp_path / "journal")), Verified)


async def test_the_record_of_a_live_run_is_replayed(tmp_path: Path) -> None:
    given = settings(tmp_path)
    async with serving(given) as (_, base), client(base) as sdk, client(base, "slow") as slow:
        asked = [
            sdk.chat.completions.create(
                model=MODEL,
                messages=HELLO,
                extra_headers={"x-headrace-replay-output": str(5 + nth)},
            )
            for nth in range(8)
        ]
        answers = await asyncio.gather(*asked)
        assert [a.usage.completion_tokens for a in answers if a.usage] == list(range(5, 13))
        await slow.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
        with pytest.raises(openai.RateLimitError):
            await slow.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)

    journal = tmp_path / "journal"
    found = verify(segments(journal))
    assert isinstance(found, Verified)
    assert found.records > 30
    assert verify_decisions(tmp_path / "decisions.jsonl") == DecisionsVerified(count=19)

    path, _at_the_end = segment_paths(journal)
    edited = list(frames(path.read_bytes()))
    index, changed = _made_longer(edited)
    path.write_bytes(b"".join(map(frame_bytes, changed)))
    differs = verify(segments(journal))
    assert isinstance(differs, Differs)
    assert (differs.index, differs.event) == (index, "RequestArrived")


def _made_longer(kept: list[Frame]) -> tuple[int, list[Frame]]:
    """Return the index of the third request's record, and the frames with its prompt longer."""
    records = [frame for frame in kept if isinstance(frame, Record)]
    arrivals = [i for i, one in enumerate(records) if isinstance(one.event, RequestArrived)]
    victim = records[arrivals[2]]
    assert isinstance(victim.event, RequestArrived)
    request = victim.event.request
    longer = replace(request, input_tokens=msgspec.convert(request.input_tokens + 1, int))
    event = RequestArrived(longer)
    return arrivals[2], [
        replace(frame, event=event) if frame is victim else frame for frame in kept
    ]
