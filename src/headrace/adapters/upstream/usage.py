"""What usage does an answer tell? Each route's own words, in one record.

`Usage.input_tokens` is all of the input. OpenAI's words count it so; Anthropic's count apart what came
from the prefix cache and what went into it, and vLLM uses them but counts it all in. Only what is
asked for is decoded: the rest is skipped.
"""

from enum import Enum, auto
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from headrace.model.engine import Usage
from headrace.ports.engine import Route
from headrace.units import REQUEST_TOKENS_MAX, Tokens

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding may raise on bytes that are not ours."""


class EachUsage(Enum):
    """Who asked for the usage so far in each frame of a stream of chat or completions?"""

    NOBODY = auto()
    CALLER = auto()
    WE = auto()
    """It is kept out of the stream, but for the last."""


_Count = Annotated[int, Meta(ge=0, le=REQUEST_TOKENS_MAX)]
"""More is no count: an engine that tells it is not believed, and the tokens that were seen stand."""


class _Details(Struct, gc=False):
    cached_tokens: _Count | None = None


class _Completion(Struct):
    """Of chat, completions and embeddings."""

    prompt_tokens: _Count
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None

    def usage(self) -> Usage:
        return _usage(self.prompt_tokens, self.prompt_tokens_details, self.completion_tokens)


class _Response(Struct):
    """Of responses."""

    input_tokens: _Count
    output_tokens: _Count | None = None
    input_tokens_details: _Details | None = None

    def usage(self) -> Usage:
        return _usage(self.input_tokens, self.input_tokens_details, self.output_tokens)


class MessageUsage(Struct, gc=False):
    """Of messages; a stream tells it bit by bit, and None is what it did not tell yet."""

    input_tokens: _Count | None = None
    cache_read_input_tokens: _Count | None = None
    cache_creation_input_tokens: _Count | None = None
    output_tokens: _Count | None = None

    def usage(self) -> Usage | None:
        """Return the usage, or None while input or output are not known.

        Anthropic always tells what went into the cache, vLLM never does: with that told, or with more
        cached than there is input, what was cached is not among the input.
        """
        if self.input_tokens is None or self.output_tokens is None:
            return None
        cached = self.cache_read_input_tokens or 0
        made = self.cache_creation_input_tokens
        apart = made is not None or cached > self.input_tokens
        return Usage(
            input_tokens=Tokens(self.input_tokens + (cached + (made or 0) if apart else 0)),
            cached_tokens=Tokens(cached),
            output_tokens=Tokens(self.output_tokens),
            tells_cached=self.cache_read_input_tokens is not None,
        )

    def then(self, newer: "MessageUsage") -> "MessageUsage":
        """Return what is known once `newer` was told as well: its counts replace older ones."""
        told = {
            name: value
            for name, value in msgspec.structs.asdict(newer).items()
            if value is not None
        }
        return msgspec.structs.replace(self, **told)


class _CompletionAnswer(Struct):
    usage: _Completion | None = None


class _ResponseAnswer(Struct):
    usage: _Response | None = None


class _MessageAnswer(Struct):
    usage: MessageUsage | None = None


class _ResponseEvent(Struct):
    response: _ResponseAnswer


class _MessageEvent(Struct):
    message: _MessageAnswer | None = None
    """Of `message_start`."""
    usage: MessageUsage | None = None
    """Of `message_delta`."""


_Answer = _CompletionAnswer | _ResponseAnswer | _MessageAnswer
_ANSWERS: dict[Route, msgspec.json.Decoder[_Answer]] = {
    Route.CHAT: msgspec.json.Decoder(_CompletionAnswer),
    Route.COMPLETIONS: msgspec.json.Decoder(_CompletionAnswer),
    Route.EMBEDDINGS: msgspec.json.Decoder(_CompletionAnswer),
    Route.RESPONSES: msgspec.json.Decoder(_ResponseAnswer),
    Route.MESSAGES: msgspec.json.Decoder(_MessageAnswer),
}
_COMPLETION = msgspec.json.Decoder(_Completion)
_RESPONSE_EVENT = msgspec.json.Decoder(_ResponseEvent)
_MESSAGE_EVENT = msgspec.json.Decoder(_MessageEvent)


def usage_of(route: Route, body: bytes) -> Usage | None:
    """Return the usage that a whole answer tells; None if it tells none that makes sense."""
    try:
        told = _ANSWERS[route].decode(body).usage
    except UNREADABLE:
        return None
    return None if told is None else told.usage()


def completion_usage(raw: Raw) -> Usage | None:
    """Return the usage of a frame's `usage`; None if it makes no sense."""
    try:
        return _COMPLETION.decode(raw).usage()
    except UNREADABLE:
        return None


def response_usage(data: bytes) -> Usage | None:
    """Return the usage of an event that holds a response; None if it tells none."""
    try:
        told = _RESPONSE_EVENT.decode(data).response.usage
    except UNREADABLE:
        return None
    return None if told is None else told.usage()


def message_usage(data: bytes) -> MessageUsage:
    """Return what `message_start` or `message_delta` tells; nothing, if it makes no sense.

    The former knows but the first token of the output: what it says of that is no usage yet.
    """
    try:
        event = _MESSAGE_EVENT.decode(data)
    except UNREADABLE:
        return MessageUsage()
    if event.message is not None and event.message.usage is not None:
        return msgspec.structs.replace(event.message.usage, output_tokens=None)
    return event.usage or MessageUsage()


def _usage(given: int, details: _Details | None, made: int | None) -> Usage:
    cached = None if details is None else details.cached_tokens
    return Usage(
        input_tokens=Tokens(given),
        cached_tokens=Tokens(cached or 0),
        output_tokens=Tokens(made or 0),
        tells_cached=cached is not None,
    )
