"""The engines that the suite starts itself."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from headrace.config.profiles import load_profile
from headrace.model.engine import EngineKind
from tests.conformance.engines.engine import URL, EngineUnderTest, outside
from tests.services import llamacpp, vllm

_RUN = "import sys; from headrace.cli import main; sys.exit(main(sys.argv[1:]))"
_READY = re.compile(r"headrace: engine at (?P<base>http://127\.0\.0\.1:\d+)/v1 ")
_SLOTS, _CONTEXT, _BOUND = 2, 16_384, 8


@contextmanager
def emulated() -> Iterator[EngineUnderTest]:
    """Run `headrace engine`, with as few slots as a test can fill, at the pace of its profile."""
    profile = replace(load_profile("h100-8b-tp1"), max_running=_SLOTS, reference_batch=_SLOTS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        path.write_bytes(msgspec.json.encode(profile))
        flags = ["--profile", str(path), "--model", "emulated", "--max-model-len", str(_CONTEXT)]
        flags += ["--max-num-queued-reqs", str(_BOUND), "--port", "0"]
        with subprocess.Popen(
            [sys.executable, "-c", _RUN, "engine", *flags],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ},
        ) as process:
            assert process.stdout is not None
            ready = _READY.match(process.stdout.readline())
            assert ready, "the emulated engine did not start"
            try:
                yield EngineUnderTest(
                    name="emulated",
                    base=ready["base"],
                    kind=EngineKind.EMULATED,
                    model="emulated",
                    slots=_SLOTS,
                    context=_CONTEXT,
                    queue_bound=_BOUND,
                    stop=process.terminate,
                )
            finally:
                process.terminate()


@contextmanager
def llama() -> Iterator[EngineUnderTest]:
    """Run a llama.cpp server, or skip."""
    with llamacpp.serving() as server:
        yield EngineUnderTest(
            name="llamacpp",
            base=server.base,
            kind=EngineKind.LLAMACPP,
            model=llamacpp.MODEL,
            slots=llamacpp.SLOTS,
            context=llamacpp.CONTEXT,
            stop=server.stop,
        )


@contextmanager
def real_vllm() -> Iterator[EngineUnderTest]:
    """Use the vLLM that all tests share, or skip."""
    server = vllm.shared()
    yield EngineUnderTest(
        name="vllm",
        base=server.base,
        kind=EngineKind.VLLM,
        model=vllm.MODEL,
        slots=vllm.SLOTS,
        context=vllm.CONTEXT,
        queue_bound=vllm.QUEUE_BOUND,
    )


@contextmanager
def _outside() -> Iterator[EngineUnderTest]:
    engine = outside()
    assert engine is not None
    yield engine


STARTERS: dict[str, Callable[[], AbstractContextManager[EngineUnderTest]]] = {
    "emulated": emulated,
    "llamacpp": llama,
    "vllm": real_vllm,
}
"""By name, what runs an engine for as long as it is tested."""
MARKS = {"vllm": pytest.mark.vllm}
"""By name, what selects an engine's tests."""
if os.environ.get(URL):
    STARTERS["outside"] = _outside
