"""A chat and a completion: chunks with choices.

As vLLM writes them: `usage` is not in the events before the last one unless asked for, and the last
text comes with the reason why it ends.
"""

from typing import Any

from headrace.adapters.engines.words.frame import DONE, Head, encoded, event

_OPEN = b',"logprobs":null,"finish_reason":null}]'
_ENDED = b',"stop_reason":null}]'


class _Choices:
    """Writes answers that are a list of one choice."""

    early = 0
    end_mark = DONE
    chunk: str
    """What an event says it is."""
    told: str
    """What an answer in one piece says it is."""
    before: bytes
    """What stands before the text of a choice in an event."""
    after: bytes
    """What stands behind it."""

    def __init__(self, head: Head) -> None:
        """Write nothing yet."""
        self._head = head
        self._start = self._object(self.chunk)[:-1] + b',"choices":'
        self._before = b"data: " + self._start + b'[{"index":0,' + self.before
        self._after = self.after + _OPEN
        self._end = self._after + b"}\n\n"

    def opening(self) -> list[bytes]:
        """Return the events before the first token."""
        return []

    def piece(self, text: str, made: int) -> bytes:
        """Return the event of some text, after which `made` tokens are out."""
        if self._head.usage_always:
            return self._before + encoded(text) + self._after + self._so_far(made)
        return self._before + encoded(text) + self._end

    def closing(self, text: str, finish: str, made: int, cached: int | None) -> list[bytes]:
        """Return the events of the last text and whatever follows it, the end mark apart."""
        reason = b',"logprobs":null,"finish_reason":' + encoded(finish) + _ENDED
        end = self._so_far(made) if self._head.usage_always else b"}\n\n"
        events = [self._before + encoded(text) + self.after + reason + end]
        if self._head.usage_at_end:
            usage = b'[],"usage":' + encoded(self._usage(made, cached)) + b"}"
            events.append(event(self._start + usage))
        return events

    def whole(self, text: str, finish: str, made: int, cached: int | None) -> bytes:
        """Return the answer in one piece."""
        choice = {"index": 0, **self.said(text), "logprobs": None}
        choice |= {"finish_reason": finish, "stop_reason": None}
        rest: dict[str, Any] = {"choices": [choice]}
        if self._head.usage:
            rest["usage"] = self._usage(made, cached)
        return self._object(self.told)[:-1] + b"," + encoded(rest)[1:]

    def said(self, text: str) -> dict[str, Any]:
        """Return the text of a choice in an answer in one piece."""
        raise NotImplementedError

    def _object(self, kind: str) -> bytes:
        head = self._head
        told = {"id": head.name, "object": kind, "created": head.created, "model": head.model}
        return encoded(told)

    def _so_far(self, made: int) -> bytes:
        """Return the end of an event that tells the usage so far."""
        return b',"usage":' + encoded(self._usage(made, None)) + b"}\n\n"

    def _usage(self, made: int, cached: int | None) -> dict[str, Any]:
        prompt = self._head.prompt_tokens
        told: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + made,
            "completion_tokens": made,
        }
        if cached is not None:
            told["prompt_tokens_details"] = {"cached_tokens": cached}
        return told


class Chat(_Choices):
    """Writes an answer to a chat."""

    chunk, told = "chat.completion.chunk", "chat.completion"
    before, after = b'"delta":{"content":', b"}"

    def opening(self) -> list[bytes]:
        """Return the event that names the speaker."""
        speaker = b'[{"index":0,"delta":{"role":"assistant","content":""}' + _OPEN
        end = self._so_far(0) if self._head.usage_always else b"}\n\n"
        return [b"data: " + self._start + speaker + end]

    def said(self, text: str) -> dict[str, Any]:
        """Return the text of a choice in an answer in one piece."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}


class Completion(_Choices):
    """Writes an answer to a completion."""

    chunk = told = "text_completion"
    before, after = b'"text":', b""

    def said(self, text: str) -> dict[str, Any]:
        """Return the text of a choice in an answer in one piece."""
        return {"text": text}
