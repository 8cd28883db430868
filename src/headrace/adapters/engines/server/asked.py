"""What does a request's body ask for, and how many tokens is its prompt?

The tokenizer is four bytes to a token, for text and for ids alike, so that the tokens `/tokenize`
tells are the prompt they came from. Fields that change nothing here are accepted and skipped, as
vLLM skips what it does not know.
"""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from headrace.adapters.engines.words.embeddings import DIMENSIONS, Vectors
from headrace.model.told import Told, heard
from headrace.units import REQUEST_TOKENS_MAX, Tokens, ceil_div

BYTES_PER_TOKEN = 4
CHUNK_TOKENS = Tokens(512)
"""Tokens of a prefix chunk: 32 KV blocks. The last one of a prompt may be shorter."""
_CHUNK_BYTES = CHUNK_TOKENS * BYTES_PER_TOKEN
_HASH_BYTES = 16
_ID_BYTES = 8
_ID_MASK = (1 << 8 * BYTES_PER_TOKEN) - 1
_DIMENSIONS_MAX = 16_384

S = TypeVar("S", bound=Struct)
_Count = Annotated[int, Meta(ge=1, le=REQUEST_TOKENS_MAX)]
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
    """What every path understands that the engine works for."""

    named: ClassVar[str]
    """What the id of an answer begins with."""
    model: str | None = None
    stream: bool = False
    ignore_eos: bool = False
    cache_salt: str = ""
    priority: int = 0
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None
    """For scheduler classes of vLLM. Here as there, `Told` is heard."""

    @property
    def told(self) -> Told | None:
        """What a gateway told; None if it did not, or in a way that is none of ours."""
        try:
            return heard(self.vllm_xargs)
        except ValueError:
            return None

    @property
    def cap(self) -> int | None:
        """The most output tokens, if told."""
        return None

    @property
    def streams(self) -> bool:
        """Whether the answer comes in events."""
        return self.stream

    @property
    def usage_at_end(self) -> bool:
        """Whether a stream ends with its usage, where that has to be asked for."""
        return False

    @property
    def usage_always(self) -> bool:
        """Whether every event of a stream tells the usage so far."""
        return False

    @property
    def vectors(self) -> Vectors | None:
        """What is asked for instead of words."""
        return None

    def prompt(self) -> bytes:
        """Return the prompt's bytes."""
        raise NotImplementedError

    def engine_name(self, name: str) -> str:
        """Return the id by which the engine knows an answer, and by which it may be aborted."""
        return name

    def check(self) -> None:
        """Refuse what cannot be served."""


class Choices(Common, kw_only=True):
    """What chats and completions understand."""

    stream_options: StreamOptions | None = None
    max_tokens: _Count | None = None
    n: Annotated[int, Meta(ge=1)] | None = None

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

    def check(self) -> None:
        """Refuse what cannot be served."""
        if (self.n or 1) > 1:
            raise AskedError("Only one answer a request is served here.", "n")
        if self.stream_options is not None and not self.stream:
            raise AskedError(
                "Stream options can only be defined when `stream=True`.", "stream_options"
            )


class Chat(Choices, kw_only=True):
    """A body of `/v1/chat/completions`."""

    named = "chatcmpl-"
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


class Completion(Choices, kw_only=True):
    """A body of `/v1/completions`."""

    named = "cmpl-"
    prompt_: _Prompt = msgspec.field(name="prompt")

    def prompt(self) -> bytes:
        """Return the prompt's bytes."""
        return plain(self.prompt_)

    def engine_name(self, name: str) -> str:
        """Return the id by which the engine knows an answer: vLLM numbers those to a completion."""
        return f"{name}-0"


class Item(Struct):
    """One item of a response's input: a message, a call of a tool or what came of it."""

    type: str = "message"
    role: str = ""
    content: str | list[Part] | None = None
    arguments: str = ""
    output: str | list[Part] = ""


