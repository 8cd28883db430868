"""The metrics are text that Prometheus reads, and say what was done."""

import re
from asyncio import gather
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.adapters.engines.server.metrics import Histogram, Metrics
from headrace.config.profiles import load_profile
from headrace.model.engine import Preemption, Snapshot, Yielded
from headrace.model.ids import Incarnation, ReplicaName
from headrace.units import NS_PER_MS, Blocks, Bytes, DurationNs, InstantNs, Tokens
from tests.adapters.engine_server.serving import chat, serving

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)"
    r'\{(?P<labels>(?:[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*",?)*)\} '
    r"(?P<value>-?[0-9][0-9.e+-]*|\+Inf|NaN)"
)
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"')
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> tuple[dict[str, str], Series]:
    """Return types by family and values by series; fails on whatever the format forbids."""
    assert text.endswith("\n")
    types: dict[str, str] = {}
    series: Series = {}
    family = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split(" ")[2]
            assert NAME.fullmatch(family)
            assert family not in types, "the lines of a family stand together"
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == family
            types[name] = kind
        else:
            sample = SAMPLE.fullmatch(line)
            assert sample, line
            several = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
            suffixes = several.get(types[family], ("",))
            assert sample["name"] in {family + suffix for suffix in suffixes}
            labels = LABEL.findall(sample["labels"])
            assert len(labels) == len(dict(labels)), "a label stands once"
            key = (sample["name"], tuple(sorted(labels)))
            assert key not in series, f"twice: {key}"
            series[key] = float(sample["value"])
    return types, series


def snapshot(**changes: Any) -> Snapshot:
    fields = {
        "replica": ReplicaName("r"),
        "incarnation": Incarnation(1),
        "observed_at": InstantNs(0),
        "running": 2,
        "waiting": 3,
        "kv_blocks_used": Blocks(25),
        "kv_blocks_total": Blocks(100),
        "preemptions": 4,
        "prefix_tokens_queried": 50,
        "prefix_tokens_hit": 16,
    }
    return Snapshot(**{**fields, **changes})


def value(series: Series, name: str, **labels: str) -> float:
    (found,) = [
        number
        for (known, told), number in series.items()
        if known == f"vllm:{name}" and labels.items() <= dict(told).items()
    ]
    return found


@pytest.mark.parametrize("model", ["m", 'odd "name"\\with\nlines, and {braces}'])
def test_text_keeps_to_the_format_whatever_the_model_is_called(model: str) -> None:
    metrics = Metrics(model)
    metrics.first(Tokens(10), 30 * NS_PER_MS)
    types, series = parsed(metrics.text(snapshot()).decode())
    assert set(types.values()) == {"gauge", "counter", "histogram", "summary"}
    assert types.pop("headrace_engine_info") == "gauge"
    del series["headrace_engine_info", (("emulates", "vllm"), ("preemption", "recompute"))]
    for name, kind in types.items():
        assert name.startswith(("vllm:", "headrace_engine_"))
        assert name.endswith("_total") == (kind == "counter")
    escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    for name, labels in series:
        expected = None if name == "vllm:cache_config_info" else escaped
        assert dict(labels).get("model_name") == expected
    assert value(series, "num_requests_running") == 2
    assert value(series, "num_requests_waiting") == 3
    assert value(series, "kv_cache_usage_perc") == 0.25
    assert value(series, "cache_config_info", block_size="16", num_gpu_blocks="100") == 1


def test_buckets_are_cumulative_and_hold_their_edge() -> None:
    histogram = Histogram((NS_PER_MS, 5 * NS_PER_MS))
    for duration in (NS_PER_MS, NS_PER_MS + 1, 9 * NS_PER_MS):
        histogram.observe(duration)
    histogram.add((1, 0, 2), 100 * NS_PER_MS)
    lines = list(histogram.samples("h", 'a="b"'))
    assert lines == [
        'h_bucket{a="b",le="0.001"} 2',
        'h_bucket{a="b",le="0.005"} 3',
        'h_bucket{a="b",le="+Inf"} 6',
        'h_sum{a="b"} 0.111000001',
        'h_count{a="b"} 6',
    ]


