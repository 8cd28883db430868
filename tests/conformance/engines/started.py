"""The engines that the suite starts itself."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.config.profiles import load_profile
from headrace.model.engine import EngineKind
from tests.conformance.engines.engine import URL, EngineUnderTest, outside
from tests.services import llamacpp

_RUN = "import sys; from headrace.cli import main; sys.exit(main(sys.argv[1:]))"
_READY = re.compile(r"headrace: engine at (?P<base>http://127\.0\.0\.1:\d+)/v1 ")
_SLOTS, _CONTEXT, _BOUND = 2, 1_024, 8


@contextmanager
def emulated() -> Iterator[EngineUnderTest]:
    """Run `headrace engine`, with as few slots as a test can fill, at the pace of its profile."""
    profile = load_profile("h100-8b-tp1")
    text = "\n".join(
        f"max_running: {_SLOTS}" if line.startswith("max_running:") else line
        for line in _profile_text(profile.name).splitlines()
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.yaml"
        path.write_text(text, encoding="utf-8")
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


def _profile_text(name: str) -> str:
    import headrace.config.profiles as folder  # noqa: PLC0415 - its place, not its content

    return Path(folder.__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")


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
def _outside() -> Iterator[EngineUnderTest]:
    engine = outside()
    assert engine is not None
    yield engine


STARTERS: dict[str, Callable[[], "contextmanager[EngineUnderTest]"]] = {
    "emulated": emulated,
    "llamacpp": llama,
} | ({"outside": _outside} if os.environ.get(URL) else {})
"""By name, what runs an engine for as long as it is tested."""
