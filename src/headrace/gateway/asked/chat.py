"""Chat completions."""

from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from headrace.gateway.asked.fields import (
    Choosing,
    Count,
    cap,
    features,
    shows_each_usage,
    shows_usage,
)
from headrace.gateway.asked.parts import Content, add
from headrace.gateway.asked.prompt import Prompt
from headrace.gateway.asked.result import Asked
from headrace.ports.engine import Route


class Message(Struct):
    """One message."""

    role: str
    content: Content = None
    tool_calls: Raw = Raw()


class Chat(Choosing, kw_only=True):
    """A chat request, as far as it matters here."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    tools: Raw = Raw()


_DECODE = msgspec.json.Decoder(Chat).decode


def read(content: bytes) -> Asked:
    """Return what is asked for; the newer name of the cap wins."""
    body = _DECODE(content)
    prompt = Prompt()
    has_tools = prompt.json(body.tools)
    for message in body.messages:
        said = message.content
        if isinstance(said, str):
            prompt.said(message.role, said)
        else:
            prompt.said(message.role)
            add(prompt, said)
        prompt.json(message.tool_calls)
    counted = prompt.counted()
    return Asked(
        route=Route.CHAT,
        model=body.model,
        stream=bool(body.stream),
        usage_shown=shows_usage(body.stream_options),
        each_usage_shown=shows_each_usage(body.stream_options),
        output_cap=cap(body.max_completion_tokens, body.max_tokens),
        fan_out=body.n or 1,
        cache_salt=body.cache_salt or "",
        user=body.end_user(),
        prompt=counted.prompt,
        input_tokens=counted.tokens,
        input_margin=counted.margin,
        text=counted.text(),
        longest=counted.tokens,
        priority=body.priority or 0,
        features=features(body, tools=has_tools, form=body.response_format, logprobs=body.logprobs),
    )
