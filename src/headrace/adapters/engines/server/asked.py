"""What does a request's body ask for, and how many tokens is its prompt?

The tokenizer is four bytes to a token, for text and for ids alike, so that the tokens `/tokenize`
tells are the prompt they came from. Fields that change nothing here are accepted and skipped, as
vLLM skips what it does not know.
"""

from hashlib import blake2b
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from headrace.units import Tokens, ceil_div

BYTES_PER_TOKEN = 4
CHUNK_TOKENS = Tokens(512)
"""Tokens of a prefix chunk: 32 KV blocks. The last one of a prompt may be shorter."""
_CHUNK_BYTES = CHUNK_TOKENS * BYTES_PER_TOKEN
_HASH_BYTES = 16
_ID_BYTES = 8
_ID_MASK = (1 << 8 * BYTES_PER_TOKEN) - 1

S = TypeVar("S", bound=Struct)
_Count = Annotated[int, Meta(ge=1, le=10_000_000)]
_TokenId = Annotated[int, Meta(ge=0)]


class AskedError(ValueError):
    """A body that cannot be served; `param` is the field to blame."""

    def __init__(self, message: str, param: str | None = None) -> None:
        """Hold what is told to the caller."""
        super().__init__(message)
        self.param = param


class StreamOptions(Struct):
    """How the answer is streamed."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Part(Struct):
    """A part of a message; what is not text counts nothing."""

    text: str = ""


class Message(Struct):
    """One message."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: Raw = Raw()


class Common(Struct, kw_only=True):
    """What both kinds of generation understand."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: _Count | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    ignore_eos: bool = False
    cache_salt: str = ""
    priority: int = 0
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None
    """For scheduler classes of vLLM; none runs here."""

    @property
    def cap(self) -> int | None:
        """The most output tokens, if told."""
        return self.max_tokens

    @property
    def usage_at_end(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_always(self) -> bool:
        """Whether every event of a stream tells the usage so far."""
        options = self.stream_options
        return self.usage_at_end and options is not None and options.continuous_usage_stats


class Chat(Common, kw_only=True):
    """A body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: _Count | None = None
    tools: Raw = Raw()

    @property
    def cap(self) -> int | None:
        """The most output tokens; the newer name wins."""
        return self.max_completion_tokens or self.max_tokens

    def prompt(self) -> bytes:
        """Return the prompt as the chat template makes it: what is appended changes no byte."""
        return rendered(self.messages, self.tools)


_Prompt = str | list[str | int | list[_TokenId]]


class Completion(Common, kw_only=True):
    """A body of `/v1/completions`."""

    prompt_: _Prompt = msgspec.field(name="prompt")

    def prompt(self) -> bytes:
        """Return the prompt's bytes."""
        return plain(self.prompt_)


class Tokenize(Struct, kw_only=True):
    """A body of `/tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None

    def text(self) -> bytes:
        """Return the prompt's bytes."""
        if self.messages is not None:
            return rendered(self.messages)
        if self.prompt is None:
            raise AskedError("Either prompt or messages is required.", "prompt")
        return self.prompt.encode()


class Abort(Struct, kw_only=True):
    """A body of `/abort_requests`."""

    request_ids: list[str]


def rendered(messages: list[Message], tools: Raw | None = None) -> bytes:
    """Return the chat template's text: tools first, then each message."""
    pieces = [bytes(tools or b"")]
    for message in messages:
        content = message.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        pieces.append(f"<|{message.role}|>{content or ''}".encode())
        pieces.append(bytes(message.tool_calls))
    return b"".join(pieces)


def plain(prompt: _Prompt) -> bytes:
    """Return the bytes of a completion's one prompt, given as text or as token ids."""
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]  # type: ignore[assignment]  # a list of one prompt
    if isinstance(prompt, str):
        return prompt.encode()
    if not all(isinstance(token, int) for token in prompt):
        raise AskedError("Only one prompt a request is served here.", "prompt")
    return b"".join(
        (int(token) & _ID_MASK).to_bytes(BYTES_PER_TOKEN, "little")  # type: ignore[arg-type]
        for token in prompt
    )


def decoded(body: bytes, kind: type[S]) -> S:
    """Return a body; AskedError blames the field that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        raise AskedError(message, place.rstrip("`") or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise AskedError("The body is not JSON.") from None


def count(prompt: bytes) -> Tokens:
    """Return how many tokens a prompt has; one without text has a token that begins it."""
    return Tokens(max(1, ceil_div(len(prompt), BYTES_PER_TOKEN)))


def token_ids(prompt: bytes) -> list[int]:
    """Return the tokens of a prompt."""
    return [
        int.from_bytes(prompt[at : at + BYTES_PER_TOKEN], "little")
        for at in range(0, len(prompt), BYTES_PER_TOKEN)
    ]


def chunks(prompt: bytes, salt: str, told: Tokens | None = None) -> tuple[int, ...]:
    """Return the chained ids of a prompt's chunks: equal ids mean equal prompts up to their end.

    `told`: the prompt stands for another one of so many tokens, so only whole chunks are known.
    """
    whole, rest = divmod(len(prompt), _CHUNK_BYTES)
    if told is not None:
        whole, rest = min(whole, told // CHUNK_TOKENS), 0
    chain = blake2b(salt.encode(), digest_size=_HASH_BYTES).digest()
    found: list[int] = []
    for nth in range(whole + bool(rest)):
        chunk = prompt[nth * _CHUNK_BYTES : (nth + 1) * _CHUNK_BYTES]
        chain = blake2b(chain + chunk, digest_size=_HASH_BYTES).digest()
        found.append(int.from_bytes(chain[:_ID_BYTES], "big") >> 1)
    return tuple(found)
