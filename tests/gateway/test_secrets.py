"""Keys and prompts stay where they belong, whatever goes wrong: planted, then looked for everywhere."""

import asyncio
import hmac
import json
import logging
import os
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import uvloop

from headrace.config.schema import (
    AdminKeySpec,
    AdminSpec,
    JournalSpec,
    KeySpec,
    ServerSpec,
    Settings,
    UpstreamSpec,
)
from headrace.gateway import auth, guard
from headrace.gateway.auth import KeyRing
from headrace.gateway.clock import MonotonicClock
from headrace.gateway.failures import FAILURES
from headrace.gateway.guard import Guard
from headrace.gateway.server import Gateway, listen
from headrace.model.deployment import TenantSpec
from headrace.policy.catalog import PlaneConfig
from tests.gateway.scenes import MODEL, deployment

KEY, LIMITED, WRONG = "sk-hr-planted-key", "sk-hr-planted-limited", "sk-hr-planted-wrong"
ADMIN, ADMIN_WRONG = "sk-hr-planted-admin", "sk-hr-planted-badmin"
ENGINE_KEY, PROMPT, FIELD = "sk-planted-engine", "planted prompt", "planted-header"
ANSWER, FAULT, SALT, TOOL = "planted answer", "planted fault", "planted-salt", "planted_tool"
SECRETS = (
    KEY,
    LIMITED,
    WRONG,
    ADMIN,
    ADMIN_WRONG,
    ENGINE_KEY,
    PROMPT,
    FIELD,
    ANSWER,
    FAULT,
    SALT,
    TOOL,
)
EVENT = {"choices": [{"index": 0, "delta": {"content": ANSWER}, "finish_reason": None}]}
ERRORS = (400, 401, 429, 500)
SHOWN = ("/metrics", "/config", "/policy", "/tenants", "/keys", "/state")


def _hash(key: str) -> str:
    return f"sha256:{sha256(key.encode()).hexdigest()}"


