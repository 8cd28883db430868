"""Letting go of listeners and record, taking them back, and leaving for good."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.adapters.journal.held import HeldJournal
from headrace.adapters.journal.ring import segments
from headrace.config.schema import AdminSpec, JournalSpec, ServerSpec, Settings
from headrace.gateway.clock import MonotonicClock
from headrace.gateway.connection import Connection
from headrace.gateway.decisions import DecisionLog
from headrace.gateway.grants import FILE
from headrace.gateway.handover import VARIABLE, Heir, Inheritance, Succession, notify
from headrace.gateway.server import Gateway, listen
from headrace.plane.journal import Verified, verify
from tests.gateway.scenes import deployment, keys
from tests.gateway.test_connection import HEALTH, Dial, Wire, served, until

GIVEN = Settings(deployment=deployment(), keys=keys(), server=ServerSpec(port=0, drain_s=5))


def test_a_connection_may_ask_once_more_after_another_process_has_the_listener() -> None:
    async def talk(gateway: Gateway, dial: Dial) -> None:
        fresh, used, silent = await dial(), await dial(), await dial()
        for wire in (used, silent):
            await wire.send(HEALTH)
            assert (await wire.answer())[0] == 200
        gateway.step_back()
        gateway.bow_out()
        connections = gateway.server.server_state.connections
        await until(
            lambda: all(one.is_retired for one in connections if isinstance(one, Connection))
        )
        for wire in (fresh, used):
            await wire.send(HEALTH)
            status, fields, _ = await wire.answer()
            assert (status, fields["connection"]) == (200, "close")
            assert await wire.rest() == b""
        assert await silent.rest() == b""
        with pytest.raises(OSError, match="refused"):
            await dial()

    served(talk)


def test_who_takes_back_the_listener_finds_everybody_still_there() -> None:
    async def talk(gateway: Gateway, dial: Dial) -> None:
        kept = await dial()
        for _ in range(2):
            gateway.step_back()
            early = await dial()  # the kernel has it
            await early.send(HEALTH)
            await gateway.come_back()
            assert (await early.answer())[0] == 200
        await gateway.come_back()  # nothing to take back
        await kept.send(HEALTH)
        assert (await kept.answer())[0] == 200

    served(talk)


def test_the_record_is_let_go_of_and_taken_up_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = replace(GIVEN, journal=JournalSpec(path=str(tmp_path)))

    async def run() -> None:
        gateway = Gateway(given, MonotonicClock(asyncio.get_running_loop()))
        started = asyncio.Event()
        with listen("127.0.0.1", 0) as sock:
            running = asyncio.create_task(gateway.serve(sock, accepting=started.set))
            await started.wait()
            gateway.step_back()
            other = HeldJournal(tmp_path)
            other.close()
            await gateway.come_back()
            with pytest.raises(OSError, match="another process"):
                HeldJournal(tmp_path)
            gateway.step_back()
            other.reopen()
            await gateway.come_back()
            assert "the journal ends here" in caplog.text
            gateway.stop()
            assert await running
            other.close()

    asyncio.run(run())
    assert isinstance(verify(segments(tmp_path)), Verified)


ADMIN = replace(GIVEN, admin=AdminSpec(open=True, port=0))
CHANGES = (
    *("/key/generate", "/key/update", "/key/delete"),
    *("/policy", "/reload", "/freeze", "/drain"),
)


def order(path: str, body: bytes = b"{}") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _asked(connection: object) -> bool:
    return isinstance(connection, HttpToolsProtocol) and connection.cycle is not None


def managed(
    talk: Callable[[Gateway, Dial], Awaitable[None]], folder: Path, *, frozen: bool = False
) -> None:
    """Talk to the admin side of a gateway that keeps its record in a folder."""

    async def run() -> None:
        given = replace(ADMIN, journal=JournalSpec(path=str(folder)))
        clock = MonotonicClock(asyncio.get_running_loop())
        gateway = Gateway(given, clock, reread=lambda: given)
        if frozen:
            gateway.freeze()
        started = asyncio.Event()
        wires: list[Wire] = []
        with listen("127.0.0.1", 0) as sock, listen("127.0.0.1", 0) as admin_sock:
            place = admin_sock.getsockname()
            running = asyncio.create_task(gateway.serve(sock, admin_sock, accepting=started.set))
            await started.wait()

            async def dial() -> Wire:
                wires.append(Wire(*await asyncio.open_connection(*place)))
                return wires[-1]

            try:
                await asyncio.wait_for(talk(gateway, dial), 20)
            finally:
                for wire in wires:
                    wire.close()
                gateway.stop()
                assert await running

    asyncio.run(run())


def test_who_handed_over_changes_nothing_any_more(tmp_path: Path) -> None:
    async def talk(gateway: Gateway, dial: Dial) -> None:
        idle, reader = await dial(), await dial()
        writers = {path: await dial() for path in CHANGES}
        begun = await dial()
        await idle.send(order("/key/generate", b'{"key_alias":"before"}'))
        assert (await idle.answer())[0] == 200
        await begun.send(order("/key/generate")[:-1])  # its body is on the way
        admin_server = gateway._admin_server
        assert admin_server is not None
        connections = admin_server.server_state.connections
        await until(lambda: sum(_asked(one) for one in connections) == 2)
        kept, revision = (tmp_path / FILE).read_bytes(), gateway.driver.revision
        gateway.step_back()
        assert await idle.rest() == b"", "who waits for nothing asks elsewhere"
        await begun.send(b"}")
        for path, wire in writers.items():
            await wire.send(order(path))
        for wire in (begun, *writers.values()):
            status, fields, body = await wire.answer()
            assert (status, fields["connection"]) == (503, "close")
            assert body["error"]["code"] == "handed_over"
            assert await wire.rest() == b""
        await reader.send(b"GET /policy HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        status, fields, body = await reader.answer()
        assert (status, fields["connection"], body["frozen"]) == (200, "close", False)
        assert await reader.rest() == b""
        assert ((tmp_path / FILE).read_bytes(), gateway.driver.revision) == (kept, revision)
        assert not gateway.driver.draining
        await gateway.come_back()
        again = await dial()
        for _ in range(2):
            await again.send(order("/key/generate"))
            status, fields, _ = await again.answer()
            assert (status, "connection" in fields) == (200, False)

    managed(talk, tmp_path)


def test_a_freeze_is_handed_over(tmp_path: Path) -> None:
    async def talk(gateway: Gateway, dial: Dial) -> None:
        wire = await dial()
        for body, frozen in ((b'{"frozen":false}', False), (b"{}", True)):
            assert gateway.frozen is not frozen
            await wire.send(order("/freeze", body))
            assert (await wire.answer())[0] == 200
            assert gateway.frozen is frozen

    managed(talk, tmp_path, frozen=True)


def test_a_decision_log_is_left_to_another_process_for_a_while(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = DecisionLog(path)
    size = path.stat().st_size
    log.pause()
    log.configured(1, b"{}")
    assert path.stat().st_size == size
    path.write_bytes(path.read_bytes() + b"other\n")
    log.go_on()
    log.configured(1, b"{}")
    assert b"other\n{" in path.read_bytes()
    assert log.dropped == 0
    log.close()


def test_a_command_that_cannot_be_run_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        gateway = Gateway(GIVEN, MonotonicClock(asyncio.get_running_loop()))
        succession = Succession(gateway, command=["/no/such/program"])
        started = asyncio.Event()

        def accepting() -> None:
            succession.accepting()
            succession.begin()
            started.set()

        succession.begin()  # too early: once it serves
        with listen("127.0.0.1", 0) as sock:
            running = asyncio.create_task(gateway.serve(sock, accepting=accepting))
            await started.wait()
            assert "one is under way" in caplog.text
            assert "No such file" in caplog.text
            gateway.stop()
            succession.begin()
            assert "already ending" in caplog.text
            assert await running
        assert succession.successor is None

    asyncio.run(run())


def test_an_heir_finds_what_it_was_left_once() -> None:
    ours, theirs = socket.socketpair()
    with ours, listen("127.0.0.1", 0) as sock:
        left = Inheritance(
            traffic=os.dup(sock.fileno()), admin=None, control=theirs.detach(), key="sk"
        )
        environ = {VARIABLE: msgspec.json.encode(left).decode(), "other": ""}
        heir = Heir.of(environ)
        assert environ == {"other": ""}
        assert Heir.of(environ) is None
        assert heir is not None
        assert (heir.key, heir.admin_sock) == ("sk", None)
        assert heir.sock.getsockname() == sock.getsockname()
        heir.sock.close()
        for told, frozen in ((b"g", False), (b"f", True)):
            ours.sendall(told)
            assert heir.wait() is frozen
            assert ours.recv(1) == b"p"
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(OSError, match="took them back"):
            heir.wait()
        heir.ready()
        assert ours.recv(9) == b"pr"


def test_nobody_is_notified_where_nobody_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    notify("READY=1")
