"""Real processes hand over to each other: nobody is refused, streams finish, the record goes on."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from headrace.adapters.journal.ring import segment_paths, segments
from headrace.cli import main
from headrace.gateway.auth import key_hash
from headrace.model.event import ConfigChanged, ReplicaUp, RequestArrived, Restarted
from headrace.plane.journal import Record, Verified, frames, verify
from headrace.plane.past import thaw
from headrace.report.decisions import Verified as DecisionsVerified
from headrace.report.decisions import verify_decisions

pytestmark = pytest.mark.service

KEY = "sk-hr-of-the-test"
SERVE = """
import sys
from pathlib import Path
from headrace.cli import main
sys.exit(main(["serve", "--config", sys.argv[1]]))
"""
FILELESS = """
import sys
from headrace.cli import main
sys.exit(main(["serve", "--port", "0"]))
"""


def written(folder: Path, **more: Any) -> Path:
    """Write a configuration with a journal; a tenant with two requests a minute beside a free one."""
    config = {
        "deployment": {
            "models": [{"name": "m"}],
            "pools": [{"name": "p", "model": "m", "profile": "h100-8b-tp1", "replicas": 1}],
            "tenants": [{"name": "free"}, {"name": "slow", "rpm_limit": 2}],
        },
        "keys": [
            {"name": who, "tenant": who, "hash": key_hash(KEY + who)} for who in ("free", "slow")
        ],
        "server": {"port": 0, "trusted_replay": True},
        "admin": {"port": 0, "open": True},
        "journal": {"path": str(folder / "journal")},
        "decision_log": str(folder / "decisions.jsonl"),
        **more,
    }
    path = folder / "headrace.json"
    path.write_text(json.dumps(config))
    return path


class Served:
    """A gateway's processes, one after the other, as their callers see them."""

    def __init__(self, process: "subprocess.Popen[str]", greeting: list[str]) -> None:
        self.process, self.greeting = process, greeting
        self.ports = [
            int(found.group(1))
            for line in greeting
            if (found := re.search(r":(\d+)(?=/v1 |;)", line))
        ]
        self.pids = [process.pid]
        self.said = ""

    def hand_over(self) -> int:
        """Have the present process start its successor; return that one's id once it serves."""
        os.kill(self.pids[-1], signal.SIGUSR2)
        assert self.process.stdout is not None
        for line in iter(self.process.stdout.readline, ""):
            self.said += line
            if found := re.fullmatch(r"headrace: process (\d+) serves on\n", line):
                self.pids.append(int(found.group(1)))
                return self.pids[-1]
        raise AssertionError(self.said)

    def dial(self, nth: int = 0) -> "closing[HTTPConnection]":
        return closing(HTTPConnection("127.0.0.1", self.ports[nth], timeout=30))

    def ask(self, who: str = "free") -> int:
        """Ask over a connection of its own; return the status."""
        with self.dial() as wire:
            answer = asked(wire, who)
            answer.read()
            return answer.status

    def post(self, path: str, body: dict[str, Any]) -> Any:
        with self.dial(1) as wire:
            wire.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            return json.loads(wire.getresponse().read())

    def told(self, path: str) -> str:
        with self.dial(1) as wire:
            wire.request("GET", path)
            return wire.getresponse().read().decode()


def asked(wire: HTTPConnection, who: str = "free", *, output: int = 1, **more: Any) -> HTTPResponse:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": output}
    wire.request(
        "POST",
        "/v1/chat/completions",
        json.dumps(body | more),
        {"authorization": f"Bearer {KEY}{who}", "x-headrace-replay-output": str(output)},
    )
    return wire.getresponse()


