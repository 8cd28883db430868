"""What has the engine done, in Prometheus' text format under vLLM's names?

Times are the clock's: to the first token and to the end as handed out here, gaps between tokens as
the engine planned them. An answer's gaps are added when it ends; of one that was aborted none are.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from headrace.model.engine import Preemption, Snapshot, Yielded
from headrace.model.meter import GAP_EDGES_NS, StreamTiming
from headrace.ports.engine import Finish
from headrace.units import BLOCK_TOKENS, NS_PER_S, to_seconds

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
QUEUED = "max_num_queued_reqs"
"""Why a request was turned away, as the rejections' label says."""

# vLLM's own edges, in seconds.
_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_E2E_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip


class Histogram:
    """Durations by bucket; an edge belongs to the bucket below it."""

    def __init__(self, edges_ns: Iterable[int]) -> None:
        """Start empty."""
        self._edges = tuple(edges_ns)
        self._counts = [0] * (len(self._edges) + 1)
        self._sum = 0

    def observe(self, duration_ns: int) -> None:
        """Count one."""
        self._counts[bisect_left(self._edges, duration_ns)] += 1
        self._sum += duration_ns

    def add(self, counts: Iterable[int], sum_ns: int) -> None:
        """Count many, given by bucket."""
        for nth, count in enumerate(counts):
            self._counts[nth] += count
        self._sum += sum_ns

    def samples(self, name: str, labels: str) -> Iterator[str]:
        """Yield the sample lines."""
        below = 0
        for edge, count in zip((*self._edges, None), self._counts, strict=True):
            below += count
            bound = "+Inf" if edge is None else repr(to_seconds(edge))
            yield f'{name}_bucket{{{labels},le="{bound}"}} {below}'
        yield f"{name}_sum{{{labels}}} {to_seconds(self._sum)!r}"
        yield f"{name}_count{{{labels}}} {below}"