class Engine:
    """An engine that answers by what the prompt says, and puts secrets into all it says."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
                self.keys.append(fields["authorization"])
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                writer.write(self._said(head, body.decode()))
                if "[reset]" in body.decode():
                    writer.transport.abort()
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _said(self, head: str, body: str) -> bytes:
        if head.startswith("GET"):
            return b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
        for status in ERRORS:
            if f"[{status}]" in body:
                told = json.dumps({"error": {"message": FAULT, "key": ENGINE_KEY}}).encode()
                return _answer(status, b"application/json", told)
        if "[reset]" in body:
            return (
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + _event(EVENT)[:40]
            )
        if "[fault]" in body:
            events = _event(EVENT) + _event({"error": {"message": FAULT, "code": 500}})
            return _answer(200, b"text/event-stream", events)
        if "[junk]" in body:
            return f"HTTP/1.1 200 OK\r\n{FAULT} {ENGINE_KEY}\r\n\r\n".encode()
        if '"stream": true' in body or '"stream":true' in body:
            return _answer(200, b"text/event-stream", _event(EVENT) + b"data: [DONE]\n\n")
        return _answer(200, b"application/json", json.dumps({"choices": [], "x": ANSWER}).encode())


def _event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _answer(status: int, kind: bytes, content: bytes) -> bytes:
    head = b"HTTP/1.1 %d X\r\ncontent-type: %s\r\nx-planted: %s\r\ncontent-length: %d\r\n\r\n"
    return head % (status, kind, FAULT.encode(), len(content)) + content


def _settings(folder: Path, port: int) -> Settings:
    config: PlaneConfig = deployment(
        replicas=0, tenants=(TenantSpec(name="free"), TenantSpec(name="few", rpm_limit=1))
    )
    return Settings(
        deployment=config,
        keys=(
            KeySpec(name="one", tenant="free", hash=_hash(KEY)),
            KeySpec(name="two", tenant="few", hash=_hash(LIMITED)),
        ),
        server=ServerSpec(port=0, drain_s=0),
        admin=AdminSpec(
            keys=(AdminKeySpec(name="ops", hash=_hash(ADMIN)),),
            audit_log=str(folder / "audit.jsonl"),
        ),
        journal=JournalSpec(path=str(folder / "journal")),
        decision_log=str(folder / "decisions.jsonl"),
        upstreams=(
            UpstreamSpec(url=f"http://127.0.0.1:{port}", pool="p", key_env="PLANTED_ENGINE_KEY"),
        ),
    )


Place = tuple[str, int]


async def _send(place: Place, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*place)
    try:
        writer.write(request)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


def _post(body: Any, key: str = KEY, path: str = "/v1/chat/completions") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
        f"x-own: {FIELD}\r\nx-request-id: id-1\r\nx-llm-d-inference-objective: {FIELD}\r\n"
        f"connection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    ).encode() + content


def _chat(word: str = "", **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"{PROMPT} {word}"}
    return {"model": MODEL, "messages": [message], "max_tokens": 9, "cache_salt": SALT, **fields}


def _requests() -> Iterator[bytes]:
    """Yield one request of each fate."""
    tool = {"type": "function", "function": {"name": TOOL}}
    yield _post(_chat())
    yield _post(_chat(stream=True, user=KEY, tools=[tool]))
    yield _post({"model": MODEL, "prompt": PROMPT}, path="/v1/completions")
    yield _post({"model": MODEL, "input": PROMPT}, path="/v1/responses")
    yield _post({**_chat(), "system": PROMPT}, path="/v1/messages")
    yield _post({"model": MODEL, "input": [PROMPT]}, path="/v1/embeddings")
    yield from (_post(_chat(f"[{status}]", stream=True)) for status in ERRORS)
    yield from (_post(_chat(word, stream=True)) for word in ("[reset]", "[fault]", "[junk]"))
    yield from (_post(_chat(), LIMITED) for _ in range(3))
    yield from (_post(_chat(), WRONG) for _ in range(FAILURES + 2))
    yield _post(_chat(model="unknown"))  # the one word of a body that is recorded
    yield _post(_chat(messages=PROMPT))
    yield _post(_chat(n=PROMPT))
    yield _post(json.dumps(_chat()).encode()[:-3])
    yield _post(b"\xff" + PROMPT.encode())
    yield _post(_chat(), path=f"/v1/{FIELD}")
    yield f"GET /{PROMPT} HTTP/1.1\r\n{KEY}\r\nx: {FIELD}\r\n\r\n".encode()
    yield f"BREW{PROMPT} {KEY}\r\n\r\n".encode()
    yield _post(_chat())[:-9] + b"\0\r\n" + KEY.encode()


async def _shown(place: Place) -> bytes:
    """Return all that the admin side shows, after orders of every kind, right and wrong."""
    orders = [
        _post({"frozen": False}, ADMIN, "/freeze"),
        _post({"admission": {"margin_ms": 80}}, ADMIN, "/policy"),
        _post({"admission": {"margin_ms": PROMPT}}, ADMIN, "/policy"),
        _post({KEY: PROMPT}, ADMIN, "/policy"),
        _post(b"", ADMIN_WRONG, "/drain"),
    ]
    for order in orders:
        await _send(place, order)
    head = f"HTTP/1.0\r\nhost: 127.0.0.1\r\nauthorization: Bearer {ADMIN}\r\n\r\n"
    found = [await _send(place, f"GET {path} {head}".encode()) for path in SHOWN]
    assert all(b" 200 OK" in one[:20] for one in found)
    return b"".join(found)


def _broken(event: Any, **_: Any) -> Any:
    raise RuntimeError(f"broken on {type(event).__name__}")


def _talked(
    settings: Callable[[int], Settings], *, breaks: bool
) -> tuple[list[bytes], bytes, Engine, Gateway]:
    """Serve requests of every fate; return answers, what was shown, and who served."""

    async def talk() -> tuple[list[bytes], bytes, Engine, Gateway]:
        engine = Engine()
        serving = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
        given = settings(serving.sockets[0].getsockname()[1])
        gateway = Gateway(given, MonotonicClock(asyncio.get_running_loop()))
        sock, admin_sock = listen("127.0.0.1", 0), listen("127.0.0.1", 0)
        place, admin_place = sock.getsockname(), admin_sock.getsockname()
        running = asyncio.create_task(gateway.serve(sock, admin_sock))
        while not gateway.driver.ready_replicas:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.005)
        answers = [await _send(place, one) for one in _requests()]
        shown = await _shown(admin_place)
        if breaks:
            gateway.driver._handle = _broken
            answers.append(await _send(place, _post(_chat(stream=True))))
        gateway.stop()
        assert await running is not breaks
        serving.close()
        return answers, shown, engine, gateway

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(talk(), 30))


@pytest.mark.service
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken"])
def test_what_is_secret_is_written_and_shown_nowhere(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    breaks: bool,
) -> None:
    monkeypatch.setenv("PLANTED_ENGINE_KEY", ENGINE_KEY)
    with caplog.at_level(logging.DEBUG):
        answers, shown, engine, gateway = _talked(
            lambda port: _settings(tmp_path, port), breaks=breaks
        )
    statuses = {int(one[9:12]) for one in answers if one}
    assert statuses >= {200, 400, 401, 404, 429, 502}, statuses
    assert gateway.driver.outcomes["success"] > 5
    assert set(engine.keys) == {f"Bearer {ENGINE_KEY}"}, "callers' keys end here"
    assert any(one.levelno == logging.CRITICAL for one in caplog.records) is breaks
    files = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(files) >= 3
    assert all(files.values())
    logged = "".join(logging.Formatter().format(one) for one in caplog.records)
    places = {
        **files,
        "log": logged.encode(),
        "admin": shown,
        "std": "".join(capfd.readouterr()).encode(),
    }
    hashes = [sha256(one.encode()) for one in (KEY, LIMITED, WRONG, ADMIN)]
    hidden = [one.encode() for one in (*SECRETS, *(one.hexdigest() for one in hashes))]
    hidden += [one.digest() for one in hashes]
    for place, content in places.items():
        for secret in hidden:
            assert secret not in content, (place, secret)
    for answer in answers:
        if answer.startswith(b"HTTP/1.1 400") and FAULT.encode() in answer:
            continue  # an engine's own answer to a request that it blames, as it stands
        for told in (KEY, LIMITED, WRONG, ENGINE_KEY, FIELD):
            assert told.encode() not in answer, answer


class Compared:
    """Stands in for `hmac`, and notes what was compared."""

    def __init__(self) -> None:
        self.pairs: list[tuple[bytes, bytes]] = []

    def compare_digest(self, one: bytes, other: bytes) -> bool:
        self.pairs.append((one, other))
        return hmac.compare_digest(one, other)


def test_keys_of_callers_are_compared_in_constant_time_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = Compared()
    monkeypatch.setattr(auth, "hmac", compared)
    ring = KeyRing([KeySpec(name="one", tenant="free", hash=_hash(KEY))])
    digest = sha256(KEY.encode()).digest()
    assert ring.tenant(f"Bearer {KEY}".encode()) == "free"
    assert ring.tenant(None, KEY.encode()) == "free"
    assert compared.pairs == [(digest, digest)] * 2, "no key is let in but by a whole comparison"
    monkeypatch.setattr(compared, "compare_digest", lambda *_: False)
    assert ring.tenant(f"Bearer {KEY}".encode()) is None
    assert ring.tenant(None, KEY.encode()) is None


def test_keys_of_admins_are_compared_in_constant_time_each(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = Compared()
    monkeypatch.setattr(guard, "hmac", compared)
    names = ("a", "b", "c")
    spec = AdminSpec(keys=tuple(AdminKeySpec(name=one, hash=_hash(one * 20)) for one in names))
    with asyncio.Runner() as runner:
        door = Guard(spec, MonotonicClock(runner.get_loop()))
        for one in names:
            headers = [(b"authorization", f"Bearer {one * 20}".encode())]
            assert door.admit({"client": ("::1", 1), "headers": headers}) == one
    assert len(compared.pairs) == len(names) ** 2, "right or wrong, as long"


@pytest.mark.service
def test_an_address_that_shows_wrong_keys_is_slowed_whatever_it_calls_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_ENGINE_KEY", ENGINE_KEY)
    monkeypatch.setitem(os.environ, "FORWARDED_ALLOW_IPS", "*")

    async def talk() -> list[int]:
        engine = Engine()
        serving = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
        given = _settings(tmp_path, serving.sockets[0].getsockname()[1])
        gateway = Gateway(given, MonotonicClock(asyncio.get_running_loop()))
        sock = listen("127.0.0.1", 0)
        running = asyncio.create_task(gateway.serve(sock))
        statuses = []
        for nth in range(FAILURES + 2):
            told = f"x-forwarded-for: 10.0.0.{nth}\r\nx-own".encode()
            answer = await _send(sock.getsockname(), _post(_chat(), WRONG).replace(b"x-own", told))
            statuses.append(int(answer[9:12]))
        gateway.stop()
        assert await running
        serving.close()
        return statuses

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(asyncio.wait_for(talk(), 20)) == [401] * FAILURES + [429, 429]
