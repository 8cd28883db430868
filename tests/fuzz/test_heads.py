"""Whatever a caller sends: an answer or a closed connection, and no engine sees what is not valid."""

import asyncio
import itertools
import json
import re
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

import h11
import pytest
from hypothesis import strategies as st

from headrace.ports.engine import Route
from tests.fuzz.serving import LEAST, PATIENCE_S, Front, explore, fronted, whole
from tests.gateway.scenes import KEYS, MODEL

pytestmark = [pytest.mark.service, pytest.mark.slow]

BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()
KEY = f"authorization: Bearer {KEYS['free']}".encode()
ROUTES = frozenset(route.encode() for route in Route)
ALLOWED = frozenset({100, 200, 400, 401, 404, 405, 408, 413, 429, 431})
"""429: wrong keys, or more than one tenant may ask."""
AT_ONCE = 8
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")

METHODS = st.sampled_from(
    [*[b"POST"] * 6, b"GET", b"HEAD", b"PUT", b"post", b"OPTIONS", b"CONNECT", b"PRI", b"", b"P ST"]
)
PATHS = st.sampled_from(
    [
        *[b"/v1/chat/completions"] * 5,
        *sorted(ROUTES),
        b"/v1/chat/completions?x=1",
        b"/v1/chat/completions/",
        b"/v1/./chat/completions",
        b"//v1/chat/completions",
        b"/v1/chat%2fcompletions",
        b"/%ff%00",
        b"/\xff\xfe",
        b"http://h/v1/chat/completions",
        b"http://[::1",
        b"*",
        b"",
        b"/health",
        b"/v1/models",
        b"/" + b"x" * 70_000,
    ]
)
VERSIONS = st.sampled_from(
    [
        *[b"HTTP/1.1"] * 8,
        b"HTTP/1.0",
        b"HTTP/2.0",
        b"HTTP/0.9",
        b"HTTP/1.1 ",
        b"http/1.1",
        b"",
        b"X",
    ]
)
LENGTH = len(BODY)
FRAMINGS = st.sampled_from(
    [
        *[(b"content-length: %d" % LENGTH,)] * 6,
        *[(b"transfer-encoding: chunked",)] * 3,
        (),
        (b"content-length: %d" % (LENGTH + 5),),
        (b"content-length: %d" % (LENGTH - 1),),
        (b"content-length: 0",),
        (b"content-length: -1",),
        (b"content-length: +%d" % LENGTH,),
        (b"content-length: 0x%x" % LENGTH,),
        (b"content-length: %d, %d" % (LENGTH, LENGTH),),
        (b"content-length: %d" % LENGTH, b"content-length: %d" % LENGTH),
        (b"content-length: 5", b"content-length: %d" % LENGTH),
        (b"content-length: 99999999999999999999999999",),
        (b"content-length : %d" % LENGTH,),
        (b"content-length: %d" % LENGTH, b"transfer-encoding: chunked"),
        (b"transfer-encoding: chunked", b"content-length: %d" % LENGTH),
        (b"transfer-encoding: identity", b"content-length: %d" % LENGTH),
        (b"transfer-encoding: gzip, chunked",),
        (b"transfer-encoding: chunked, chunked",),
        (b"transfer-encoding: xchunked",),
        (b"transfer-encoding:\x0bchunked",),
        (b"Transfer-Encoding: CHUNKED",),
        (b"transfer_encoding: chunked",),
    ]
)
FIELDS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                b"expect: 100-continue",
                b"expect: x",
                b"connection: close",
                b"connection: upgrade",
                b"upgrade: websocket",
                b"upgrade: h2c",
                b"connection: content-length",
                b" folded",
                b"x:",
                b": x",
                b"x",
                b"",
                b"x: \x00",
                b"x\x00y: z",
                b"x: a\rb",
                b"x: a\nb: c",
                b"host: other",
                b"x-request-id: " + b"i" * 300,
                b"x-request-id: \xff",
                b"x-llm-d-slo-ttft-ms: 99999999999999999999",
                b"x-llm-d-slo-ttft-ms: -1",
                b"x-llm-d-slo-ttft-ms: \xb2",
                b"x-slo-tpot-ms: 1e9",
                b"x-llm-d-inference-objective: \xff",
                b"x-llm-d-inference-objective: nope",
                b"x-forwarded-for: \xff, ::1%x",
                b"x-forwarded-proto: x",
                b"x: " + b"y" * 66_000,
                b"content-type: text/plain",
                b"content-encoding: gzip",
            ]
        ),
        st.binary(max_size=20),
        st.tuples(st.binary(max_size=8), st.binary(max_size=8)).map(b": ".join),
    ),
    max_size=3,
)
AUTHORIZATIONS = st.sampled_from(
    [*[KEY] * 8, b"", b"authorization: Bearer", b"authorization: Bearer \xff", b"x-api-key: no", KEY + b"\0"]
)  # fmt: skip


