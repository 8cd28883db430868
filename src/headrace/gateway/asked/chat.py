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
from headrace.gateway.asked.marks import NO_OPTIONS, Mark, Spans, Turn, is_empty, ranks, turn
from headrace.gateway.asked.parts import Content, add
from headrace.gateway.asked.prompt import Prompt
from headrace.gateway.asked.result import Asked
from headrace.ports.engine import Route


class Message(Struct):
    """One message."""

    role: str
    content: Content = None
    tool_calls: Raw = Raw()
    function_call: Raw = Raw()
    annotations: Raw = Raw()
    """What an earlier answer cites."""
    headrace: Mark | None = None


class Chat(Choosing, kw_only=True):
    """A chat request, as far as it matters here."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    tools: Raw = Raw()


_DECODE = msgspec.json.Decoder(Chat).decode


def read(content: bytes, marked: bool) -> Asked:
    """Return what is asked for, `marked` or not; the newer name of the cap wins."""
    body = _DECODE(content)
    prompt = Prompt()
    has_tools = prompt.json(body.tools)
    spans = None
    if marked:
        spans = Spans(prompt, ranks(tuple(map(_turn, body.messages))))
    for nth, message in enumerate(body.messages):
        if spans is not None:
            spans.message(nth)
        said = message.content
        if isinstance(said, str):
            prompt.said(message.role, said)
        else:
            prompt.said(message.role)
            add(prompt, said, spans)
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
        options=NO_OPTIONS if spans is None else spans.options(),
        priority=body.priority or 0,
        features=features(body, tools=has_tools, form=body.response_format, logprobs=body.logprobs),
    )


def _turn(message: Message) -> Turn:
    held = (message.tool_calls, message.function_call, message.annotations)
    is_free = all(map(is_empty, held))
    return turn(message.role, message.headrace, message.content, is_free=is_free)
