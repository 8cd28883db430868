"""Benchmark clients that others wrote, unmodified, and what each of them says it saw."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from tests.judges.gateway import MODEL, Served
from tests.support import require_service

_HERE = Path(__file__).parent
_CLOSED = "http://127.0.0.1:9"
"""Nobody listens there."""


class Load(Struct, frozen=True, kw_only=True):
    """What a client is to send: chats, streamed, so many at once."""

    requests: int
    concurrency: int
    input_tokens: int = 64
    output_tokens: int = 32
    whole: bool = True
    """Every answer is as long as it may be."""


class Found(Struct, frozen=True, kw_only=True):
    """What a client found; times in ms."""

    succeeded: int
    failed: int
    output_tokens: int
    ttft: Mapping[str, float]
    """Mean and median, by name."""
    tpot: Mapping[str, float]
    """Mean time of a token after the first of its answer: mean and median over answers."""
    gap_mean: float
    """Between two events of a stream."""


class Client(ABC):
    """A benchmark client in an environment of its own."""

    name: str
    """As a service that a place may promise."""
    variable: str
    """Environment variable that names the folder of its environment."""

    @property
    def python(self) -> Path:
        """The environment's Python; without one, the running test is skipped or fails."""
        folder = os.environ.get(self.variable)
        if not folder:
            require_service(self.name, f"{self.variable} is unset; see make test-judges")
        path = Path(folder, "bin", "python")
        if not path.exists():
            require_service(self.name, f"{self.variable} names no environment: {folder}")
        return path

    def environment(self, key: str, folder: Path) -> dict[str, str]:  # noqa: ARG002 - of use to some
        """Return its environment variables: whatever leaves the machine meets a closed door."""
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            own[name] = own[name.upper()] = _CLOSED
        own["no_proxy"] = own["NO_PROXY"] = "127.0.0.1,localhost"
        return own | {"HF_HOME": str(folder / "hf"), "DO_NOT_TRACK": "1"}

    @abstractmethod
    def command(self, served: Served, load: Load, tokenizer: Path, folder: Path) -> list[str]:
        """Return the command that sends a load and writes what it found into a folder."""

    @abstractmethod
    def found(self, folder: Path) -> Found:
        """Read what it wrote."""


class AiPerf(Client):
    """NVIDIA's aiperf. Told to count tokens by the server's usage: words here are of no tokenizer."""

    name, variable = "aiperf", "HEADRACE_AIPERF"

    def command(self, served: Served, load: Load, tokenizer: Path, folder: Path) -> list[str]:
        return [
            str(self.python.with_name("aiperf")),
            *("profile", "-m", MODEL, "--url", served.base, "--api-key", served.key),
            *("--endpoint-type", "chat", "--streaming", "--use-server-token-count"),
            *("--tokenizer", str(tokenizer), "--random-seed", "1"),
            *("--request-count", str(load.requests), "--concurrency", str(load.concurrency)),
            *("--isl", str(load.input_tokens), "--osl", str(load.output_tokens)),
            *(("--extra-inputs", "ignore_eos:true") if load.whole else ()),
            *("--ui", "none", "--no-gpu-telemetry", "--output-artifact-dir", str(folder)),
        ]

    def found(self, folder: Path) -> Found:
        told = json.loads((folder / "profile_export_aiperf.json").read_text())

        def of(name: str, which: str = "avg") -> Any:
            return (told.get(name) or {}).get(which, 0)

        return Found(
            succeeded=int(of("request_count")),
            failed=int(of("error_request_count")),
            output_tokens=int(of("total_output_tokens")),
            ttft={"mean": of("time_to_first_token"), "median": of("time_to_first_token", "p50")},
            tpot={"mean": of("inter_token_latency"), "median": of("inter_token_latency", "p50")},
            gap_mean=of("inter_chunk_latency"),
        )


class VllmBench(Client):
    """vLLM's `bench serve`, by its module: the console script asks for another distribution."""

    name, variable = "vllm-bench", "HEADRACE_VLLM"
    _result = "result.json"

    def environment(self, key: str, folder: Path) -> dict[str, str]:
        offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
        own = {"OPENAI_API_KEY": key, "VLLM_NO_USAGE_STATS": "1"}
        return super().environment(key, folder) | offline | own

    def command(self, served: Served, load: Load, tokenizer: Path, folder: Path) -> list[str]:
        return [
            *(str(self.python), str(_HERE / "vllm_bench.py"), "--backend", "openai-chat"),
            *("--base-url", served.base, "--endpoint", "/v1/chat/completions", "--model", MODEL),
            *("--tokenizer", str(tokenizer), "--dataset-name", "random", "--seed", "1"),
            *("--random-input-len", str(load.input_tokens)),
            *("--random-output-len", str(load.output_tokens)),
            *("--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency)),
            *(("--ignore-eos",) if load.whole else ()),
            *("--ready-check-timeout-sec", "0"),  # no request before those that are counted
            *("--save-result", "--result-dir", str(folder), "--result-filename", self._result),
        ]

    def found(self, folder: Path) -> Found:
        told = json.loads((folder / self._result).read_text())
        return Found(
            succeeded=told["completed"],
            failed=told["failed"],
            output_tokens=told["total_output_tokens"],
            ttft={"mean": told["mean_ttft_ms"], "median": told["median_ttft_ms"]},
            tpot={"mean": told["mean_tpot_ms"], "median": told["median_tpot_ms"]},
            gap_mean=told["mean_itl_ms"],
        )


CLIENTS: tuple[Client, ...] = (AiPerf(), VllmBench())
