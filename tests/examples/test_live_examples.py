"""EX-4, EX-9 and EX-13 of the specification through a gateway that serves: real HTTP, emulated replicas."""

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from openai import AsyncOpenAI

from headrace.cli import main
from headrace.config.profiles import load_profile
from headrace.config.schema import EmulatorSpec, KeySpec, ServerSpec, Settings
from headrace.gateway.auth import key_hash
from headrace.gateway.clock import LoopClock
from headrace.gateway.fairness import counters
from headrace.gateway.server import Gateway, listen
from headrace.model.deployment import ClassSpec, ModelSpec, PoolSpec, TenantSpec
from headrace.model.ids import ModelName, TenantId
from headrace.policy.catalog import PlaneConfig
from headrace.policy.predict.output import OutputPrediction
from headrace.report.compare import Comparison, Verdict
from headrace.report.decisions import EntryLine, RouteLine, read
from headrace.report.live import Report
from headrace.trace.jsonl import write_jsonl
from headrace.trace.row import TraceRow
from headrace.units import BLOCK_TOKENS, MIB, NS_PER_MS, InstantNs, Tokens, ceil_div, mib_ceil
from tests.gateway.scenes import assert_books_closed

pytestmark = pytest.mark.service
PROFILE = load_profile("h100-8b-tp1")
SHORT, LONG = (100, 20), (32_768, 4_096)
UNBOUND = ClassSpec(name="interactive", ttft_ms=600_000, itl_ms=600_000)
"""However busy the machine of the test is, what is let in meets its bounds."""


def settings(folder: Path, deployment: PlaneConfig) -> Settings:
    return Settings(
        deployment=deployment,
        keys=tuple(
            KeySpec(name=one.name, tenant=one.name, hash=key_hash(f"sk-{one.name}"))
            for one in deployment.tenants
        ),
        server=ServerSpec(port=0, drain_s=0, trusted_replay=True),
        emulator=EmulatorSpec(noise_percent=0),
        decision_log=str(folder / "decisions.jsonl"),
    )


def deployment(*tenants: TenantSpec, replicas: int = 1, **changed: Any) -> PlaneConfig:
    return PlaneConfig(
        models=(ModelSpec(name="m"),),
        pools=(PoolSpec(name="p", model="m", profile=PROFILE, replicas=replicas),),
        tenants=tenants,
        classes=(UNBOUND,),
        **changed,
    )


@asynccontextmanager
async def serving(given: Settings) -> AsyncIterator[tuple[Gateway, str]]:
    gateway = Gateway(given, LoopClock(asyncio.get_running_loop()))
    sock, begun = listen("127.0.0.1", 0), asyncio.Event()
    running = asyncio.create_task(gateway.serve(sock, accepting=begun.set))
    await begun.wait()
    try:
        yield gateway, f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
    finally:
        gateway.stop()
        assert await running
        assert_books_closed(gateway.driver.plane)


async def streamed(sdk: AsyncOpenAI, tokens: int, made: int, most: int | None) -> Any:
    """Return a stream that has begun, of a request of so many tokens that asks for at most so many."""
    stream = await sdk.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "x"}],
        stream=True,
        extra_body={} if most is None else {"max_tokens": most},
        extra_headers={
            "x-headrace-replay-input": str(tokens),
            "x-headrace-replay-output": str(made),
        },
    )
    await anext(stream)
    return stream


def logged(folder: Path) -> tuple[list[EntryLine], list[RouteLine]]:
    lines = list(read(folder / "decisions.jsonl"))
    entries = [line for line in lines if isinstance(line, EntryLine)]
    return entries, [line for line in lines if isinstance(line, RouteLine)]


