"""The gateway benchmark's own sums, texts and protocols; nothing here is timed."""

import asyncio
import json
import math
import os
from pathlib import Path
from typing import cast

import msgspec
import pytest

from benchmarks.gateway import found, jobs, proc, stacks, table, turned, wire
from benchmarks.gateway.engine import Answering, Stats, Wheel
from benchmarks.gateway.load import Caller, Callers, Job, Mode, Sample
from benchmarks.gateway.processes import Running
from benchmarks.gateway.stacks import LITELLM, NGINX, OURS, ROUTER, STACKS, AbsentError, Stack
from benchmarks.gateway.table import Row
from headrace.model.profile import Profile
from headrace.policy.catalog import PlaneConfig

PLACE = stacks.Place(folder=Path("bench"), port=2, engine_port=3)
JOB = Job(mode=Mode.CHUNKS, port=2, root=1, engine_port=3, connections=1)
STREAM = wire.stream_head() + wire.chunk() * (wire.CHUNKS - 1) + wire.stream_end()


class Transport:
    """Keeps what is written; has no socket."""

    def __init__(self) -> None:
        self.written, self.aborted = b"", False

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True


def requests(run: int, stack: str, us: float) -> Row:
    sample = Sample(wall_s=2, requests=1_000, cpu_s=us / 1_000)
    return Row(run=run, stack=stack, mode=Mode.REQUESTS, connections=64, sample=sample)


def chunks(run: int, stack: str, us: float, rate: float = 1_000) -> Row:
    sample = Sample(wall_s=2, chunks=int(2 * rate), cpu_s=us * 2 * rate / 1e6)
    return Row(run=run, stack=stack, mode=Mode.CHUNKS, connections=20, sample=sample, offered=1_000)


def memory(run: int, stack: str, mb: float, errors: int = 0) -> Row:
    sample = Sample(requests=500, memory_bytes=int(mb * 500_000), errors=errors)
    return Row(run=run, stack=stack, mode=Mode.MEMORY, connections=500, sample=sample)


# Figures, ratios, claims.


def test_figures_are_microseconds_and_megabytes_per_thousand_streams() -> None:
    assert requests(0, OURS, 90).figure == pytest.approx(90)
    assert chunks(0, OURS, 30).figure == pytest.approx(30)
    assert memory(0, OURS, 17).figure == pytest.approx(17)


def test_ratio_is_taken_within_a_run() -> None:
    rows = [requests(0, NGINX, 20), requests(0, OURS, 60), requests(1, NGINX, 40)]
    rows += [requests(1, OURS, 80), requests(2, OURS, 500), chunks(0, OURS, 1)]
    assert table.ratios(rows, Mode.REQUESTS, OURS, NGINX) == pytest.approx([3, 2])


def test_row_that_fell_behind_is_in_no_ratio() -> None:
    rows = [chunks(0, NGINX, 10), chunks(0, OURS, 20, rate=899)]
    rows += [chunks(1, NGINX, 10), chunks(1, OURS, 30, rate=901)]
    assert [row.valid for row in rows] == [True, False, True, True]
    assert table.ratios(rows, Mode.CHUNKS, OURS, NGINX) == pytest.approx([3])


def test_spread_is_median_and_range() -> None:
    assert table.spread([3, 1, 2, 9, 4]) == (3, 1, 9)
    assert table.spread([]) is None


def test_claims_compare_with_whoever_was_measured() -> None:
    rows = [memory(0, OURS, 17), requests(0, OURS, 100), requests(0, NGINX, 20)]
    made = {claim.claim: claim for claim in table.claims(rows, quick=False)}
    assert list(made) == [
        "CPU per request over nginx",
        "MB per 1000 streams",
        "errors and reconnects",
    ]
    assert all(claim.holds for claim in made.values())
    rows.append(requests(0, LITELLM, 7_000))
    over = table.claims(rows, quick=False)[1]
    assert (over.claim, over.holds) == ("CPU per request over litellm", False)


