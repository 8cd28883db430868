"""`headrace replay` from the outside, against a server on loopback that says what the test says."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from headrace.cli import main
from headrace.cli.replay_setup import Shape, place_of, rows_of, weights
from headrace.config.errors import ConfigError
from headrace.load.caller import Place
from headrace.model.ids import ModelName, TenantId
from headrace.trace.jsonl import write_jsonl
from headrace.trace.row import TraceRow
from headrace.units import NS_PER_MS, InstantNs, Tokens

Output = pytest.CaptureFixture[str]
CHUNK = b'data: {"choices":[{"delta":{"content":"word "}}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
)
ANSWER = CHUNK + CHUNK + USAGE + b"data: [DONE]\n\n"
REFUSAL = (
    b'{"error":{"code":"server_is_overloaded",'
    b'"headrace":{"outcome":"reject","reason":"deadline_queue"}}}'
)


class Server(ThreadingHTTPServer):
    """A server of one model; `asked` has each request's headers and body."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[dict[str, str], dict[str, object]]] = []
        self.refuses: Callable[[int], bool] = lambda _nth: False
        self.on_ask: Callable[[], None] = lambda: None
        self.models = b'{"data":[{"id":"listed"}]}'

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.reply(200, self.server.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked = self.server.asked
        asked.append(({k.lower(): v for k, v in self.headers.items()}, body))
        self.server.on_ask()
        if self.server.refuses(len(asked)):
            self.reply(503, REFUSAL)
        else:
            self.reply(200, ANSWER)

    def reply(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def trace(folder: Path, *at_ms: int, tenant: str | None = None, model: str | None = None) -> str:
    path = folder / "trace.jsonl"
    rows = [
        TraceRow(
            at=InstantNs(at * NS_PER_MS),
            input_tokens=Tokens(20),
            output_tokens=Tokens(2),
            tenant=None if tenant is None else TenantId(tenant),
            model=None if model is None else ModelName(model),
        )
        for at in at_ms
    ]
    write_jsonl(path, rows)
    return str(path)


def test_a_replay_reports_offered_answered_and_every_denominator(
    tmp_path: Path, server: Server, capsys: Output
) -> None:
    server.refuses = lambda nth: nth == 2
    out, log, page = (tmp_path / name for name in ("out.json", "log.jsonl", "page.html"))
    file = trace(tmp_path, 0, 30, 60)
    told = ["--out", str(out), "--requests", str(log), "--html", str(page)]

    code = main(["replay", file, "--url", server.url, "--key", "t=secret", *told])

    shown, progress = capsys.readouterr()
    report = json.loads(out.read_bytes())
    assert code == (0 if report["client"]["loop_lag_p99_ns"] <= 20_000_000 else 3)
    assert report["client"]["answers"] == {"200": 2, "503 server_is_overloaded": 1}
    assert report["client"]["usage_input_tokens"] == 18
    assert report["total"]["offered"] == 3
    assert report["total"]["admitted"] == report["total"]["met"] == 2
    assert report["total"]["rejected_by"] == {"deadline_queue": 1}
    assert report["total"]["cached_tokens"] == 8
    assert "2 x 200, 1 x 503 server_is_overloaded" in shown
    assert "66.7 %" in shown
    assert "3 requests in 0.1 s" in progress
    assert sorted(json.loads(line)["id"] for line in log.read_text().splitlines()) == [1, 2, 3]
    assert page.read_text().startswith("<!doctype html>")
    assert "secret" not in out.read_text() + log.read_text() + shown + progress


def test_requests_are_the_traces_and_lengths_are_told_on_demand_only(
    tmp_path: Path, server: Server
) -> None:
    file = trace(tmp_path, 0)
    main(["replay", file, "--url", f"{server.url}/v1", "--key", "t=secret"])
    main(["replay", file, "--url", server.url, "--trusted", "--class", "batch", "--model", "own"])

    (plain, body), (trusted, other) = server.asked
    assert plain["authorization"] == "Bearer secret"
    assert body["model"] == "listed"
    assert body["stream_options"] == {"include_usage": True}
    assert "x-headrace-replay-output" not in plain
    assert "authorization" not in trusted
    assert (trusted["x-headrace-replay-input"], trusted["x-headrace-replay-output"]) == ("20", "2")
    assert trusted["x-llm-d-inference-objective"] == "batch"
    assert other["model"] == "own"


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Heed Ctrl-C, which whoever runs in a shell's background is told to ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_ctrl_c_reports_what_there_is(tmp_path: Path, server: Server, capsys: Output) -> None:
    server.on_ask = lambda: os.kill(os.getpid(), signal.SIGINT)
    out = tmp_path / "out.json"

    code = main(["replay", trace(tmp_path, 0, 3_600_000), "--url", server.url, "--out", str(out)])

    assert code == 130
    report = json.loads(out.read_bytes())
    assert report["total"]["offered"] == 1
    assert report["client"]["stopped"] is True
    assert report["client"]["trace_rows"] == 2
    assert "STOPPED before the end" in capsys.readouterr().out


def test_two_replays_of_one_trace_compare(tmp_path: Path, server: Server, capsys: Output) -> None:
    file = trace(tmp_path, *range(0, 100, 2))
    files = [str(tmp_path / name) for name in ("before.json", "after.json")]
    for out in files:
        main(["replay", file, "--url", server.url, "--out", out])
        content = json.loads(Path(out).read_text())
        content["client"]["loop_lag_p99_ns"] = 0  # however busy this machine was
        Path(out).write_text(json.dumps(content))
    capsys.readouterr()

    assert main(["compare", *files]) == 0
    assert "live equals live" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--key", "nothing"], "flag --key: expected NAME=KEY"),
        (["--key", "other=key"], "flag --key: no key for tenant t"),
        (["--tenant", "a=-1"], "flag --tenant: expected NAME or NAME=WEIGHT above 0, not a=-1"),
        (["--profile", "nothing"], "flag --profile: unknown profile 'nothing'"),
        (["--format", "azure"], "expected"),
        (["--speed", "0"], "Must be > 0"),
        (["--config", "no.yaml"], "no.yaml"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_sent(
    tmp_path: Path, server: Server, capsys: Output, flags: list[str], message: str
) -> None:
    file = trace(tmp_path, 0, tenant="t")

    assert main(["replay", file, "--url", server.url, *flags]) == 2
    assert message in capsys.readouterr().err
    assert not server.asked


def test_a_server_that_lists_no_model_is_told(
    tmp_path: Path, server: Server, capsys: Output
) -> None:
    server.models = b"{}"

    assert main(["replay", trace(tmp_path, 0), "--url", server.url]) == 2
    assert "/v1/models lists no model" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["nowhere", "ftp://h", "http://", "http://h:port"])
def test_what_is_no_address_is_told(tmp_path: Path, capsys: Output, url: str) -> None:
    assert main(["replay", trace(tmp_path, 0), "--url", url]) == 2
    assert "is no address such as" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("http://h", Place(host="h", port=80)),
        ("http://h:8000/v1/", Place(host="h", port=8_000)),
        ("https://h/proxy", Place(host="h", port=443, path="/proxy/v1", tls=True)),
        ("http://[::1]:9", Place(host="::1", port=9)),
    ],
)
def test_addresses_are_read_with_and_without_the_version(url: str, place: Place) -> None:
    assert place_of(url) == place


def test_a_key_that_no_header_can_carry_is_not_repeated(tmp_path: Path, capsys: Output) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nt = se\tcret\n")

    assert main(["replay", trace(tmp_path, 0), "--url", "http://h", "--keys", str(keys)]) == 2
    assert "cret" not in capsys.readouterr().err


def test_a_trace_is_cut_at_its_speed_and_from_its_first_row(tmp_path: Path) -> None:
    file = Path(trace(tmp_path, 1_000, 1_500, 3_000, 9_000, model="m"))

    cut = rows_of(file, Shape(speed=2.0, for_s=1.5, input_max=5, nameless=True))

    assert [row.at for row in cut] == [0, 250 * NS_PER_MS, 1_000 * NS_PER_MS]
    assert {(row.input_tokens, row.model) for row in cut} == {(5, None)}
    assert len(rows_of(file, Shape(first=2))) == 2


def test_a_wrong_weight_is_refused() -> None:
    assert weights("--tenant", ["a", "b=2"]) == {"a": 1.0, "b": 2.0}
    for wrong in ("=1", "a=0", "a=x", "a=inf", "a=nan"):
        with pytest.raises(ConfigError):
            weights("--tenant", [wrong])
