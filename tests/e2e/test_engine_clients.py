"""The emulated engine's newer paths, judged by clients we did not write."""

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic

from tests.adapters.engine_server.serving import ENDLESS, MODEL, chat, serving

pytestmark = [pytest.mark.asyncio, pytest.mark.service]


async def test_a_response_is_read_whole_and_in_events() -> None:
    async with serving(emulator={"seed": 7}) as served, served.sdk() as sdk:
        whole = await sdk.responses.create(model=MODEL, input="Hello there", max_output_tokens=6)
        assert len(whole.output_text.split()) == 6
        assert whole.status == "incomplete"
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
        assert whole.usage is not None
        assert (whole.usage.input_tokens, whole.usage.output_tokens) == (5, 6)

        async with sdk.responses.stream(model=MODEL, input="Hello there") as stream:
            deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert "".join(deltas) == final.output_text
        assert final.status == "completed"
        assert final.usage is not None
        assert final.usage.output_tokens == len(final.output_text.split())


async def test_embeddings_are_read_as_the_client_likes_them() -> None:
    async with serving() as served, served.sdk() as sdk:
        # Left to itself the client asks for base64.
        packed = await sdk.embeddings.create(model=MODEL, input=["one", "other"], dimensions=24)
        plain = await sdk.embeddings.create(
            model=MODEL, input=["one", "other"], dimensions=24, encoding_format="float"
        )
        assert [len(row.embedding) for row in plain.data] == [24, 24]
        for one, other in zip(packed.data, plain.data, strict=True):
            assert one.embedding == pytest.approx(other.embedding)
        assert packed.usage.prompt_tokens == packed.usage.total_tokens == 3


async def test_a_message_is_read_whole_and_in_events() -> None:
    async with (
        serving() as served,
        AsyncAnthropic(api_key="-", base_url=served.base, max_retries=0) as sdk,
    ):
        whole = await sdk.messages.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello there"}], max_tokens=6
        )
        (block,) = whole.content
        assert block.type == "text"
        assert len(block.text.split()) == 6
        assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 6)
        assert (whole.usage.input_tokens, whole.usage.cache_read_input_tokens) == (5, 0)

        async with sdk.messages.stream(
            model=MODEL,
            messages=[{"role": "user", "content": [{"type": "text", "text": "Hello there"}]}],
            max_tokens=10_000,
        ) as stream:
            said = "".join([text async for text in stream.text_stream])
            final = await stream.get_final_message()
        (block,) = final.content
        assert block.type == "text"
        assert block.text == said
        assert final.stop_reason == "end_turn"
        assert final.usage.output_tokens == len(said.split())
        assert final.usage.input_tokens == 5


async def test_clients_see_that_a_message_or_a_response_is_refused() -> None:
    async with (
        serving(speed=1, max_num_queued_reqs=1) as served,
        served.sdk() as sdk,
        AsyncAnthropic(api_key="-", base_url=served.base, max_retries=0) as other,
    ):
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.create(model="another", input="x")
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await other.messages.create(
                model="another", messages=[{"role": "user", "content": "x"}], max_tokens=1
            )
        talk = await served.talk("POST", "/v1/chat/completions", chat(stream=True, **ENDLESS))
        await talk.until(b"delta")
        with pytest.raises(openai.InternalServerError):
            await sdk.responses.create(model=MODEL, input="x")
        events = [
            e.type async for e in await sdk.responses.create(model=MODEL, input="x", stream=True)
        ]
        assert events == ["error"]
        with pytest.raises(anthropic.APIStatusError, match="as many requests"):
            async for _ in await other.messages.create(
                model=MODEL,
                messages=[{"role": "user", "content": "x"}],
                max_tokens=1,
                stream=True,
            ):
                pass
        talk.leave()
