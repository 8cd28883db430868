"""Messages, Anthropic's API."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from headrace.gateway.asked import media
from headrace.gateway.asked.fields import Answered, Count, cap, features
from headrace.gateway.asked.marks import NO_OPTIONS, Mark, Spans, Turn, is_empty, ranks, turn
from headrace.gateway.asked.prompt import Prompt
from headrace.gateway.asked.result import Asked
from headrace.ports.engine import Route


class Source(Struct):
    """Where an image or a document comes from."""

    type: str | None = None
    media_type: str | None = None
    data: str | None = None
    """Base64, or plain text if `type` is `text`."""
    url: str | None = None
    file_id: str | None = None
    content: "Content" = None


class Block(Struct):
    """A block of a message; an unknown kind counts by its text."""

    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    title: str | None = None
    context: str | None = None
    source: Source | str | None = None
    name: str | None = None
    input: Raw = Raw()
    content: "Content" = None
    citations: Raw = Raw()
    headrace: Mark | None = None

    @property
    def stays(self) -> bool:
        """Whether it has citations, or a block within it does or was marked as what must stay."""
        source = self.source.content if isinstance(self.source, Source) else None
        return not is_empty(self.citations) or _has_evidence(self.content) or _has_evidence(source)


def _has_evidence(content: "Content") -> bool:
    if isinstance(content, Block):
        is_evidence = content.headrace is not None and content.headrace.rank is None
        return is_evidence or content.stays
    return isinstance(content, list) and any(map(_has_evidence, content))


Content = str | list[str | Block] | Block | None
"""What a message, or the result of a tool, says."""


class Message(Struct):
    """One message."""

    role: str
    content: Content = None
    headrace: Mark | None = None


class Request(Answered, kw_only=True):
    """A request for a message, as far as it matters here."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Count
    system: Content = None
    tools: Raw = Raw()
    metadata: Any = None

    def end_user(self) -> str:
        """Return for whom of the caller's users it is: this API has a field of its own for that."""
        told = self.metadata.get("user_id") if isinstance(self.metadata, dict) else None
        return told if told and isinstance(told, str) else Answered.end_user(self)


_DECODE = msgspec.json.Decoder(Request).decode


def read(content: bytes, marked: bool) -> Asked:
    """Return what is asked for."""
    body = _DECODE(content)
    prompt = Prompt()
    has_tools = prompt.json(body.tools)
    if body.system:
        prompt.said("system")
        _add(prompt, body.system)
    spans = Spans(prompt, ranks(_turns(body.messages))) if marked else None
    for nth, message in enumerate(body.messages):
        if spans is not None:
            spans.message(nth)
        prompt.said(message.role)
        _add(prompt, message.content, spans)
    counted = prompt.counted()
    return Asked(
        route=Route.MESSAGES,
        model=body.model,
        stream=bool(body.stream),
        usage_shown=True,
        output_cap=cap(body.max_tokens),
        fan_out=1,
        cache_salt=body.cache_salt or "",
        user=body.end_user(),
        prompt=counted.prompt,
        input_tokens=counted.tokens,
        input_margin=counted.margin,
        text=counted.text(),
        longest=counted.tokens,
        options=NO_OPTIONS if spans is None else spans.options(),
        features=features(body, tools=has_tools),
    )


def _turns(messages: list[Message]) -> tuple[Turn, ...]:
    return tuple(_turn(one, one.content) for one in messages)


def _turn(message: Message, content: Content) -> Turn:
    if isinstance(content, Block):  # only results of tools are known to be said like that
        return turn(message.role, message.headrace, None, is_free=False)
    return turn(message.role, message.headrace, content)


def _add(prompt: Prompt, content: Content, spans: Spans | None = None) -> None:
    """Add what is said, blocks within blocks too; `spans` notes the outermost."""
    if content is None:
        return
    if isinstance(content, str):
        prompt.text(content)
    elif isinstance(content, Block):
        _add_block(prompt, content)
    else:
        for index, block in enumerate(content):
            if spans is not None:
                spans.part(index)
            _add(prompt, block)


def _add_block(prompt: Prompt, block: Block) -> None:
    for text in (block.text, block.thinking, block.title, block.context, block.name):
        if text:
            prompt.text(text)
    prompt.json(block.input)
    if isinstance(block.source, str):
        prompt.text(block.source)
    elif block.source is not None:
        _add_source(prompt, block.source, is_image=block.type == "image")
    _add(prompt, block.content)


def _add_source(prompt: Prompt, source: Source, *, is_image: bool) -> None:
    """Add an image or a document."""
    if source.content is not None:
        _add(prompt, source.content)
    elif source.type == "text":
        prompt.text(source.data or "")
    elif source.data is not None:
        weigh = media.by_area if is_image else media.document
        prompt.media(source.data, weigh(source.data))
    else:
        place = source.url or source.file_id or ""
        prompt.media(place, media.AREA_UNKNOWN if is_image else media.LINKED_DOCUMENT)