def test_ours_without_a_valid_row_fails_and_a_peer_without_one_does_not() -> None:
    behind = chunks(0, OURS, 20, rate=500)
    made = table.claims(
        [behind, chunks(0, NGINX, 10), chunks(0, ROUTER, 10, rate=500)], quick=False
    )
    assert [claim.claim for claim in made if not claim.holds] == [
        "CPU per chunk over nginx",
        "MB per 1000 streams",
    ]
    assert math.isnan(made[0].value)


def test_slack_widens_each_limit_but_that_of_errors() -> None:
    rows = [memory(0, OURS, 30, errors=1)]
    assert [claim.bound for claim in table.claims(rows, quick=True)] == ["<= 37.5", "<= 0"]
    assert [claim.holds for claim in table.claims(rows, quick=True)] == [True, False]


@pytest.mark.parametrize(
    ("cpu_s", "load_cpu_s", "named"),
    [(1.0, 1.0, "none"), (1.95, 1.0, "gateway"), (1.0, 1.9, "load"), (2, 2, "gateway+load")],
)
def test_saturated_names_who_used_up_a_core(cpu_s: float, load_cpu_s: float, named: str) -> None:
    sample = Sample(wall_s=2, requests=1, cpu_s=cpu_s, load_cpu_s=load_cpu_s)
    row = Row(run=0, stack=OURS, mode=Mode.REQUESTS, connections=1, sample=sample)
    assert row.saturated == named


def test_table_marks_what_fell_behind_and_names_who_is_absent() -> None:
    rows = [requests(0, NGINX, 20), chunks(0, NGINX, 10, rate=500)]
    head, row, absent = table.lines(rows, {LITELLM: "not to be had"})
    assert head.startswith("stack")
    assert row.split()[:5] == ["nginx", "20.0", "1.00", "[1.00-1.00]", "10.0*"]
    assert absent.split() == ["litellm", "absent:", "not", "to", "be", "had"]


def test_table_says_when_other_work_took_the_core() -> None:
    def kept(waited_s: float) -> list[str]:
        sample = Sample(wall_s=2, requests=9, cpu_s=1, waited_s=waited_s)
        row = Row(run=0, stack=NGINX, mode=Mode.REQUESTS, connections=1, sample=sample)
        return list(table.lines([row], {}))

    assert "50%" in kept(1.0)[1]
    assert kept(1.0)[2:] == ["other work took much of the gateways' core: the ratios are rough"]
    assert kept(0.2)[2:] == []


# /proc.


def test_stat_is_read_behind_a_name_with_spaces_and_parentheses() -> None:
    rest = "S 7 9 9 0 -1 4194560 100 0 0 0 123 45 6 7 20 0 1 0 100 0 0"
    assert proc.parse_stat(f"42 (a) (b c)) {rest}") == proc.Stat(parent=7, ticks=168)


def test_waiting_is_the_second_field_of_schedstat() -> None:
    assert proc.parse_waited("5000 7000 12\n") == 7_000
    assert proc.waited_seconds(os.getpid()) >= 0


def test_memory_is_the_proportional_share() -> None:
    assert proc.parse_pss("00-ff ---p 0 0 0 [rollup]\nRss:  9 kB\nPss:     5 kB\n") == 5 * 1024
    with pytest.raises(ValueError, match="no Pss"):
        proc.parse_pss("Rss: 9 kB\n")


def test_family_is_a_process_and_all_below_it() -> None:
    parents = {1: 0, 5: 1, 6: 5, 7: 6, 8: 1, 9: 5}
    table = {pid: proc.Stat(parent=parent, ticks=0) for pid, parent in parents.items()}
    assert sorted(proc.family(table, 5)) == [5, 6, 7, 9]
    assert proc.family(table, 77) == []


