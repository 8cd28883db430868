"""What does the body of a chat request ask for?

Decodes the fields that decisions need and skips the rest; the text of a prompt is looked at here
and goes no further.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from headrace.units import Tokens, ceil_div

BYTES_PER_TOKEN = 4
"""Bytes of text to a token, for an estimate: English in UTF-8 with common tokenizers. Tokenizing
costs as much as dozens of requests, and the engine's own count settles every account."""
_MARGIN = 4  # an estimate may be short by a quarter

Count = Annotated[int, Meta(ge=1, le=10_000_000)]


class Part(Struct):
    """A part of a message; what is not text counts nothing."""

    text: str | None = None


class Message(Struct):
    """One message."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: Raw = Raw()


class StreamOptions(Struct):
    """How the answer is streamed."""

    include_usage: bool | None = None


class Chat(Struct):
    """A chat request, as far as it matters here."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    messages: Annotated[list[Message], Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    tools: Raw = Raw()
    cache_salt: str | None = None

    @property
    def output_cap(self) -> Tokens | None:
        """The caller's own cap; the newer name wins."""
        cap = self.max_completion_tokens
        cap = self.max_tokens if cap is None else cap
        return None if cap is None else Tokens(cap)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream is to end with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


_DECODER = msgspec.json.Decoder(Chat)


def decode(body: bytes) -> Chat:
    """Return the request, null taken for absent as OpenAI does.

    Raises `msgspec.DecodeError` or `msgspec.ValidationError`, and `RecursionError` for what is nested
    too deeply, be it in a field that is skipped.
    """
    return _DECODER.decode(body)


def canonical(chat: Chat) -> bytes:
    """Return the prompt's text in one piece: equal prompts, equal bytes, however spelled as JSON.

    Tools come first, as in chat templates; what is appended to a conversation changes nothing
    before it.
    """
    pieces = [_present(chat.tools)]
    for message in chat.messages:
        content = message.content
        if isinstance(content, list):
            content = "".join(part.text or "" for part in content)
        pieces.append(f"\x1e{message.role}\x1f{content or ''}".encode())
        pieces.append(_present(message.tool_calls))
    return b"".join(pieces)


def _present(value: Raw) -> bytes:
    """Return what was written, nothing for null."""
    content = bytes(value)
    return b"" if content == b"null" else content


def estimate(prompt: bytes) -> tuple[Tokens, Tokens]:
    """Return about how many tokens a prompt has, and by how many that may be short."""
    tokens = ceil_div(len(prompt), BYTES_PER_TOKEN)
    return Tokens(tokens), Tokens(tokens // _MARGIN)
