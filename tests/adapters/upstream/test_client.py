"""One server by its address: where requests go, and who we say we are."""

import ssl

import pytest

from headrace.adapters.upstream.client import Upstream, origin_of
from headrace.ports.engine import Route
from tests.adapters.upstream.scenes import (
    DONE,
    EVENTS,
    LAST,
    OK,
    USAGE,
    WORD,
    Call,
    Scene,
    answers,
    chunk,
)


@pytest.mark.parametrize(
    ("url", "host", "port", "is_tls"),
    [
        ("http://engine", "engine", 80, False),
        ("http://10.0.0.7:8000/v1", "10.0.0.7", 8000, False),
        ("http://[::1]:8000", "::1", 8000, False),
        ("https://engine/base/", "engine", 443, True),
    ],
)
def test_an_address_names_a_server(url: str, host: str, port: int, is_tls: bool) -> None:
    origin = origin_of(url)
    assert (origin.host, origin.port, origin.tls is not None) == (host, port, is_tls)
    assert origin.headers == ()


def test_certificates_are_checked_unless_told_how() -> None:
    origin = origin_of("https://engine")
    assert origin.tls is not None
    assert (origin.tls.verify_mode, origin.tls.check_hostname) == (ssl.CERT_REQUIRED, True)
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    assert origin_of("https://engine", tls=own).tls is own
    assert origin_of("http://engine", tls=own).tls is None


@pytest.mark.parametrize("url", ["engine:8000", "ftp://engine", "http://", "http://a:b@engine"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not the address"):
        origin_of(url)


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["", "/base"])
@pytest.mark.parametrize("route", Route)
async def test_every_route_is_asked_and_read_as_its_own(
    scene: Scene, route: Route, path: str
) -> None:
    told = b'{"usage":{"prompt_tokens":7,"input_tokens":7,"output_tokens":0}}'
    server = await scene.server(answers(OK.replace(b"2\r\n\r\nok", b"64\r\n\r\n" + told)))
    engine = Upstream(f"http://127.0.0.1:{server.port}{path}", scene.clock)
    scene.pools.append(engine.pool)
    call = Call(scene.changed)
    call.exchange = engine.ask(route, b"{}", call)
    result = await scene.result(call)
    assert (call.pieces, result.error) == ([told], None)
    assert result.usage is not None
    assert result.usage.input_tokens == 7
    (asked,) = server.peer.requests
    assert asked.startswith(f"POST {path}{route} HTTP/1.1\r\n".encode())


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
async def test_a_chat_and_a_look_go_where_engines_expect_them(scene: Scene, path: str) -> None:
    server = await scene.server(answers(EVENTS + chunk(WORD + USAGE + DONE) + LAST, OK))
    engine = Upstream(f"http://127.0.0.1:{server.port}{path}", scene.clock, key="sk-1")
    scene.pools.append(engine.pool)
    chat, look = Call(scene.changed), Call(scene.changed)
    chat.exchange = engine.ask(Route.CHAT, b"{}", chat, hide_usage=True, headers=((b"x-a", b"b"),))
    result = await scene.result(chat)
    assert (chat.data, result.error, result.done) == (WORD + DONE, None, True)
    look.exchange = engine.get("/health", look)
    await scene.result(look)
    asked, looked = server.peer.requests
    assert asked.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert looked.startswith(b"GET /health HTTP/1.1\r\n")
    assert b"\r\nx-a: b\r\n" in asked
    for request in (asked, looked):
        assert b"\r\nauthorization: Bearer sk-1\r\n" in request
        assert b"\r\naccept-encoding: identity\r\n" in request
    engine.close()
    assert engine.pool.idle == 0
