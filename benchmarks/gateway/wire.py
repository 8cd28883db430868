"""What do caller and engine say to each other? Fixed bytes, the same for every gateway."""

import json

MODEL = "bench"
CHUNKS = 64
CHUNK_BYTES = 208
EXTRA_FRAMES = 2
"""Frames after the chunks of a stream: usage and [DONE]."""
PACE_MS = 20
BODY_BYTES = 600
_PACE = b"pace-"
_USAGE = {"prompt_tokens": 120, "completion_tokens": CHUNKS, "total_tokens": 120 + CHUNKS}
_FILLER = "the quick brown fox jumps over the lazy dog and runs on "


def request(*, stream: bool, key: str | None, pace_ms: int = PACE_MS) -> bytes:
    """Return a whole request for a chat completion; the engine finds its pace in the prompt."""
    content = f"pace-{pace_ms} "
    asked = {"model": MODEL, "max_tokens": CHUNKS, "messages": [{"role": "user", "content": ""}]}
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    room = BODY_BYTES - len(_compact(asked))
    asked["messages"] = [{"role": "user", "content": (content + _FILLER * room)[:room]}]
    body = _compact(asked)
    credentials = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\n"
        f"{credentials}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def wants_stream(body: bytes) -> bool:
    """Return whether a request, perhaps written anew by the gateway, asks for a stream."""
    return b'"stream":true' in body or b'"stream": true' in body


def pace_ms(body: bytes) -> int:
    """Return the milliseconds between two chunks that a request asks for."""
    at = body.find(_PACE)
    if at < 0:
        return PACE_MS
    at += len(_PACE)
    return int(body[at : body.index(b" ", at)])


def answer() -> bytes:
    """Return the whole answer without a stream: about 600 bytes of body."""
    message = {"role": "assistant", "content": (_FILLER * 6)[:330]}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return plain(_compact(_envelope("chat.completion") | {"choices": [choice], "usage": _USAGE}))


def plain(body: bytes, status: str = "200 OK") -> bytes:
    """Return a whole answer of a given body."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def stream_head() -> bytes:
    """Return the head of a stream."""
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        b"Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"
    )


def chunk(finish: str | None = None) -> bytes:
    """Return one chunk of a stream, framed: an event of CHUNK_BYTES with a word in it."""
    choice = {"index": 0, "delta": {"content": ""}, "finish_reason": finish}
    made = _envelope("chat.completion.chunk") | {"choices": [choice]}
    room = CHUNK_BYTES - len(_event(_compact(made)))
    choice["delta"] = {"content": " word".ljust(room, "s")}
    return _framed(_event(_compact(made)))


def stream_end() -> bytes:
    """Return what follows the last but one chunk: the last, usage, [DONE] and the end."""
    usage = _envelope("chat.completion.chunk") | {"choices": [], "usage": _USAGE}
    frames = [_event(_compact(usage)), _event(b"[DONE]")]
    return chunk("stop") + b"".join(map(_framed, frames)) + b"0\r\n\r\n"


def _envelope(kind: str) -> dict[str, object]:
    return {"id": "chatcmpl-bench", "object": kind, "created": 1_700_000_000, "model": MODEL}


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
