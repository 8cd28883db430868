"""Our scheduler in vLLM under whatever comes: nothing fails in it, all get done, and its log can be read."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.model.steplog import Step
from headrace.report.steps import token_service
from headrace.report.steps_read import read_steps
from headrace.report.steps_table import steps_report, steps_tables
from headrace.report.tables import render_all
from tests.adapters.vllm_plugin.scenes import FLAT, play
from tests.services.vllm_scene import OURS, Asked, Engine

pytestmark = pytest.mark.vllm

ORDERINGS = ("fifo", "sjf", "edf", "least_slack", "niyama", "vtc", "tenant_first", "score")
BATCHINGS = ("chunked_prefill", "paced_prefill", "decode_first", "dynamic_chunk")
RUBBISH: tuple[dict[str, Any], ...] = (
    {"headrace_way": "x"}, {"headrace_way": 5}, {"headrace_way": "[]"}, {"headrace_way": "[" * 4_000},
    {"headrace_way": '[[3,"a",1,99999999999999999999]]'}, {"headrace_tenant": "a"}, {"theirs": 1},
)  # fmt: skip
COUNT = 150


def way(draw: random.Random, tenant: str) -> list[list[object]]:
    """Return one of the ways that may be told of a tenant, its users told apart or not."""
    counter = draw.choice((0, draw.randrange(10**9), 2**63 - 1))
    slo_class = draw.choice(("chat", "batch"))
    lane: list[object] = [0, "ops", 9, counter]
    of_class: list[object] = [1, slo_class, 2, counter]
    organisation: list[object] = [2, draw.choice("op"), 3, counter]
    above = draw.choice(([], [of_class], [of_class, organisation], [lane, of_class]))
    mine: list[object] = [3, tenant, draw.choice((1, 7, 1_000_000)), counter]
    user: list[object] = [4, draw.choice(("", "u", "v")), 1, counter]
    return [*above, mine, *[user][: draw.randint(0, 1)]]


def told(draw: random.Random) -> dict[str, Any] | None:
    """Return what comes with a request: nothing, rubbish, or metadata."""
    if draw.random() < 0.2:
        return draw.choice((None, *RUBBISH))
    tenant = draw.choice(("a", "b", "c", ""))
    return {
        "headrace_tenant": tenant,
        "headrace_class": "chat",
        "headrace_way": msgspec.json.encode(way(draw, tenant)).decode(),
        "headrace_left_ms": draw.choice((-(10**9), 0, 100, 5_000, 10**9)),
        "headrace_gap_ms": draw.choice((0, 20, 500, 10**9)),
        "headrace_relegated": draw.randint(0, 1),
    }


def asked(draw: random.Random, nth: int, span: int) -> Asked:
    """Return one request; some begin alike, some are given up."""
    at = draw.randrange(span)
    return Asked(
        id=f"{nth}",
        at_ns=at,
        length=draw.choice((1, draw.randint(1, 60), draw.randint(1, 900))),
        seed=draw.choice((None, draw.randrange(5))),
        max_tokens=draw.randint(1, 100),
        priority=draw.choice((0, -(2**62), 2**62)),
        extra_args=told(draw),
        abort_at_ns=at + draw.randrange(1, 10**9) if draw.random() < 0.2 else None,
    )


@pytest.mark.parametrize("seed", range(16))
def test_whatever_comes_gets_done(seed: int, tmp_path: Path) -> None:
    """In pools that are smaller than a step's budget as well."""
    draw = random.Random(seed)
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(FLAT))
    log = tmp_path / "steps.jsonl"
    settings = {
        "profile": str(tmp_path / "profile.json"),
        "ordering": {"kind": ORDERINGS[seed % len(ORDERINGS)]},
        "batching": {"kind": BATCHINGS[draw.randrange(len(BATCHINGS))]},
        "victims": draw.choice(("fair", "policy")),
        "late_ms": draw.choice((1, 10_000)),
        "step_log": str(log),
    }
    engine = Engine(
        scheduler=OURS,
        async_scheduling=seed % 2 == 0,
        max_num_seqs=draw.choice((1, 8, 64)),
        max_num_batched_tokens=draw.choice((64, 512, 2_048)),
        num_gpu_blocks=draw.choice((71, 101, 401)),
        policy=draw.choice(("fcfs", "priority")),
        prefix_caching=draw.random() < 0.6,
        long_prefill_token_threshold=draw.choice((0, 32)),
        reserve_full_isl=draw.random() < 0.5,
        additional_config={"headrace": settings},
        max_model_len=1_024,
    )
    requests = [asked(draw, nth, draw.choice((10**6, 3 * 10**9))) for nth in range(COUNT)]
    run = play(*requests, engine=engine, read=("_watches", "shutdown"))
    assert run.read["_watches"], run.said
    given_up = {one.id for one in requests if one.abort_at_ns is not None}
    assert {name for name, fate in run.fates.items() if fate.reason is None} <= given_up
    reported(log)


def reported(log: Path) -> None:
    """See that a report can be made of a log, which is whole after a shutdown."""
    (life,) = read_steps([log])
    assert all(isinstance(step, Step) for step in life.steps)
    assert all("lost" in note.text for note in life.notes)  # virtual time is faster than a disk
    assert render_all(steps_tables(steps_report(life, token_service())))