def ended(pid: int, wait_s: float = 30.0) -> bool:
    """Say whether a process, no child of ours either, ends in time."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], wait_s)[0])
    finally:
        os.close(process)


@contextmanager
def served(program: str, *told: str, lines: int = 2) -> Iterator[Served]:
    with subprocess.Popen(
        [sys.executable, "-c", program, *told],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        gateway = Served(process, [process.stdout.readline() for _ in range(lines)])
        try:
            yield gateway
        finally:
            for pid in gateway.pids:
                if not ended(pid, 0):
                    os.kill(pid, signal.SIGKILL)


def stop(gateway: Served) -> tuple[str, str]:
    """Stop the last process; return what all of them said."""
    os.kill(gateway.pids[-1], signal.SIGTERM)
    out, err = gateway.process.communicate(timeout=60)
    return gateway.said + out, err


class Caller(threading.Thread):
    """Asks without pause, each time over a new connection or always over the one it has."""

    def __init__(self, gateway: Served, *, keep: bool) -> None:
        super().__init__()
        self.gateway, self.keep = gateway, keep
        self.answers: list[int] = []
        self.failed: list[Exception] = []
        self.going = True
        self._told = threading.Condition()

    def go_on(self, more: int) -> None:
        """Wait for so many more answers, or a failure."""
        wanted = len(self.answers) + more
        with self._told:
            done = lambda: len(self.answers) >= wanted or bool(self.failed)  # noqa: E731
            assert self._told.wait_for(done, 30)

    def run(self) -> None:
        wire = HTTPConnection("127.0.0.1", self.gateway.ports[0], timeout=30)
        while self.going:
            try:
                answer = asked(wire)
                answer.read()
                self.answers.append(answer.status)
                if not self.keep:
                    wire.close()
            except Exception as error:  # noqa: BLE001 - whatever a caller would see
                self.failed.append(error)
                wire.close()
            with self._told:
                self._told.notify()
        wire.close()


def test_nobody_is_refused_while_processes_hand_over(tmp_path: Path) -> None:
    with served(SERVE, str(written(tmp_path))) as gateway, gateway.dial() as wire:
        stream = asked(wire, stream=True, output=600)
        assert stream.status == 200
        assert stream.readline().startswith(b"data: ")
        callers = [Caller(gateway, keep=keep) for keep in (True, False, False)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.go_on(6)
        for _ in range(2):
            gateway.hand_over()
            for caller in callers:
                caller.go_on(6)
        rest = stream.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        for caller in callers:
            caller.going = False
        for caller in callers:
            caller.join()
            assert caller.failed == []
            assert set(caller.answers) == {200}
        assert all(ended(pid) for pid in gateway.pids[1:-1])
        out, err = stop(gateway)
        assert err == ""
        assert sorted(out.splitlines()) == sorted(
            [
                *(f"headrace: process {pid} serves on" for pid in gateway.pids[1:]),
                *(f"headrace: stopped; process {pid} serves on" for pid in gateway.pids[1:]),
                "headrace: stopped",
            ]
        )
    _assert_one_record(tmp_path, lives=3)


def _assert_one_record(folder: Path, *, lives: int) -> None:
    """Assert that the lives of a journal follow from each other, and that no id came twice."""
    assert main(["verify", str(folder / "journal")]) == 0
    assert isinstance(verify_decisions(folder / "decisions.jsonl"), DecisionsVerified)
    events = [
        frame.event
        for content in segments(folder / "journal")
        for frame in frames(content)
        if isinstance(frame, Record)
    ]
    epochs = [event.epoch for event in events if isinstance(event, Restarted)]
    assert epochs == list(range(1, lives))
    requests = [event.request.id for event in events if isinstance(event, RequestArrived)]
    assert len(requests) == len(set(requests))
    lived = [event.incarnation for event in events if isinstance(event, ReplicaUp)]
    assert lived == sorted(set(lived))
    assert len([event for event in events if isinstance(event, ConfigChanged)]) == 1


def test_what_was_spent_stays_spent(tmp_path: Path) -> None:
    config = str(written(tmp_path))
    with served(SERVE, config) as gateway:
        assert [gateway.ask("slow") for _ in range(3)] == [200, 200, 429]
        gateway.hand_over()
        assert gateway.ask("slow") == 429
        os.kill(gateway.pids[-1], signal.SIGKILL)
        assert ended(gateway.pids[-1])
    with served(SERVE, config) as gateway:
        assert gateway.ask("slow") == 429
        said = gateway.told("/metrics")
        assert re.search(
            r'^headrace_admitted_requests_total{class="\w+",tenant="slow"} 2.0$', said, re.MULTILINE
        )
        assert "headrace_journal_unread_segments_total 0.0" in said
        assert stop(gateway) == ("headrace: stopped\n", "")
    _assert_one_record(tmp_path, lives=3)
    last = thaw(segment_paths(tmp_path / "journal")[-1].read_bytes())
    assert last.records == 0  # it ended with a checkpoint


def test_a_policy_that_was_changed_survives_hand_over_and_crash_and_yields_to_the_file(
    tmp_path: Path,
) -> None:
    def margin(gateway: Served) -> tuple[float, int]:
        told = json.loads(gateway.told("/policy"))
        return told["policy"]["admission"]["margin_ms"], told["revision"]

    path = written(tmp_path)
    with served(SERVE, str(path)) as gateway:
        before, _ = margin(gateway)
        assert gateway.post("/policy", {"admission": {"margin_ms": 81}})["revision"] == 2
        gateway.hand_over()
        assert margin(gateway) == (81, 2)
        (start,) = json.loads(gateway.told("/policy"))["revisions"]
        assert start["changes"] == {"deployment.admission.margin_ms": [before, 81]}
        os.kill(gateway.pids[-1], signal.SIGKILL)
        assert ended(gateway.pids[-1])
    with served(SERVE, str(path)) as gateway:
        assert margin(gateway) == (81, 2)
        path.write_text(path.read_text().replace('"rpm_limit": 2', '"rpm_limit": 3'))
        gateway.hand_over()
        assert margin(gateway) == (before, 3)
        stop(gateway)
    assert main(["verify", str(tmp_path / "journal")]) == 0
    assert isinstance(verify_decisions(tmp_path / "decisions.jsonl"), DecisionsVerified)


def test_keys_and_a_freeze_are_the_successors_once_it_serves(tmp_path: Path) -> None:
    """A caller that keeps its connection to the old process cannot undo what is done in the new."""
    content = {"content-type": "application/json"}
    kept = tmp_path / "journal" / "keys.json"
    with served(SERVE, str(written(tmp_path))) as gateway, gateway.dial() as wire:
        with gateway.dial(1) as used, gateway.dial(1) as fresh:
            used.request("POST", "/key/generate", '{"key_alias":"lost"}', content)
            assert used.getresponse().read()
            fresh.connect()
            stream = asked(wire, stream=True, output=200)  # keeps the old process alive
            gateway.post("/freeze", {})
            gateway.hand_over()
            assert json.loads(gateway.told("/policy"))["frozen"] is True
            gateway.post("/key/delete", {"keys": ["lost"]})
            gateway.post("/freeze", {"frozen": False})
            gateway.post("/key/generate", {"key_alias": "new"})
            for old in (used, fresh):
                with suppress(ConnectionError):  # closed already
                    old.request("POST", "/key/generate", "{}", content)
                    assert old.getresponse().status == 503
            assert stream.read().endswith(b"data: [DONE]\n\n")
        names = [one["key"]["name"] for one in json.loads(kept.read_text())["grants"]]
        assert names == ["new"]
        stop(gateway)


def test_a_second_process_on_a_journal_is_refused(tmp_path: Path) -> None:
    config = str(written(tmp_path))
    with served(SERVE, config) as gateway:
        second = subprocess.run(
            [sys.executable, "-c", SERVE, config], capture_output=True, text=True, check=False
        )
        assert second.returncode == 2
        folder = tmp_path / "journal"
        assert second.stderr == f"headrace: {folder}: another process keeps its journal here\n"
        assert gateway.ask() == 200
        stop(gateway)
    assert isinstance(verify(segments(folder)), Verified)


def test_a_successor_that_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    path = written(tmp_path)
    good = path.read_text()
    with served(SERVE, str(path)) as gateway:
        assert gateway.ask() == 200
        # It fails before it is prepared, and again once the journal is its own.
        for wrong in (good.replace('"m"', '"n"', 1), good.replace("decisions.jsonl", "no/log")):
            path.write_text(wrong)
            os.kill(gateway.pids[0], signal.SIGUSR2)
            assert gateway.process.stderr is not None
            lines = iter(gateway.process.stderr.readline, "")
            assert any(
                re.fullmatch(r"hand-over to process \d+ failed: .*\n", line) for line in lines
            )
            assert gateway.ask() == 200
            assert gateway.told("/state")
        path.write_text(good)
        gateway.hand_over()
        assert gateway.ask() == 200
        assert ended(gateway.pids[0])
        out, _ = stop(gateway)
        assert "headrace: stopped" in out.splitlines(), "whichever of the two says so last"
    assert isinstance(verify(segments(tmp_path / "journal")), Verified)


def test_the_key_of_a_fleet_without_a_file_goes_on_and_is_told_once() -> None:
    with served(FILELESS, lines=3) as gateway:
        found = re.search(r"sk-hr-\S+(?=,)", gateway.greeting[1])
        assert found
        key = found.group()
        gateway.hand_over()
        with gateway.dial() as wire:
            wire.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})
            assert wire.getresponse().status == 200
        assert ended(gateway.pids[0])
        out, err = stop(gateway)
        assert key not in out + err


def test_systemd_is_told_which_process_serves(tmp_path: Path) -> None:
    place = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(place))
        sock.settimeout(30)
        os.environ["NOTIFY_SOCKET"] = str(place)
        try:
            with served(FILELESS, lines=3) as gateway:
                assert sock.recv(99) == b"READY=1"
                pid = gateway.hand_over()
                assert {sock.recv(99), sock.recv(99)} == {b"READY=1", b"MAINPID=%d" % pid}
                stop(gateway)
        finally:
            del os.environ["NOTIFY_SOCKET"]
