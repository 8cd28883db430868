"""An answer in OpenAI's words: one JSON object, or the events of a stream."""

import msgspec
from msgspec import Struct

from headrace.gateway.errors import Fault, body
from headrace.gateway.stream import Done
from headrace.model.engine import Usage

_ENCODE = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
"""The last event of every stream."""


class _Details(Struct, frozen=True):
    cached_tokens: int


class _Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _Details


class _Message(Struct, frozen=True):
    role: str
    content: str


class _Choice(Struct, frozen=True):
    index: int
    message: _Message
    finish_reason: str


class _Completion(Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: tuple[_Choice, ...]
    usage: _Usage


def _usage(usage: Usage) -> _Usage:
    """Return the engine's own count, which is exact."""
    return _Usage(
        prompt_tokens=usage.input_tokens,
        completion_tokens=usage.output_tokens,
        total_tokens=usage.input_tokens + usage.output_tokens,
        prompt_tokens_details=_Details(usage.cached_tokens),
    )


class Writer:
    """Writes one answer."""

    def __init__(self, name: str, created: int, model: str, *, usage: bool) -> None:
        """Write under an id; `usage`: the caller wants a stream's usage."""
        self._id, self._created, self._model = name, created, model
        self._with_usage = usage
        head = _ENCODE(
            {"id": name, "object": "chat.completion.chunk", "created": created, "model": model}
        )
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if usage else b"]}\n\n"
        self._role = b'"role":"assistant",'

    def whole(self, text: str, done: Done) -> bytes:
        """Return the answer in one piece."""
        choice = _Choice(0, _Message("assistant", text), done.finish)
        return _ENCODE(
            _Completion(
                id=self._id,
                object="chat.completion",
                created=self._created,
                model=self._model,
                choices=(choice,),
                usage=_usage(done.usage),
            )
        )

    def delta(self, text: str) -> bytes:
        """Return the event of some text; the first one names the speaker too."""
        role, self._role = self._role, b""
        delta = b'{"index":0,"delta":{%b"content":%b},"finish_reason":null}' % (role, _ENCODE(text))
        return self._head + delta + self._tail

    def end(self, done: Done) -> bytes:
        """Return the events that complete a stream."""
        choice = b'{"index":0,"delta":{},"finish_reason":"%b"}' % done.finish.encode()
        events = self._head + choice + self._tail
        if self._with_usage:
            events += self._head + b'],"usage":' + _ENCODE(_usage(done.usage)) + b"}\n\n"
        return events + DONE


def broken(fault: Fault) -> bytes:
    """Return the events that end a stream with an error: never a clean end alone."""
    return b"data: " + body(fault) + b"\n\n" + DONE