class Cut(NamedTuple):
    """Where the bytes of one connection are torn, what is done to one of them, and how it ends."""

    edges: tuple[int, ...]
    at: int
    kind: str
    byte: int
    ends: bool


CUTS = st.builds(
    Cut,
    edges=st.lists(st.integers(0, 500), max_size=4).map(tuple),
    at=st.integers(0, 400),
    kind=st.sampled_from(["none", "none", "none", "put", "insert", "drop", "stop"]),
    byte=st.integers(0, 255),
    ends=st.booleans(),
)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Return one request, more or less."""
    start = b" ".join([draw(METHODS), draw(PATHS), draw(VERSIONS)])
    framing = draw(FRAMINGS)
    fields = [b"host: h", draw(AUTHORIZATIONS), *framing, *draw(FIELDS)]
    fields = draw(st.permutations([one for one in fields if one] or fields))
    eol = draw(st.sampled_from([*[b"\r\n"] * 8, b"\n", b"\r"]))
    body = BODY
    if any(b"hunked" in one.lower() or b"HUNKED" in one for one in framing):
        size = draw(
            st.sampled_from(
                [*[b"%x"] * 6, b"%x;a=b", b"0%x", b" %x", b"%x ", b"0x%x", b"-%x", b"%xg", b"%x\n"]
            )
        )
        end = draw(
            st.sampled_from([*[b"0\r\n\r\n"] * 5, b"0\r\nx: y\r\n\r\n", b"0\n\n", b"00\r\n\r\n"])
        )
        body = size % LENGTH + b"\r\n" + BODY + b"\r\n" + end
    return eol.join([start, *fields, b"", b""]) + body


CONNECTIONS = st.lists(
    st.tuples(st.lists(messages(), min_size=1, max_size=3).map(b"".join), CUTS),
    min_size=1,
    max_size=AT_ONCE,
)


def mangled(content: bytes, cut: Cut) -> bytes:
    at = min(cut.at, len(content))
    match cut.kind:
        case "put":
            return content[:at] + bytes([cut.byte]) + content[at + 1 :]
        case "insert":
            return content[:at] + bytes([cut.byte]) + content[at:]
        case "drop":
            return content[:at] + content[at + 1 :]
        case "stop":
            return content[:at]
        case _:
            return content


def torn(content: bytes, edges: Sequence[int]) -> list[bytes]:
    at = sorted({0, len(content), *(one for one in edges if one < len(content))})
    return [content[a:b] for a, b in itertools.pairwise(at)]


def valid(content: bytes) -> int:
    """Return how many requests another reader takes for whole ones that an engine may see."""
    count = 0
    while content:
        reader = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        reader.receive_data(content)
        body, asked = b"", None
        while True:
            try:
                event = reader.next_event()
            except h11.RemoteProtocolError:
                return count
            if isinstance(event, h11.Request):
                asked = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                break
            else:
                return count
        assert asked is not None
        count += (
            asked.method == b"POST"
            and unquote_to_bytes(asked.target.removeprefix(b"http://h").partition(b"?")[0])
            in ROUTES
            and body == BODY
        )
        content = bytes(reader.trailing_data[0])
    return count


async def talk(front: Front, connections: list[tuple[bytes, Cut]]) -> None:
    """Send all of it at once over as many connections; each must be answered or closed."""
    before = len(front.engine.asked)
    sent = [mangled(content, cut) for content, cut in connections]
    heard = await asyncio.gather(
        *(
            front.exchange(torn(content, cut.edges), ends=cut.ends)
            for content, (_, cut) in zip(sent, connections, strict=True)
        )
    )
    await front.settled()
    for content, answers in zip(sent, heard, strict=True):
        statuses = {int(one) for one in STATUS.findall(answers)}
        assert bool(statuses) == bool(answers)
        assert statuses <= ALLOWED, (content[:600], answers[:300])
    asked = front.engine.asked[before:]
    assert len(asked) <= sum(map(valid, sent)), (sent, asked)
    for path, body in asked:
        assert path.encode() in ROUTES
        assert body["messages"] == [{"role": "user", "content": "hi"}]


def test_requests_of_any_bytes() -> None:
    with fronted(patience_s=PATIENCE_S) as front:
        front.engine.says = whole(b"{}")
        tried = explore(CONNECTIONS, lambda one: front.run(talk(front, one)))
        assert tried >= LEAST
        assert front.engine.asked, "some must be valid"
