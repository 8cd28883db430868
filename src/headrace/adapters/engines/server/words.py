"""An answer, or an error, in vLLM's words: one JSON object, or the events of a stream.

As vLLM writes them: `usage` is not in the events before the last one unless asked for, an error's
`code` is a number, and the last text comes with the reason why it ends.
"""

from typing import Any

import msgspec

_ENCODE = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""
_TYPES = {
    400: "BadRequestError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


def error(status: int, message: str, param: str | None = None) -> bytes:
    """Return the body of an error."""
    told = {"message": message, "type": _TYPES[status], "param": param, "code": status}
    return _ENCODE({"error": told})


def event(content: bytes) -> bytes:
    """Return one event of a stream."""
    return b"data: " + content + b"\n\n"


class Writer:
    """Writes one answer to a chat or a completion."""

    def __init__(  # noqa: PLR0913 - what an answer's envelope says
        self,
        name: str,
        created: int,
        model: str,
        prompt_tokens: int,
        *,
        chat: bool,
        usage_at_end: bool = False,
        usage_always: bool = False,
        usage: bool = True,
    ) -> None:
        """Write under an id. `usage=False`: never tell it, whoever asks."""
        self._chat = chat
        self._prompt_tokens = prompt_tokens
        self._at_end, self._always = usage_at_end and usage, usage_always and usage
        self._usage = usage
        self._envelope = {"id": name, "object": "", "created": created, "model": model}

    def opening(self) -> list[bytes]:
        """Return the events before the first token: a chat's names the speaker."""
        if not self._chat:
            return []
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return [self._event([choice], 0)]

    def piece(self, text: str, made: int) -> bytes:
        """Return the event of some text, after which `made` tokens are out."""
        return self._event([self._choice(text, None)], made)

    def closing(self, text: str, finish: str, made: int, cached: int | None) -> list[bytes]:
        """Return the events of the last text and whatever follows it, `[DONE]` apart."""
        events = [self._event([self._choice(text, finish)], made)]
        if self._at_end:
            events.append(self._event([], made, self._tokens(made, cached)))
        return events

    def whole(self, text: str, finish: str, made: int, cached: int | None) -> bytes:
        """Return the answer in one piece."""
        said: dict[str, Any] = {"index": 0}
        if self._chat:
            said["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            said["text"] = text
        said |= {"logprobs": None, "finish_reason": finish, "stop_reason": None}
        kind = "chat.completion" if self._chat else "text_completion"
        told = {**self._envelope, "object": kind, "choices": [said]}
        if self._usage:
            told["usage"] = self._tokens(made, cached)
        return _ENCODE(told)

    def _choice(self, text: str, finish: str | None) -> dict[str, Any]:
        said: dict[str, Any] = {"index": 0}
        if self._chat:
            said["delta"] = {"content": text}
        else:
            said["text"] = text
        said |= {"logprobs": None, "finish_reason": finish}
        if finish is not None:
            said["stop_reason"] = None
        return said

    def _event(
        self, choices: list[dict[str, Any]], made: int, usage: dict[str, Any] | None = None
    ) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        told = {**self._envelope, "object": kind, "choices": choices}
        if usage is None and self._always:
            usage = self._tokens(made, None)
        if usage is not None:
            told["usage"] = usage
        return event(_ENCODE(told))

    def _tokens(self, made: int, cached: int | None) -> dict[str, Any]:
        told: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "total_tokens": self._prompt_tokens + made,
            "completion_tokens": made,
        }
        if cached is not None:
            told["prompt_tokens_details"] = {"cached_tokens": cached}
        return told