def test_this_process_has_used_something() -> None:
    assert proc.memory_bytes(os.getpid()) > 1_000_000
    assert proc.cpu_seconds(os.getpid()) > 0


# Configurations.


def test_nginx_streams_without_buffers_over_kept_connections() -> None:
    conf = stacks.nginx_conf(PLACE, root=False)
    assert conf.count("{") == conf.count("}")
    for line in (
        "daemon off;",
        "listen 127.0.0.1:2 backlog=4096;",
        "server 127.0.0.1:3;",
        "keepalive 4096;",
        "proxy_buffering off;",
        'proxy_set_header Connection "";',
        "pid bench/nginx.pid;",
    ):
        assert line in conf
    assert "user root;" not in conf
    assert "user root;" in stacks.nginx_conf(PLACE, root=True)


def test_our_deployment_is_one_the_plane_takes_and_never_full() -> None:
    config = stacks.config(PLACE, "sha256:" + "0" * 64)
    deployment = cast("dict[str, object]", config["deployment"])
    (pool,) = cast("list[dict[str, object]]", deployment["pools"])
    profile = msgspec.convert(stacks.profile(), Profile)
    assert profile.max_running >= 100_000
    plane = msgspec.convert(
        deployment | {"pools": [pool | {"profile": stacks.profile()}]}, PlaneConfig
    )
    assert plane.classes[0].ttft_ms is None
    assert config["upstreams"] == [
        {"url": "http://127.0.0.1:3", "pool": "bench", "kind": "openai", "connections": 8_192}
    ]


def test_our_command_names_configuration_and_port() -> None:
    assert stacks.serve_command(Path("c.json"), 8)[-5:] == [
        "serve",
        "--config",
        "c.json",
        "--port",
        "8",
    ]


def test_litellm_knows_one_model_at_the_engine() -> None:
    (model,) = cast("list[dict[str, object]]", stacks.litellm_conf(PLACE)["model_list"])
    assert model["model_name"] == wire.MODEL
    assert cast("dict[str, str]", model["litellm_params"])["api_base"] == "http://127.0.0.1:3/v1"


def test_absent_peer_is_reported_and_left_out() -> None:
    def missing() -> str:
        raise AbsentError("not to be had")

    lost = Stack(name="lost", prepare=missing, launch=stacks.nginx)
    ours = Stack(name=OURS, prepare=lambda: "1", launch=stacks.headrace)
    assert found([lost, ours]) == ([ours], {OURS: "1"}, {"lost": "not to be had"})


def test_order_turns_from_run_to_run() -> None:
    assert [one.name for one in turned(STACKS, 1)] == [one.name for one in (*STACKS[1:], STACKS[0])]
    assert turned(STACKS, len(STACKS)) == list(STACKS)


def test_memory_is_measured_before_the_gateway_has_grown() -> None:
    running = Running(port=2, root=1, key="k")
    made = list(jobs(STACKS[0], running, 3, quick=True))
    assert [job.mode for job in made] == [Mode.MEMORY, Mode.REQUESTS, Mode.CHUNKS]
    assert [job.connections for job in made] == [1_000, 64, 256]


# What goes over the wire.


@pytest.mark.parametrize("stream", [False, True])
def test_request_has_a_body_of_600_bytes(stream: bool) -> None:
    head, _, body = wire.request(stream=stream, key="k", pace_ms=250).partition(b"\r\n\r\n")
    assert len(body) == wire.BODY_BYTES == 600
    assert b"Content-Length: 600" in head
    assert b"Authorization: Bearer k\r\n" in head
    spaced = json.dumps(json.loads(body)).encode()  # as a gateway may write it anew
    for one in (body, spaced):
        assert (wire.wants_stream(one), wire.pace_ms(one)) == (stream, 250)


def test_request_without_a_key_shows_none_and_other_prompts_keep_the_pace() -> None:
    assert b"Authorization" not in wire.request(stream=True, key=None)
    assert wire.pace_ms(b'{"content":"hello"}') == wire.PACE_MS


