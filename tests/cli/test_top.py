"""`headrace top` from the outside: what it prints, once or again and again, and what goes wrong."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest
from msgspec.structs import replace

from headrace.cli import main, top
from headrace.gateway.cost import CostState
from headrace.gateway.feed import Rates
from headrace.gateway.overview import (
    ClassState,
    GroupState,
    QueueState,
    ReplicaState,
    State,
    TenantState,
)

Output = pytest.CaptureFixture[str]
KEY = "sk-hr-admin"

STATE = State(
    at="2026-03-01T09:30:00Z",
    version="9.9",
    uptime_s=61.0,
    revision=7,
    mode="audit",
    ready=False,
    draining=True,
    frozen=True,
    live=3,
    queues=[
        QueueState(
            model="m", slo_class="chat", waiting=2, work_s=1.5, age_s=0.7, earliest_slack_s=-0.2
        ),
        QueueState(
            model="n", slo_class="chat", waiting=1, work_s=0.1, age_s=0.3, earliest_slack_s=None
        ),
    ],
    classes=[
        ClassState(
            slo_class="chat",
            rates=Rates(
                offered=4.2, admitted=3.1, rejected=1.1, met=2.9, output_tokens=1234.0, met_work=0.5
            ),
            recent=10,
            ttft_p50_ms=120.0,
            ttft_p99_ms=1_900.0,
            stall_p99_ms=None,
            e2e_p50_ms=2_000.0,
        )
    ],
    tenants=[
        TenantState(
            tenant=f"tenant-{nth}",
            slo_class="chat",
            offered=100 - nth,
            admitted=80,
            rejected={"token_rate": 10, "deadline_queue": 5},
            left_before=0,
            live=3,
            outcomes={"success": 77},
            ended_early={},
            met=60,
            met_output_tokens=600,
            offered_work_s=10.0,
            met_work_s=6.5,
        )
        for nth in range(top.ROWS + 2)
    ],
    replicas=[
        ReplicaState(
            replica="r-0",
            model="m",
            pool="p",
            pending_prefill_s=0.05,
            decodes=12,
            kv_blocks_reserved=250,
            kv_blocks_total=1_000,
            report_age_s=None,
        )
    ],
)


class Answering(BaseHTTPRequestHandler):
    content = msgspec.json.encode(STATE)

    def do_GET(self) -> None:
        right = self.headers["authorization"] == f"Bearer {KEY}"
        status = 200 if right and self.path == "/state" else 401 if not right else 404
        self.send_response(status)
        self.send_header("content-length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler] = Answering) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_ADMIN_KEY", KEY)


def test_once_as_json_is_the_state(capsys: Output) -> None:
    with answering() as url:
        assert main(["top", "--url", url, "--once", "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=State) == STATE


def test_once_shows_everything_at_a_glance(capsys: Output) -> None:
    with answering() as url:
        assert main(["top", "--url", url + "/", "--once"]) == 0
    out = capsys.readouterr().out
    for words in (
        "headrace 9.9",
        "policy revision 7",
        "gates: audit",
        "NOT READY",
        "DRAINING",
        "FROZEN",
        "1,234",
        "0.7 s",
        "-0.2 s",
        "1,900 ms",
        "tenant-0",
        "75%",
        "60%",
        "6.5 s",
        "and 2 more",
        "50 ms",
        "25%",
    ):
        assert words in out
    assert "tenant-21" not in out


def test_it_looks_again_until_it_is_interrupted(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("headrace.cli.top.time.sleep", wait)
    with answering() as url:
        assert main(["top", "--url", url, "--json", "--every", "0.5"]) == 130
        assert len(capsys.readouterr().out.splitlines()) == 3
        waits.clear()
        assert main(["top", "--url", url]) == 130
    assert waits == [1.0] * 3


def test_a_wrong_key_is_told_and_not_repeated(capsys: Output) -> None:
    with answering() as url:
        assert main(["top", "--url", url, "--once", "--key", "sk-planted"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "wants an admin key" in err
    assert "sk-planted" not in err


@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        "ftp://127.0.0.1",
        "127.0.0.1:9090",
        "http://[",
        "http://h:x",
        "http://h:99999",
        "",
    ],
)
def test_what_is_no_address_is_told(capsys: Output, url: str) -> None:
    assert main(["top", "--url", url, "--once"]) == 2
    told = f"headrace: flag --url: {url} is no address such as http://127.0.0.1:9090\n"
    assert capsys.readouterr().err == told


def test_where_nobody_listens_it_ends_with_one_line(capsys: Output) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    assert main(["top", "--url", url, "--once"]) == 2
    assert capsys.readouterr().err == f"headrace: {url}: connection refused\n"


def test_a_replica_that_is_not_ready_is_shown_with_its_reason(capsys: Output) -> None:
    class Troubled(Answering):
        content = msgspec.json.encode(replace(STATE, troubles={"r-1": "it refuses our key"}))

    with answering(Troubled) as url:
        assert main(["top", "--url", url, "--once"]) == 0
    assert "r-1 is not ready: it refuses our key" in capsys.readouterr().out


def test_a_group_that_does_not_serve_is_shown_with_its_stage(capsys: Output) -> None:
    def group(name: str, stage: str, why: str = "") -> GroupState:
        return GroupState(
            group=name, pool="p", life=1, stage=stage, for_s=7.4, seconds={"placed": 0.1}, why=why
        )

    class Grouped(Answering):
        groups = [group("g-0", "ready"), group("g-1", "loaded"), group("g-2", "lost", "rank 0")]  # noqa: RUF012
        cost = CostState(
            gpu_hours=2.5,
            met=4_500,
            gpu_s_per_met=2.0,
            usd=6.25,
            usd_per_thousand_met=1.389,
            pools=[],
        )
        content = msgspec.json.encode(replace(STATE, groups=groups, cost=cost))

    with answering(Grouped) as url:
        assert main(["top", "--url", url, "--once"]) == 0
    out = capsys.readouterr().out
    assert "group g-1 is loaded for 7 s\n" in out
    assert "group g-2 is lost for 7 s: rank 0\n" in out
    assert "g-0" not in out
    told = "2.5 GPU-hours, $6.25, 2 GPU-s per request that met, $1.39 per 1,000"
    assert f"since the start: {told}\n" in out


def test_another_listener_is_told_apart(capsys: Output) -> None:
    class Other(Answering):
        content = json.dumps({"status": "ok"}).encode()

    class Elsewhere(Answering):
        def do_GET(self) -> None:
            self.send_response(http.client.NOT_FOUND)
            self.end_headers()

    with answering(Other) as url:
        assert main(["top", "--url", url, "--once"]) == 1
    assert "not a state" in capsys.readouterr().err
    with answering(Elsewhere) as url:
        assert main(["top", "--url", url, "--once"]) == 1
    assert "answered 404" in capsys.readouterr().err
