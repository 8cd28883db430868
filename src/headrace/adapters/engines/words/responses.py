"""A response: one message of one part, in numbered events that are named.

As vLLM writes it: the first two events go out before anything is made, the end is called
`response.completed` even where the answer is cut short (its `status` tells), and there is no end
mark.
"""

from typing import Any

from headrace.adapters.engines.words.frame import Head, encoded, named

_STATUS = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}
_DELTA = "response.output_text.delta"


class Responses:
    """Writes one response; its events are numbered, so they are asked for in order."""

    early = 2
    end_mark = b""

    def __init__(self, head: Head) -> None:
        """Write nothing yet."""
        self._head = head
        self._item = f"msg_{head.name.removeprefix('resp_')}"
        self._numbered = 0
        self._texts: list[str] = []
        place = encoded({"item_id": self._item, "output_index": 0, "content_index": 0})[1:-1]
        self._before = b'event: %b\ndata: {"type":"%b","sequence_number":' % (
            (_DELTA.encode(),) * 2
        )
        self._between = b"," + place + b',"delta":'

    def opening(self) -> list[bytes]:
        """Return the events before the first token; those of the response itself come first."""
        response = self._response("in_progress", [], None)
        item = self._message("in_progress", [])
        return [
            self._event("response.created", {"response": response}),
            self._event("response.in_progress", {"response": response}),
            self._event("response.output_item.added", {"output_index": 0, "item": item}),
            self._event("response.content_part.added", {**self._place, "part": _part("")}),
        ]

    def piece(self, text: str, made: int) -> bytes:  # noqa: ARG002 - the end tells it
        """Return the event of some text."""
        self._texts.append(text)
        number = self._numbered
        self._numbered = number + 1
        return (
            self._before + b"%d" % number + self._between + encoded(text) + b',"logprobs":[]}\n\n'
        )

    def closing(self, text: str, finish: str, made: int, cached: int | None) -> list[bytes]:
        """Return the events of the last text and of everything that ends with it."""
        last = self.piece(text, made)
        said = "".join(self._texts)
        item = self._message("completed", [_part(said)])
        response = self._ended(item, finish, made, cached)
        done = {**self._place, "text": said, "logprobs": []}
        return [
            last,
            self._event("response.output_text.done", done),
            self._event("response.content_part.done", {**self._place, "part": _part(said)}),
            self._event("response.output_item.done", {"output_index": 0, "item": item}),
            self._event("response.completed", {"response": response}),
        ]

    def whole(self, text: str, finish: str, made: int, cached: int | None) -> bytes:
        """Return the response in one piece."""
        return encoded(self._ended(self._message("completed", [_part(text)]), finish, made, cached))

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, told: dict[str, Any]) -> bytes:
        number, self._numbered = self._numbered, self._numbered + 1
        return named(kind, encoded({"type": kind, "sequence_number": number, **told}))

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _ended(
        self, item: dict[str, Any], finish: str, made: int, cached: int | None
    ) -> dict[str, Any]:
        """Return the response when everything is out."""
        prompt = self._head.prompt_tokens
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached or 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + made,
        }
        return self._response(_STATUS[finish], [item], usage if self._head.usage else None)

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._head.name,
            "object": "response",
            "created_at": self._head.created,
            "model": self._head.model,
            "status": status,
            "incomplete_details": cut,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
