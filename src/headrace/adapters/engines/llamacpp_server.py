"""llama.cpp's own HTTP server as a program, from the wheel `xllamacpp` (the extra `local`).

python -m headrace.adapters.engines.llamacpp_server --model FILE.gguf --alias NAME --port PORT

It listens on this machine alone, prints `ready` with its address once the model is loaded, and fetches
nothing. Signals end it at once: whoever stops it has drained it before. It takes half of the processors:
its threads wait for each other by spinning, and two on two busy processors measured twenty times slower
than one.
"""

import argparse
import os
import signal
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

HOST = "127.0.0.1"
HTTP_THREADS = 64
"""Each answer takes one of them until it ends, and so do `/health` and `/metrics`. 64: with as many as it
would take by itself, eight requests leave its health unanswered."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until a signal; raises OSError if the model is not there, ImportError without the wheel."""
    told = _parser().parse_args(arguments)
    path = Path(told.model)
    if not path.is_file():
        raise FileNotFoundError(2, "no such model", str(path))
    xllamacpp = import_module("xllamacpp")  # only now: `--help` needs no wheel
    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = str(path), {told.alias}
    params.hostnames, params.port = [HOST], told.port
    params.offline, params.n_threads_http = True, HTTP_THREADS
    params.n_parallel, params.n_ctx = told.slots, told.slots * told.context
    params.n_batch = params.n_ubatch = told.batch
    params.endpoint_metrics = params.endpoint_slots = params.cont_batching = True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = told.threads
    server = xllamacpp.Server(params)
    # It serves from threads of its own, as long as it is referred to.
    print("ready", server.listening_address, flush=True)  # noqa: T201 - for whoever started it
    signal.pause()


def _cpus() -> int:
    """Return how many processors we may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="llama.cpp's server, for one model.")
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--alias", required=True, help="name it serves the model by")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free one")
    parser.add_argument("--slots", type=int, default=4, help="answers at once")
    parser.add_argument("--context", type=int, default=2_048, help="tokens of each slot")
    parser.add_argument("--batch", type=int, default=128, help="tokens of a step at most")
    parser.add_argument("--threads", type=int, default=max(1, _cpus() // 2))
    return parser


if __name__ == "__main__":
    main()