def test_answer_and_stream_are_what_an_engine_sends() -> None:
    body = wire.answer().partition(b"\r\n\r\n")[2]
    assert 580 <= len(body) <= 620
    assert json.loads(body)["usage"]["total_tokens"]
    framed = wire.chunk()
    assert framed.startswith(b"d0\r\ndata: ")
    assert len(framed) == len(b"d0\r\n\r\n") + wire.CHUNK_BYTES
    assert STREAM.count(b"\n\n") == wire.CHUNKS + wire.EXTRA_FRAMES
    assert STREAM.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("step", [1, 2, 5, 7, 64, 211, 10_000])
def test_caller_counts_the_same_frames_however_a_stream_is_cut(step: int) -> None:
    callers, caller, transport = dialled()
    caller.send()
    for at in range(0, len(STREAM), step):
        caller.data_received(STREAM[at : at + step])
    assert callers.tally.frames == wire.CHUNKS + wire.EXTRA_FRAMES
    assert (callers.tally.done, callers.tally.begun, callers.tally.errors) == (1, 1, 0)
    assert transport.written == b"request" * 2  # the next has been sent


@pytest.mark.parametrize("step", [1, 50, 10_000])
def test_caller_takes_an_answer_of_known_length(step: int) -> None:
    callers, caller, transport = dialled()
    caller.send()
    whole = wire.answer()
    for at in range(0, len(whole), step):
        caller.data_received(whole[at : at + step])
    assert (callers.tally.done, callers.tally.errors) == (1, 0)
    assert transport.written == b"request" * 2


def test_lost_frame_is_an_error() -> None:
    callers, caller, _ = dialled()
    caller.send()
    caller.data_received(wire.stream_head() + wire.stream_end())
    assert callers.tally.errors == 1
    assert callers.tally.said == "3 frames instead of 66"


def test_refusal_is_told_and_its_connection_not_used_again() -> None:
    callers, caller, transport = dialled()
    caller.send()
    caller.data_received(wire.plain(b"{}", "503 Service Unavailable"))
    assert transport.aborted
    assert callers.tally.said.startswith("HTTP/1.1 503")
    assert callers.tally.done == 0


@pytest.mark.asyncio
async def test_loss_is_an_error_within_an_answer_and_a_reconnect_between_two() -> None:
    callers, caller, _ = dialled()
    caller.send()
    callers.redial = lambda: None  # type: ignore[method-assign]
    caller.connection_lost(None)
    assert (callers.tally.errors, callers.tally.reconnects) == (1, 0)
    _, idle, _ = dialled(callers)
    idle.connection_lost(None)
    assert (callers.tally.errors, callers.tally.reconnects) == (1, 1)
    callers.stopping = True
    idle.connection_lost(None)
    assert callers.tally.reconnects == 1


@pytest.mark.parametrize("step", [1, 100, 10_000])
def test_engine_answers_each_request_once_it_is_whole(step: int) -> None:
    stats, transport = Stats(), Transport()
    engine = Answering(cast("Wheel", None), stats)
    engine.connection_made(cast("asyncio.BaseTransport", transport))
    asked = wire.request(stream=False, key=None) + b"GET /v1/models HTTP/1.1\r\n\r\n"
    asked += b"POST /tokenize HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"
    for at in range(0, len(asked), step):
        engine.data_received(asked[at : at + step])
    assert transport.written == wire.answer() + Answering.models + Answering.unknown
    assert (stats.accepted, stats.requests) == (1, 1)


def dialled(callers: Callers | None = None) -> tuple[Callers, Caller, Transport]:
    """Return a caller on a connection that leads nowhere."""
    callers = callers or Callers(JOB, b"request")
    caller, transport = Caller(callers), Transport()
    caller.connection_made(cast("asyncio.BaseTransport", transport))
    return callers, caller, transport