@pytest.mark.asyncio
async def test_ex_4_a_long_document_is_over_a_thousand_short_questions_to_all_who_decide(
    tmp_path: Path,
) -> None:
    pool = PoolSpec(name="p", model="m", profile=replace(PROFILE, reference_batch=32), replicas=2)
    told = replace(
        deployment(
            TenantSpec(name="a"),
            TenantSpec(name="b"),
            prediction=OutputPrediction(prior_p50=LONG[1], prior_p90=LONG[1]),
        ),
        pools=(pool,),
    )
    async with (
        serving(settings(tmp_path, told)) as (gateway, base),
        AsyncOpenAI(api_key="sk-a", base_url=base, max_retries=0) as a,
        AsyncOpenAI(api_key="sk-b", base_url=base, max_retries=0) as b,
    ):
        both = [await streamed(a, *SHORT, SHORT[1]), await streamed(b, *LONG, LONG[1])]
        had = counters(gateway.driver.plane, [TenantId("a"), TenantId("b")])
        model = ModelName("m")
        assert had[model, TenantId("b")] > 100 * had[model, TenantId("a")] > 0, "fairness"
        for _ in range(3):
            async for _ in await streamed(a, *SHORT, SHORT[1]):
                pass
        for stream in both:
            await stream.close()
    entries, routes = logged(tmp_path)
    short, long = (one.demand for one in entries[:2])
    assert (short.kv_mib_reserved, long.kv_mib_reserved) == (15, 4_608)
    assert long.work_ms_p90 > 1_000 * short.work_ms_p90
    gates = [{v.gate.value: v.measured for v in e.decision.verdicts} for e in entries[:2]]
    assert gates[0]["memory"] == ceil_div(sum(SHORT), BLOCK_TOKENS), "the gates"
    assert gates[1]["memory"] == ceil_div(sum(LONG), BLOCK_TOKENS)
    assert [e.evidence.budget.tokens_needed for e in entries[:2]] == [sum(SHORT), sum(LONG)]
    assert [r.evidence.blocks for r in routes[:2]] == [gates[0]["memory"], gates[1]["memory"]]
    _, taken, *others = (one.placement.replica for one in routes)
    assert taken not in others, "the router sends the short ones where the long one is not"
    assert len(others) == 3


@pytest.mark.asyncio
async def test_ex_9_a_decision_tells_1085_mib_and_the_gate_counts_1086_in_blocks(
    tmp_path: Path,
) -> None:
    async with (
        serving(settings(tmp_path, deployment(TenantSpec(name="a")))) as (_, base),
        AsyncOpenAI(api_key="sk-a", base_url=base, max_retries=0) as sdk,
    ):
        async for _ in await streamed(sdk, 8_200, 2, None):
            pass
    (entry,), (route,) = logged(tmp_path)
    assert PROFILE.kv_bytes_per_token == 131_072
    assert entry.demand == route.demand
    assert entry.demand.predicted_output_p90 == 480
    assert entry.demand.kv_mib_reserved == 1_085
    (memory,) = (one for one in entry.decision.verdicts if one.gate.value == "memory")
    blocks = memory.measured
    assert mib_ceil(blocks * BLOCK_TOKENS * PROFILE.kv_bytes_per_token) == 1_086
    assert route.evidence.blocks == blocks
    assert blocks * BLOCK_TOKENS * PROFILE.kv_bytes_per_token % MIB == 0


REPLAY = """
import sys
from headrace.cli import main
sys.exit(main(["replay", *sys.argv[1:]]))
"""


# EX-13 -------------------------------------------------------------------------------------------


async def replayed(folder: Path, name: str, trace: Path, tenant: TenantSpec) -> Path:
    """Return the report of a trace that was offered to a gateway of its own."""
    given = settings(folder, deployment(tenant, replicas=2))
    file, out = folder / "bounds.json", folder / f"{name}.json"
    file.write_bytes(msgspec.json.encode({"deployment": given.deployment}))
    async with serving(given) as (_, base):
        told = ["--url", base, "--trusted", "--key", "t=sk-t", "--config", file, "--out", out]
        command = [sys.executable, "-c", REPLAY, trace, *told]
        replay = await asyncio.create_subprocess_exec(*map(str, command), stdout=DEVNULL)
        assert await replay.wait() in {0, 3}
    content = json.loads(out.read_text())
    content["client"]["loop_lag_p99_ns"] = 0  # however busy this machine was
    out.write_text(json.dumps(content))
    return out


@pytest.mark.asyncio
async def test_ex_13_live_a_policy_that_refuses_nine_in_ten_attains_all_and_is_worse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        TraceRow(
            at=InstantNs(nth * 15 * NS_PER_MS),
            input_tokens=Tokens(500),
            output_tokens=Tokens(200),
            tenant=TenantId("t"),
        )
        for nth in range(60)
    ]
    write_jsonl(trace, rows)
    tenants = {
        "all": TenantSpec(name="t"),
        "few": TenantSpec(name="t", max_parallel_requests=4),
    }
    files = [await replayed(tmp_path, name, trace, tenant) for name, tenant in tenants.items()]
    everything, few = (msgspec.json.decode(one.read_bytes(), type=Report) for one in files)
    assert everything.total.rejected == 0
    assert few.total.rejected >= 0.85 * few.total.offered
    assert few.total.attained_admitted == everything.total.attained_admitted == 1.0
    for total in (everything.total, few.total):
        assert total.offered == 60
        assert sum(total.entry.values()) == 60
    assert everything.total.work_attained == 1.0
    assert few.total.work_attained is not None
    assert few.total.work_attained <= 0.15

    capsys.readouterr()
    assert main(["compare", *map(str, files)]) == 0
    assert "worse" in capsys.readouterr().out
    assert main(["compare", *map(str, files), "--json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=Comparison)
    assert found.verdict is Verdict.WORSE
