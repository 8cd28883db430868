"""An engine of a few lines, for tests of what starts and stops engines.

python fake_engine.py PORT [RANK] [WRONG...]

WRONG: `deaf` to SIGTERM; with a `child`, deaf too; `mute`, no token ever; `dies` at once; `slow`, no
model for a while; `tells`, its environment's names; `chatty`, a megabyte of output.
"""

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, RANK = int(sys.argv[1]), int((sys.argv[2:] or ["0"])[0])
WRONG = frozenset(sys.argv[3:])
SLEEP = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Engine(BaseHTTPRequestHandler):
    """Well, with a model, and one word for every prompt."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if "mute" in WRONG:
            self.answer({"error": {"message": "not yet"}}, 503)
            return
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        self.answer({"choices": [{"text": "word"}], "usage": usage})

    def answer(self, body: object, status: int = 200) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


if "dies" in WRONG:
    sys.exit(3)
if "deaf" in WRONG:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "tells" in WRONG:
    say(" ".join(f"{name}={value}" for name, value in os.environ.items()))
if "chatty" in WRONG:
    for _ in range(1_024):
        say("x" * 1_023)
    say("all said")
if "child" in WRONG:
    say(f"child {subprocess.Popen([sys.executable, '-c', SLEEP]).pid}")
if RANK:
    signal.pause()
ThreadingHTTPServer(("127.0.0.1", PORT), Engine).serve_forever()
