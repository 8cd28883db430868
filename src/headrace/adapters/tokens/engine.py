"""The engines' own tokenizer, as their kind has it: as exact as their usage, chat template included."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from headrace.adapters.engines.fetch import Answer, Fetch
from headrace.adapters.engines.kinds import Tokenize
from headrace.adapters.engines.remote import RemoteEngine
from headrace.adapters.upstream.exchange import Timeouts
from headrace.adapters.upstream.usage import UNREADABLE
from headrace.ports.clock import Clock
from headrace.ports.engine import Route
from headrace.ports.tokens import Count, UncountedError
from headrace.units import NS_PER_S, REQUEST_TOKENS_MAX, DurationNs, Tokens, later

_REVISION = "engine"
_PATIENCE_NS = DurationNs(5 * NS_PER_S)
"""For a count that nobody waits for any more: the next who asks for it may have it from the cache."""
_ABSENT = (b"", b"null")
_ANSWER_MAX = 16_777_216
"""Bytes of an answer. 16 MiB: the ids of two million tokens."""


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


_COUNT = msgspec.json.Decoder(Annotated[int, Meta(ge=1, le=REQUEST_TOKENS_MAX)])
_CHAT = msgspec.json.Decoder(_Chat)
_COMPLETION = msgspec.json.Decoder(_Completion)
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_ENCODE = msgspec.json.Encoder().encode


class EngineTokenizer:
    """The tokenizer of some engines of one model; of those that are up and count, each in turn."""

    def __init__(self, engines: Callable[[], Sequence[RemoteEngine]], clock: Clock) -> None:
        """Ask whoever `engines` says is there just then, over the connections that they have anyway."""
        self._engines, self._clock = engines, clock
        self._turn = 0

    def payload(self, route: Route, body: bytes, prompt: bytes) -> bytes | None:  # noqa: ARG002
        """Return a text as a string, or what of a chat a template looks at, as an object.

        None of routes that no engine counts, and of what none that is there would count.
        """
        if route not in (Route.COMPLETIONS, Route.CHAT):
            return None
        chat = route is Route.CHAT
        if not any(_way(one, chat=chat) for one in self._engines()):
            return None
        if not chat:
            told = _COMPLETION.decode(body).prompt
            return _ENCODE(told if isinstance(told, str) else told[0])
        parts = msgspec.structs.asdict(_CHAT.decode(body))
        return _ENCODE({name: part for name, part in parts.items() if bytes(part) not in _ABSENT})

    async def count(self, payload: bytes) -> Count:
        """Return an engine's count."""
        engine, way = self._next(chat=payload.startswith(b"{"))
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def heard(told: Answer) -> None:
            if not answer.done():
                answer.set_result(told)

        body = _question(engine.model, way, payload)
        waits = Timeouts(deadline=later(self._clock.now(), _PATIENCE_NS))
        fetch = Fetch(
            lambda listener: engine.upstream.post(
                way.path, body, listener, waits, answer_limit=_ANSWER_MAX
            ),
            heard,
        )
        try:
            told = await answer
        finally:
            fetch.abort()
        if not told.good:
            raise UncountedError(str(told.error or f"{engine.name} answers {told.status}"))
        return Count(_tokens(way, told.body), _REVISION)

    def close(self) -> None:
        """Leave the engines to whoever runs them."""

    def _next(self, *, chat: bool) -> tuple[RemoteEngine, Tokenize]:
        """Return the next engine that is up and counts such, and how it is asked."""
        engines = self._engines()
        for _ in engines:
            self._turn = (self._turn + 1) % len(engines)
            engine = engines[self._turn]
            if engine.is_up and (way := _way(engine, chat=chat)) is not None:
                return engine, way
        raise UncountedError("no engine is up")


def _way(engine: RemoteEngine, *, chat: bool) -> Tokenize | None:
    """Return how an engine is asked for a count, if its kind gives one."""
    way = engine.traits.tokenize
    return None if way is None or (chat and not way.chats) else way


def _question(model: str, way: Tokenize, payload: bytes) -> bytes:
    """Return what an engine is asked: a text in its own words, or a chat as it stands."""
    if payload.startswith(b"{"):
        return b'{"model":%s,%s' % (_ENCODE(model), payload[1:])
    return _ENCODE({"model": model, way.text: Raw(payload), **way.more})


def _tokens(way: Tokenize, body: bytes) -> Tokens:
    """Return the count that an answer tells; the tokens are looked at only if its kind tells none."""
    try:
        told = _FIELDS.decode(body)
        if way.count is not None:
            count = _COUNT.decode(told[way.count])
        else:
            count = len(msgspec.json.decode(told["tokens"], type=list[Raw]))
    except (KeyError, *UNREADABLE):
        raise UncountedError("what came is no count") from None
    if count < 1:
        raise UncountedError("a count of nothing")
    return Tokens(count)
