"""`headrace engine` as a process of its own: one ready line, an answer, a clean end."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.cli import main

RUN = "import sys; from headrace.cli import main; sys.exit(main(sys.argv[1:]))"
READY = re.compile(r"headrace: engine at (?P<base>http://127\.0\.0\.1:\d+)/v1 \(.*\); Ctrl-C stops")


@contextmanager
def started(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command; yield the process and its address."""
    with subprocess.Popen(
        [sys.executable, "-c", RUN, "engine", "--port", "0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ},
    ) as process:
        assert process.stdout is not None
        ready = READY.fullmatch(process.stdout.readline().rstrip())
        assert ready, process.stderr
        try:
            yield process, ready["base"]
        finally:
            process.kill()


def asked(base: str, **fields: object) -> urllib.request.Request:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return urllib.request.Request(
        f"{base}/v1/chat/completions", json.dumps(body).encode(), method="POST"
    )


@pytest.mark.service
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_process_is_ready_with_its_line_and_ends_in_mid_stream(sent: signal.Signals) -> None:
    with started("--model", "mine", "--speed", "100", "--fault", "stall_after=2") as (
        process,
        base,
    ):
        with urllib.request.urlopen(asked(base, model="mine", max_tokens=1, n=1)) as reply:
            assert json.load(reply)["usage"]["completion_tokens"] == 1
        with urllib.request.urlopen(f"{base}/faults") as reply:
            assert json.load(reply)["stall_after"] == 2
        with urllib.request.urlopen(asked(base, model="mine", stream=True)) as stream:
            assert stream.readline().startswith(b"data: ")
            process.send_signal(sent)
            out, err = process.communicate()
        assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--profile", "gpu"], "flag --profile: unknown profile 'gpu'"),
        (["--fault", "stal=1"], "flag --fault: "),
        (["--fault", "error_rate=2"], "flag --fault: error_rate: "),
        (["--speed", "0"], "flag --speed: "),
        (["--seed", "-1"], "flag --seed: "),
        (["--batching", "chunky"], "flag --batching: "),
        (["--batching", '{"kind": "paced_prefill"'], "flag --batching: "),
        (["--batching", '{"kind": "paced_prefill", "step_ms": 0}'], "flag --batching: step_ms: "),
        (["--ordering", "lottery"], "flag --ordering: "),
        (["--max-num-queued-reqs", "0"], "flag --max-num-queued-reqs: "),
        (["--max-model-len", "10000000"], "flag --max-model-len: "),
        (["--preemption", "forget"], "flag --preemption: "),
        (["--preemption", "swap"], "flag --preemption: mechanisms must have recompute"),
        (["--victims", "me"], "flag --victims: "),
        (["--whole", "some"], "flag --whole: "),
        (["--host-gib", "-1"], "flag --host-gib: "),
        (["--host-gb-per-s", "0"], "flag --host-gb-per-s: "),
    ],
)
def test_a_flag_that_is_wrong_is_named(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["engine", "--port", "0", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"headrace: {message}")
    assert err.count("\n") == 1


def test_a_port_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "--port", "65536"]) == 2
    assert capsys.readouterr().err.startswith("headrace: flag --port: ")
