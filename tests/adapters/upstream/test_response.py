"""One response without I/O: what is accepted, what is kept, wherever the reads are cut."""

import pytest

from headrace.adapters.upstream.response import HEAD_BYTES_MAX, INTERIM_MAX, Response
from headrace.ports.upstream import CutError, MalformedError

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;ext=1\r\nlo\r\n0\r\n\r\n"
)
TRAILERS = CHUNKED[:-2] + b"X-Trailer: 1\r\nX-Other: 2\r\n\r\n"
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
CLOSE = b"HTTP/1.1 200 OK\r\nX-A: b\r\n\r\nhello"
KEPT = [LENGTH, CHUNKED, TRAILERS, INTERIM + LENGTH, INTERIM + CHUNKED]


def read(*parts: bytes, is_head: bool = False) -> tuple[Response, bytes]:
    """Feed the parts."""
    response = Response(is_head=is_head)
    return response, b"".join(response.feed(part) for part in parts)


def feed_for_ever(response: Response) -> None:
    """Feed what looks like one long word."""
    for _ in range(1_000):
        response.feed(b"x" * 1_000)


@pytest.mark.parametrize("raw", KEPT)
def test_every_cut_gives_the_same(raw: bytes) -> None:
    whole, body = read(raw)
    assert (body, whole.complete, whole.reusable) == (b"hello", True, True)
    for at in range(1, len(raw)):
        response, body = read(raw[:at], raw[at:])
        assert (response.status, body, response.complete) == (200, b"hello", True)
        assert response.headers == whole.headers
    single, body = read(*(raw[at : at + 1] for at in range(len(raw))))
    assert (single.status, single.headers, body) == (200, whole.headers, b"hello")
    assert single.complete


def test_trailers_are_no_headers() -> None:
    response, _ = read(TRAILERS)
    assert response.headers == [(b"transfer-encoding", b"chunked")]


def test_interim_heads_leave_nothing_behind() -> None:
    response, _ = read(INTERIM + LENGTH)
    assert response.headers == [(b"content-length", b"5"), (b"x-a", b"b")]
    with pytest.raises(MalformedError, match="not asked for"):
        read(b"HTTP/1.1 100 Continue\r\n\r\n" * (INTERIM_MAX + 1))


@pytest.mark.parametrize(
    "raw",
    [
        LENGTH.replace(b"X-A: b", b"Connection: close"),
        CHUNKED.replace(b"chunked\r\n", b"chunked\r\nConnection: close\r\n"),
        LENGTH.replace(b"HTTP/1.1", b"HTTP/1.0"),
        LENGTH + b"x",
        LENGTH + b"\r\n",
        LENGTH + LENGTH,
        LENGTH.replace(b"5", b"0").removesuffix(b"hello") + b"\r\n",
        CHUNKED + b"x",
        CHUNKED + b"\r\n",
        CHUNKED + CHUNKED,
        TRAILERS + b"\r\n",
        EMPTY + b"\n",
    ],
)
def test_a_connection_is_not_kept_if_it_may_hold_more(raw: bytes) -> None:
    response, body = read(raw)
    assert (response.complete, response.reusable) == (True, False)
    assert body in (b"hello", b"")


def test_bytes_after_the_end_spoil_it_later_too() -> None:
    response, body = read(LENGTH, b"x")
    assert (body, response.complete, response.reusable) == (b"hello", True, False)


def test_an_http_1_0_server_may_keep_the_connection() -> None:
    raw = LENGTH.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"X-A: b", b"Connection: keep-alive")
    assert read(raw)[0].reusable


@pytest.mark.parametrize("raw", [EMPTY, b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n"])
def test_some_statuses_have_no_body(raw: bytes) -> None:
    response, body = read(raw)
    assert (response.complete, response.reusable, body) == (True, True, b"")


@pytest.mark.parametrize("raw", [LENGTH, CHUNKED, CLOSE])
def test_the_answer_to_head_ends_with_its_head(raw: bytes) -> None:
    response, body = read(raw.partition(b"\r\n\r\n")[0] + b"\r\n\r\n", is_head=True)
    assert (response.complete, response.reusable, body) == (True, False, b"")


def test_only_a_body_without_length_ends_with_the_connection() -> None:
    response, body = read(CLOSE, b" there")
    assert (body, response.complete) == (b"hello there", False)
    response.eof()
    assert (response.complete, response.reusable) == (True, False)
    for raw in (b"", LENGTH[:9], LENGTH[:-1], CHUNKED[:-1], CHUNKED[:-9], INTERIM):
        response, _ = read(raw) if raw else (Response(), b"")
        with pytest.raises(CutError):
            response.eof()


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"\x15\x03\x01\x00\x02",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/0.9 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\nX: y\n\n",
        b"HTTP/1.1 200 OK\r\nX: y\n\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: y\r\n z\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    ],
)
def test_what_two_readers_could_understand_differently_is_refused(raw: bytes) -> None:
    with pytest.raises(MalformedError):
        read(raw)
    with pytest.raises(MalformedError):
        read(*(raw[at : at + 1] for at in range(len(raw))))


def test_the_head_is_bounded_while_it_arrives() -> None:
    start, end = b"HTTP/1.1 204 OK\r\nX: ", b"\r\n\r\n"
    room = HEAD_BYTES_MAX - len(start) - len(end)
    assert read(start + b"x" * room + end)[0].complete
    with pytest.raises(MalformedError, match="too large"):
        read(start + b"x" * (room + 1) + end)
    response = Response()
    response.feed(start)
    with pytest.raises(MalformedError, match="too large"):
        feed_for_ever(response)
    assert len(response._head) <= HEAD_BYTES_MAX + 1_000


@pytest.mark.parametrize("start", [b"0\r\nX: ", b"5;x="])
def test_what_never_becomes_a_body_is_bounded(start: bytes) -> None:
    response = Response()
    response.feed(CHUNKED.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" + start)
    with pytest.raises(MalformedError, match="without end"):
        feed_for_ever(response)