class Responses(Common, kw_only=True):
    """A body of `/v1/responses`; nothing is kept for a later one to go on from."""

    named = "resp_"
    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: _Count | None = None
    previous_response_id: str | None = None
    tools: Raw = Raw()

    @property
    def cap(self) -> int | None:
        """The most output tokens, if told."""
        return self.max_output_tokens

    def prompt(self) -> bytes:
        """Return the prompt as a chat's template would make it."""
        pieces = [bytes(self.tools)]
        if self.instructions is not None:
            pieces.append(_said("system", self.instructions))
        items = (
            [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        )
        for item in items:
            text = flat(item.content) + item.arguments + flat(item.output)
            pieces.append(_said(item.role or item.type, text))
        return b"".join(pieces)

    def check(self) -> None:
        """Refuse what cannot be served."""
        if self.previous_response_id is not None:
            raise AskedError("Responses are not kept here.", "previous_response_id")


class Block(Struct):
    """A block of a message's content: text, a call of a tool or what came of it."""

    text: str = ""
    input: Raw = Raw()
    content: str | list[Part] | None = None


class Turn(Struct):
    """One message of `/v1/messages`."""

    role: str
    content: str | list[Block]


class Messages(Common, kw_only=True):
    """A body of `/v1/messages`."""

    named = "chatcmpl-"
    messages: Annotated[list[Turn], Meta(min_length=1)]
    max_tokens: _Count
    system: str | list[Part] | None = None
    tools: Raw = Raw()

    @property
    def cap(self) -> int | None:
        """The most output tokens."""
        return self.max_tokens

    def prompt(self) -> bytes:
        """Return the prompt as a chat's template would make it."""
        pieces = [bytes(self.tools)]
        if self.system is not None:
            pieces.append(_said("system", flat(self.system)))
        for turn in self.messages:
            content = turn.content
            blocks = [Block(text=content)] if isinstance(content, str) else content
            pieces.append(_said(turn.role, ""))
            for block in blocks:
                pieces += (block.text.encode(), bytes(block.input), flat(block.content).encode())
        return b"".join(pieces)


class Embeddings(Common, kw_only=True):
    """A body of `/v1/embeddings`; the engine gets all inputs as one prompt."""

    named = "embd-"
    input: str | Annotated[list[str | int | list[_TokenId]], Meta(min_length=1)]
    dimensions: Annotated[int, Meta(ge=1, le=_DIMENSIONS_MAX)] = DIMENSIONS
    encoding_format: Literal["float", "base64"] = "float"

    @property
    def cap(self) -> int | None:
        """One token of engine time, which nobody sees."""
        return 1

    @property
    def streams(self) -> bool:
        """Never."""
        return False

    @property
    def vectors(self) -> Vectors | None:
        """What is asked for."""
        return Vectors(
            inputs=tuple(self._inputs()),
            dimensions=self.dimensions,
            base64=self.encoding_format == "base64",
        )

    def prompt(self) -> bytes:
        """Return every input, each from a token of its own on."""
        return b"".join(
            content.ljust(count(content) * BYTES_PER_TOKEN, b"\0") for content in self._inputs()
        )

    def _inputs(self) -> Iterator[bytes]:
        """Yield the bytes of each input."""
        told = self.input
        for one in [told] if isinstance(told, str) or isinstance(told[0], int) else told:
            content = _content(one)
            if content is None:
                raise AskedError("Texts and tokens do not mix.", "input")
            yield content


KINDS: dict[str, type[Common]] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completion,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
    "/v1/embeddings": Embeddings,
}
"""The paths that the engine works for, and what their bodies are."""


class Tokenize(Struct, kw_only=True):
    """A body of `/tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: Raw = Raw()

    def text(self) -> bytes:
        """Return the prompt's bytes."""
        if self.messages is not None:
            return rendered(self.messages, self.tools)
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
        pieces.append(_said(message.role, flat(message.content)))
        pieces.append(bytes(message.tool_calls))
    return b"".join(pieces)


def flat(content: str | list[Part] | None) -> str:
    """Return the text of some content."""
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""


def plain(prompt: _Prompt) -> bytes:
    """Return the bytes of a completion's one prompt, given as text or as token ids."""
    alone = isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int)
    content = _content(prompt[0] if alone else prompt)
    if content is None:
        raise AskedError("Only one prompt a request is served here.", "prompt")
    return content


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


def _said(role: str, text: str) -> bytes:
    """Return what the template makes of one message."""
    return f"<|{role}|>{text}".encode()


def _content(told: object) -> bytes | None:
    """Return the bytes of a text or of token ids; None if it is neither."""
    if isinstance(told, str):
        return told.encode()
    if not isinstance(told, list) or not all(isinstance(token, int) for token in told):
        return None
    return b"".join((token & _ID_MASK).to_bytes(BYTES_PER_TOKEN, "little") for token in told)
