"""Responses, OpenAI's successor of chat."""

from typing import Any

import msgspec
from msgspec import Raw, Struct

from headrace.gateway.asked.fields import Count, Format, Ranked, cap, features
from headrace.gateway.asked.marks import NO_OPTIONS, Mark, Spans, Turn, ranks, turn
from headrace.gateway.asked.parts import Content, Part, add, add_part
from headrace.gateway.asked.prompt import Prompt
from headrace.gateway.asked.result import Asked
from headrace.ports.engine import Route


class Item(Struct):
    """A message, a call of a tool, its result, or the model's own thoughts."""

    type: str | None = None
    role: str | None = None
    content: Content = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    """What a tool that takes plain text is given."""
    output: str | list[str | Part] | Part | None = None
    summary: list[Part] | None = None
    headrace: Mark | None = None


class Text(Struct, gc=False):
    """How the answer's text is to be."""

    format: Format | None = None


class Response(Ranked, kw_only=True):
    """A request for a response, as far as it matters here."""

    input: str | list[Item]
    instructions: str | None = None
    tools: Raw = Raw()
    previous_response_id: str | None = None
    max_output_tokens: Count | None = None
    text: Text | None = None
    top_logprobs: Any = None


_DECODE = msgspec.json.Decoder(Response).decode


def read(content: bytes, marked: bool) -> Asked:
    """Return what is asked for. What an earlier response left behind is known to the engine alone."""
    body = _DECODE(content)
    prompt = Prompt()
    spans = Spans(prompt, ranks(_turns(body.input))) if marked else None
    has_tools = prompt.json(body.tools)
    if body.instructions:
        prompt.said("system", body.instructions)
    if body.previous_response_id:
        prompt.said("previous", body.previous_response_id)
    if isinstance(body.input, str):
        prompt.said("user", body.input)
    else:
        for nth, item in enumerate(body.input):
            if spans is not None:
                spans.message(nth)
            _add(prompt, item, spans)
    counted = prompt.counted()
    return Asked(
        route=Route.RESPONSES,
        model=body.model,
        stream=bool(body.stream),
        usage_shown=True,
        output_cap=cap(body.max_output_tokens),
        fan_out=1,
        cache_salt=body.cache_salt or "",
        user=body.end_user(),
        prompt=counted.prompt,
        input_tokens=counted.tokens,
        input_margin=counted.margin,
        text=None if body.previous_response_id else counted.text(),
        longest=counted.tokens,
        options=NO_OPTIONS if spans is None else spans.options(),
        priority=body.priority or 0,
        features=features(
            body,
            tools=has_tools,
            form=None if body.text is None else body.text.format,
            logprobs=body.top_logprobs or None,
        ),
    )


def _turns(items: str | list[Item]) -> tuple[Turn, ...]:
    """Return the items; of those only messages are free that no thoughts stand before: these go together."""
    if isinstance(items, str):
        return ()
    found, before = [], None
    for item in items:
        is_free = item.type in (None, "message") and before != "reasoning"
        found.append(turn(item.role, item.headrace, item.content, is_free=is_free))
        before = item.type
    return tuple(found)


def _add(prompt: Prompt, item: Item, spans: Spans | None) -> None:
    """Add one item, under the role that chat templates give it."""
    role = item.role or ("assistant" if item.output is None else "tool")
    prompt.said(role)
    add(prompt, item.content, spans)
    for text in (item.name, item.arguments, item.input):
        if text:
            prompt.text(text)
    if item.summary is not None:
        for part in item.summary:
            add_part(prompt, part)
    if isinstance(item.output, Part):
        add_part(prompt, item.output)
    else:
        add(prompt, item.output)