def test_who_gave_way_is_told_by_mechanism_and_of_a_host_only_where_there_is_one() -> None:
    gave = Yielded(
        kept=1,
        swapped=2,
        recomputed=3,
        pauses=5,
        paused_ns=DurationNs(7 * NS_PER_MS),
        longest_pause_ns=DurationNs(4 * NS_PER_MS),
        bytes_out=Bytes(800),
        bytes_in=Bytes(500),
        tokens_recomputed=Tokens(90),
        host_blocks_used=Blocks(1),
        host_blocks_total=Blocks(8),
    )
    _, series = parsed(Metrics("m", tuple(Preemption)).text(snapshot(), gave).decode())
    named = {
        (name.removeprefix("headrace_engine_"), dict(labels).get("mechanism")): number
        for (name, labels), number in series.items()
        if name.startswith("headrace_engine_") and "info" not in name
    }
    assert named == {
        ("preempted_total", "keep"): 1,
        ("preempted_total", "swap"): 2,
        ("preempted_total", "recompute"): 3,
        ("preemption_pause_seconds_sum", None): 0.007,
        ("preemption_pause_seconds_count", None): 5,
        ("longest_pause_seconds", None): 0.004,
        ("recomputed_tokens_total", None): 90,
    }
    assert value(series, "kv_offload_total_bytes_total", transfer_type="GPU_to_CPU") == 800
    assert value(series, "kv_offload_total_bytes_total", transfer_type="CPU_to_GPU") == 500
    assert value(series, "kv_offload_cpu_cache_usage_perc") == 0.125
    ways = dict(next(labels for name, labels in series if name == "headrace_engine_info"))
    assert ways["preemption"] == "keep,swap,recompute"
    assert not any(
        "offload" in name for name, _ in parsed(Metrics("m").text(snapshot()).decode())[1]
    )


@pytest.mark.asyncio
@pytest.mark.service
async def test_engine_swaps_as_it_is_told_to() -> None:
    pool = replace(
        load_profile("h100-8b-tp1"),
        kv_capacity_tokens=512,
        reference_batch=1,
        reference_context=16,
        max_running=8,
    )
    offers = {"mechanisms": ["swap", "recompute"], "by_cost": False, "host_gib": 1}
    emulator = {"seed": 5, "preemption": offers}
    async with serving(profile=pool, emulator=emulator, speed=50.0) as served:
        asked = (
            served.chat(
                messages=[{"role": "user", "content": "x" * 400}], max_tokens=300, ignore_eos=True
            )
            for _ in range(3)
        )
        made = [reply.json["usage"]["completion_tokens"] for reply in await gather(*asked)]
        assert made == [300, 300, 300]
        _, series = parsed((await served.get("/metrics")).body.decode())
        swapped = [
            number
            for (name, labels), number in series.items()
            if name == "headrace_engine_preempted_total" and ("mechanism", "swap") in labels
        ]
        assert swapped == [value(series, "num_preemptions_total")] != [0]
        out, back = (
            value(series, "kv_offload_total_bytes_total", transfer_type=way)
            for way in ("GPU_to_CPU", "CPU_to_GPU")
        )
        assert out >= back > 0
        assert value(series, "kv_offload_cpu_cache_usage_perc") == 0


@pytest.mark.asyncio
@pytest.mark.service
async def test_metrics_agree_with_what_was_done() -> None:
    async with serving(emulator={"seed": 5, "noise_percent": 0}) as served:
        usages = []
        for nth in range(6):
            fields: dict[str, Any] = {"max_tokens": 20 * (nth + 1), "ignore_eos": nth % 2 == 0}
            content = [{"role": "user", "content": "x" * 3_000}]
            usages.append((await served.chat(messages=content, **fields)).json["usage"])
        reply = await served.get("/metrics")
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        _, series = parsed(reply.body.decode())
        made = sum(usage["completion_tokens"] for usage in usages)
        assert value(series, "generation_tokens_total") == made
        prompts = sum(usage["prompt_tokens"] for usage in usages)
        assert value(series, "prompt_tokens_total") == prompts
        assert value(series, "prefix_cache_queries_total") == prompts
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        assert value(series, "prefix_cache_hits_total") == cached > 0
        assert value(series, "time_to_first_token_seconds_count") == 6
        assert value(series, "e2e_request_latency_seconds_count") == 6
        assert value(series, "inter_token_latency_seconds_count") == made - 6
        ended = {
            reason: value(series, "request_success_total", finished_reason=reason)
            for reason in ("stop", "length", "abort")
        }
        assert sum(ended.values()) == 6
        assert ended["length"] >= 3
        assert value(series, "num_requests_running") == value(series, "num_requests_waiting") == 0
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
            assert value(series, f"{name}_bucket", le="+Inf") == 6
            assert value(series, f"{name}_sum") > 0


@pytest.mark.asyncio
@pytest.mark.service
async def test_steps_are_filled_as_the_engine_is_told_to() -> None:
    """With one slot, an answer of one token comes after the long one before it."""
    batching = {"kind": "chunked_prefill", "running_limit": 1}
    async with serving(emulator={"batching": batching}) as served:
        talk = await served.talk(
            "POST", "/v1/chat/completions", chat(max_tokens=2_000, ignore_eos=True, stream=True)
        )
        await talk.until(b"data: ")
        await served.chat(max_tokens=1)
        assert await served.metric("num_requests_running") == 0
        assert await served.metric("generation_tokens_total") == 2_001
