"""A message of Anthropic's kind, as vLLM serves it: one block of text, in events that are named.

As of vLLM, `input_tokens` is the whole prompt; the tokens found in the cache are among them.
"""

from typing import Any

from headrace.adapters.engines.words.frame import Head, encoded, named

_STOP = {"stop": "end_turn", "length": "max_tokens"}
_DELTA = "content_block_delta"
_BEFORE = b'event: %b\ndata: {"type":"%b","index":0,"delta":{"type":"text_delta","text":' % (
    (_DELTA.encode(),) * 2
)
_BEGUN = b'{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}'


class Messages:
    """Writes one message."""

    early = 0
    end_mark = b""

    def __init__(self, head: Head) -> None:
        """Write nothing yet."""
        self._head = head

    def opening(self) -> list[bytes]:
        """Return the events before the first token: the message begins, then its block."""
        message = self._message([], None, self._usage(0, None))
        return [
            named("message_start", encoded({"type": "message_start", "message": message})),
            named("content_block_start", _BEGUN),
        ]

    def piece(self, text: str, made: int) -> bytes:  # noqa: ARG002 - the end tells it
        """Return the event of some text."""
        return _BEFORE + encoded(text) + b"}}\n\n"

    def closing(self, text: str, finish: str, made: int, cached: int | None) -> list[bytes]:
        """Return the events of the last text and of everything that ends with it."""
        delta = {"stop_reason": _STOP.get(finish), "stop_sequence": None}
        told = {"type": "message_delta", "delta": delta, **self._usage(made, cached)}
        return [
            self.piece(text, made),
            named("content_block_stop", b'{"type":"content_block_stop","index":0}'),
            named("message_delta", encoded(told)),
            named("message_stop", b'{"type":"message_stop"}'),
        ]

    def whole(self, text: str, finish: str, made: int, cached: int | None) -> bytes:
        """Return the message in one piece."""
        content = [{"type": "text", "text": text}]
        return encoded(self._message(content, _STOP.get(finish), self._usage(made, cached)))

    def _message(
        self, content: list[dict[str, Any]], stop: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._head.name,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": stop,
            "stop_sequence": None,
            **usage,
        }

    def _usage(self, made: int, cached: int | None) -> dict[str, Any]:
        """Return the field of the usage, if it may be told."""
        if not self._head.usage:
            return {}
        told = {"input_tokens": self._head.prompt_tokens, "output_tokens": made}
        if cached is not None:
            told["cache_read_input_tokens"] = cached
        return {"usage": told}
