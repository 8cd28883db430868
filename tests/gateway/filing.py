"""Files and batches of tests: forms to send, lines to fill them with, answers to read."""

import json
from typing import Any

from tests.gateway.deferring import Deferring
from tests.gateway.scenes import KEYS, MODEL, Caller

BOUNDARY = "of-the-test"


def form(content: bytes, name: str = "in.jsonl", **fields: str) -> bytes:
    """Return a form with a file in it."""
    told = {"purpose": "batch", **fields}
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{value}\r\n'.encode()
        for key, value in told.items()
    ]
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
    file = head.encode() + b"Content-Type: application/jsonl\r\n\r\n" + content + b"\r\n"
    return b"".join((*parts, file, f"--{BOUNDARY}--\r\n".encode()))


def line(custom_id: str, url: str = "/v1/chat/completions", **fields: Any) -> bytes:
    """Return a line of a batch: a small chat."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    told = {"custom_id": custom_id, "method": "POST", "url": url, "body": {**chat, **fields}}
    return json.dumps(told).encode() + b"\n"


def lines(count: int, **fields: Any) -> bytes:
    """Return so many of them."""
    return b"".join(line(f"{n}", **fields) for n in range(count))


async def send(gateway: Deferring, body: Any, kind: str | None = None, **fields: Any) -> Caller:
    """Send a form."""
    kind = kind or f"multipart/form-data; boundary={BOUNDARY}"
    headers = {"content-type": kind, **fields.pop("headers", {})}
    return await gateway.ask(path="/v1/files", body=body, headers=headers, **fields).done()


async def filed(gateway: Deferring, content: bytes, key: str = KEYS["free"], **fields: str) -> str:
    """Put a file; return its id."""
    caller = await send(gateway, form(content, **fields), key=key)
    assert caller.status == 200, caller.content
    return str(json.loads(caller.content)["id"])


async def hand_in(
    gateway: Deferring, file: str, headers: dict[str, str] | None = None, **fields: Any
) -> Caller:
    """Ask for a batch of a file."""
    key = fields.pop("key", KEYS["free"])
    told = {
        "input_file_id": file,
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        **fields,
    }
    return await gateway.ask(path="/v1/batches", body=told, headers=headers, key=key).done()


async def batched(gateway: Deferring, content: bytes, **fields: Any) -> str:
    """Put a file and ask for a batch of it; return its id."""
    caller = await hand_in(gateway, await filed(gateway, content), **fields)
    assert caller.status == 200, caller.content
    assert caller.json["status"] == "validating"
    return str(caller.json["id"])


async def get(
    gateway: Deferring, path: str, key: str = KEYS["free"], method: str = "GET"
) -> Caller:
    """Ask for something."""
    return await gateway.ask(path=path, method=method, key=key).done()


async def over(gateway: Deferring, batch: str) -> Any:
    """Wait until a batch is over."""
    while True:
        found = (await get(gateway, f"/v1/batches/{batch}")).json
        if found["status"] in ("completed", "failed", "expired", "cancelled"):
            return found
        await gateway.until(gateway.clock.now() / 1e6 + 500)


async def answers(gateway: Deferring, file: str | None) -> list[Any]:
    """Return the lines of a file of answers; none if there is no file."""
    if file is None:
        return []
    caller = await get(gateway, f"/v1/files/{file}/content")
    assert caller.status == 200
    assert int(caller.headers["content-length"]) == len(caller.content)
    return [json.loads(one) for one in caller.content.splitlines()]
