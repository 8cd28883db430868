"""The engines' own tokenizer, behind `/tokenize`: as exact as their usage, chat template included."""

import asyncio
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from headrace.adapters.engines.fetch import Answer, Fetch
from headrace.adapters.engines.remote import RemoteEngine
from headrace.adapters.upstream.exchange import Timeouts
from headrace.adapters.upstream.usage import UNREADABLE
from headrace.ports.clock import Clock
from headrace.ports.engine import Route
from headrace.ports.tokens import Count, UncountedError
from headrace.units import NS_PER_S, REQUEST_TOKENS_MAX, DurationNs, Tokens, later

_PATH, _REVISION = "/tokenize", "engine"
_PATIENCE_NS = DurationNs(5 * NS_PER_S)
"""For a count that nobody waits for any more: the next who asks for it may have it from the cache."""
_ABSENT = (b"", b"null")
_ANSWER_MAX = 16_777_216
"""Bytes of an answer. 16 MiB: the ids of two million tokens."""


class Dialect(Struct, frozen=True, kw_only=True):
    """How a kind of engine is asked."""

    text: str
    """The field that a text goes into."""
    chats: bool
    """Whether it takes messages too, and applies the chat template."""


VLLM = Dialect(text="prompt", chats=True)
LLAMACPP = Dialect(text="content", chats=False)


class _Chat(Struct):
    """What of a chat's body a template looks at."""

    messages: Raw
    tools: Raw = Raw()
    chat_template: Raw = Raw()
    chat_template_kwargs: Raw = Raw()
    add_generation_prompt: Raw = Raw()
    continue_final_message: Raw = Raw()


class _Completion(Struct):
    prompt: str | list[str]


_Counts = Annotated[int, Meta(ge=1, le=REQUEST_TOKENS_MAX)]


class _Told(Struct):
    """An answer: vLLM tells the count, llama.cpp the tokens alone."""

    count: _Counts | None = None
    tokens: list[Raw] | None = None


class _Counted(Struct):
    count: _Counts


_CHAT = msgspec.json.Decoder(_Chat)
_COMPLETION = msgspec.json.Decoder(_Completion)
_TOLD = msgspec.json.Decoder(_Told)
_COUNTED = msgspec.json.Decoder(_Counted)
_ENCODE = msgspec.json.Encoder().encode


class EngineTokenizer:
    """The tokenizer of some engines of one model; whichever is up is asked, in turn."""

    def __init__(self, engines: Sequence[RemoteEngine], clock: Clock, dialect: Dialect) -> None:
        """Ask `engines`, over the connections that they have anyway."""
        self._engines, self._clock, self._dialect = tuple(engines), clock, dialect
        self._turn = 0

    def payload(self, route: Route, body: bytes, prompt: bytes) -> bytes | None:  # noqa: ARG002
        """Return the question but for the model's name; None of routes that no engine counts."""
        if route is Route.COMPLETIONS:
            told = _COMPLETION.decode(body).prompt
            text = told if isinstance(told, str) else told[0]
            # llama.cpp begins completions with its first token and adds none when it is asked.
            more = {} if self._dialect.chats else {"add_special": True, "parse_special": True}
            return _ENCODE({self._dialect.text: text, **more})
        if route is Route.CHAT and self._dialect.chats:
            parts = msgspec.structs.asdict(_CHAT.decode(body))
            return _ENCODE(
                {name: part for name, part in parts.items() if bytes(part) not in _ABSENT}
            )
        return None

    async def count(self, payload: bytes) -> Count:
        """Return an engine's count."""
        engine = self._next()
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def heard(told: Answer) -> None:
            if not answer.done():
                answer.set_result(told)

        body = b'{"model":%s,%s' % (_ENCODE(engine.model), payload[1:])
        waits = Timeouts(deadline=later(self._clock.now(), _PATIENCE_NS))
        fetch = Fetch(
            lambda listener: engine.upstream.post(
                _PATH, body, listener, waits, answer_limit=_ANSWER_MAX
            ),
            heard,
        )
        try:
            told = await answer
        finally:
            fetch.abort()
        if not told.good:
            raise UncountedError(str(told.error or f"{engine.name} answers {told.status}"))
        return Count(_tokens(told.body), _REVISION)

    def close(self) -> None:
        """Leave the engines to whoever runs them."""

    def _next(self) -> RemoteEngine:
        """Return the next engine that is up."""
        for _ in self._engines:
            self._turn = (self._turn + 1) % len(self._engines)
            if self._engines[self._turn].is_up:
                return self._engines[self._turn]
        raise UncountedError("no engine is up")


def _tokens(body: bytes) -> Tokens:
    """Return the count that an answer tells; the tokens are looked at only if it tells none."""
    try:
        try:
            count = _COUNTED.decode(body).count
        except msgspec.ValidationError:
            told = _TOLD.decode(body)
            count = len(told.tokens or ()) if told.count is None else told.count
    except UNREADABLE:
        raise UncountedError("what came is no count") from None
    if count < 1:
        raise UncountedError("a count of nothing")
    return Tokens(count)