class Metrics:
    """Everything counted since the start."""

    def __init__(self, model: str, ways: Iterable[Preemption] = (Preemption.RECOMPUTE,)) -> None:
        """Start at zero; `model` is the label of every series, `ways` how requests may give way."""
        self._ways = ",".join(ways)
        self._labels = f'engine="0",model_name="{_escaped(model)}"'
        self.prompt_tokens = self.generation_tokens = self.rejections = 0
        self._successes = dict.fromkeys((*Finish, "abort"), 0)
        self._ttft = Histogram(round(edge * NS_PER_S) for edge in _TTFT_S)
        self._itl = Histogram(GAP_EDGES_NS)
        self._e2e = Histogram(round(edge * NS_PER_S) for edge in _E2E_S)

    def first(self, prompt_tokens: int, waited_ns: int) -> None:
        """Count a prompt whose first token is out."""
        self.prompt_tokens += prompt_tokens
        self._ttft.observe(waited_ns)

    def finished(self, finish: Finish, timing: StreamTiming, took_ns: int) -> None:
        """Count an answer that is complete. vLLM counts no aborted one, so neither does this."""
        self._successes[finish] += 1
        self._e2e.observe(took_ns)
        assert timing.first_at is not None
        assert timing.last_at is not None
        self._itl.add(timing.gap_counts, timing.last_at - timing.first_at)

    def text(self, now: Snapshot, gave: Yielded = Yielded()) -> bytes:  # noqa: B008  frozen
        """Return the exposition: of an engine's account and of what came of who gave way."""
        assert now.kv_blocks_total is not None
        assert now.kv_blocks_used is not None
        labels, used = self._labels, now.kv_blocks_used / now.kv_blocks_total
        cache = (
            f'block_size="{BLOCK_TOKENS}",enable_prefix_caching="True",engine="0",'
            f'num_gpu_blocks="{now.kv_blocks_total}"'
        )
        lines = [
            # Tells it from the engine whose names it uses.
            "# HELP headrace_engine_info An emulated engine.",
            "# TYPE headrace_engine_info gauge",
            f'headrace_engine_info{{emulates="vllm",preemption="{self._ways}"}} 1',
            *_one("num_requests_running", "gauge", "Requests with a slot.", labels, now.running),
            *_one("num_requests_waiting", "gauge", "Requests without one.", labels, now.waiting),
            *_one("kv_cache_usage_perc", "gauge", "KV cache in use, 1 is full.", labels, used),
            *_one("cache_config_info", "gauge", "The KV cache.", cache, 1),
            *_count("num_preemptions", "Preemptions.", labels, now.preemptions),
            *self._yielded(gave),
            *_count("prefix_cache_queries", "Tokens looked up.", labels, now.prefix_tokens_queried),
            *_count("prefix_cache_hits", "Tokens found.", labels, now.prefix_tokens_hit),
            *_count("prompt_tokens", "Prompt tokens processed.", labels, self.prompt_tokens),
            *_count("generation_tokens", "Tokens made.", labels, self.generation_tokens),
            *_count(
                "admission_rejections",
                "Requests turned away.",
                f'{labels},reason="{QUEUED}"',
                self.rejections,
            ),
            *_head("request_success_total", "counter", "Answers completed."),
            *(
                f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {count}'
                for reason, count in self._successes.items()
            ),
        ]
        for name, said, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token.", self._ttft),
            ("inter_token_latency_seconds", "Gaps between tokens.", self._itl),
            ("e2e_request_latency_seconds", "Arrival to end.", self._e2e),
        ):
            lines += _head(name, "histogram", said)
            lines += histogram.samples(f"vllm:{name}", labels)
        return ("\n".join(lines) + "\n").encode()

    def _yielded(self, gave: Yielded) -> Iterator[str]:
        """Yield what vLLM has no names for but those of its offloading, which moves KV as we do."""
        labels = self._labels
        name = "headrace_engine_preempted_total"
        yield f"# HELP {name} Preemptions by what became of the KV."
        yield f"# TYPE {name} counter"
        ways = (gave.kept, gave.swapped, gave.recomputed)
        for way, times in zip(Preemption, ways, strict=True):
            yield f'{name}{{{labels},mechanism="{way}"}} {times}'
        name = "headrace_engine_preemption_pause_seconds"
        yield f"# HELP {name} From a preemption to the next token."
        yield f"# TYPE {name} summary"
        yield f"{name}_sum{{{labels}}} {to_seconds(gave.paused_ns)!r}"
        yield f"{name}_count{{{labels}}} {gave.pauses}"
        name = "headrace_engine_longest_pause_seconds"
        yield f"# HELP {name} The longest of these."
        yield f"# TYPE {name} gauge"
        yield f"{name}{{{labels}}} {to_seconds(gave.longest_pause_ns)!r}"
        name = "headrace_engine_recomputed_tokens_total"
        yield f"# HELP {name} Tokens whose KV was computed another time."
        yield f"# TYPE {name} counter"
        yield f"{name}{{{labels}}} {gave.tokens_recomputed}"
        if gave.host_blocks_total:
            share = gave.host_blocks_used / gave.host_blocks_total
            name = "kv_offload_cpu_cache_usage_perc"
            yield from _one(name, "gauge", "Host KV in use, 1 is full.", labels, share)
            name = "kv_offload_total_bytes_total"
            yield from _head(name, "counter", "Bytes of KV moved.")
            yield f'vllm:{name}{{{labels},transfer_type="GPU_to_CPU"}} {gave.bytes_out}'
            yield f'vllm:{name}{{{labels},transfer_type="CPU_to_GPU"}} {gave.bytes_in}'


def _head(name: str, kind: str, said: str) -> list[str]:
    return [f"# HELP vllm:{name} {said}", f"# TYPE vllm:{name} {kind}"]


def _one(name: str, kind: str, said: str, labels: str, value: float | None) -> list[str]:
    assert value is not None, f"{name} is not told"
    return [*_head(name, kind, said), f"vllm:{name}{{{labels}}} {value!r}"]


def _count(name: str, said: str, labels: str, value: int | None) -> list[str]:
    return _one(f"{name}_total", "counter", said, labels, value)


def _escaped(value: str) -> str:
    """Return a label's value as it stands between quotes."""
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
