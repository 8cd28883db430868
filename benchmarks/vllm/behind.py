"""One run: the gateway before vLLM, a trace offered to it, and what of it was met."""

import asyncio
import json
import math
import re
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.gateway.stacks import serve_command
from benchmarks.vllm import plan
from benchmarks.vllm.alone import Alone
from headrace.load.caller import Answer, Failure, Place
from headrace.load.judge import Terms
from headrace.load.openloop import Target, offer
from headrace.load.replay import Replay
from headrace.model.deployment import ClassSpec
from headrace.model.ids import ClassName, TenantId
from headrace.model.slo import Outcome
from headrace.trace.row import TraceRow
from headrace.units import ms, to_ms
from tests.services.vllm import VllmServer, free_port

HOST, CLASS, TENANT = "127.0.0.1", "interactive", "bench"
DURATION_S, QUICK_S = 40.0, 12.0
_WAIT_S, _STOP_S, _PAUSE_S = 120.0, 15.0, 0.2
_BUSY = re.compile(rb"^vllm:num_requests_(?:running|waiting)\{.*\} (?!0\.0$)", re.MULTILINE)


class Mode(StrEnum):
    """Who refuses."""

    OURS = "admission"
    OPEN = "observe"
    """Nobody."""
    BOUND = "vLLM's bound"
    """vLLM itself, by a count."""


class Run(Struct, frozen=True, kw_only=True):
    """What came of one trace, by its callers' account."""

    mode: Mode
    seed: int
    span_s: float
    """Over which the trace was offered."""
    offered: int
    refused: dict[str, int]
    """By reason, at the door or in the queue: nothing was made for them."""
    admitted: int
    """The others."""
    left: int
    """Of these, whose patience ended first."""
    finished: int
    """Whole answers."""
    met: int
    """Whole answers within both bounds."""
    met_per_s: float
    ttft_p50_ms: float | None
    """Of those that had a first token."""


def offered(server: VllmServer, alone: Alone, seed: int, mode: Mode, *, quick: bool) -> Run:
    """Offer a trace of three times the capacity; callers leave at the end of their patience."""
    span_s = QUICK_S if quick else DURATION_S
    rows = plan.trace(plan.OVERLOAD * alone.capacity_rps, span_s, seed)
    rows = [msgspec.structs.replace(row, tenant=TenantId(TENANT)) for row in rows]
    terms = Terms(
        slo_class=ClassName(CLASS),
        bounds=_class(alone).bounds(None, None),
        profile=alone.profile,
    )
    told = Replay(rows, lambda _: terms, plan.SIZE)
    with _gateway(server, alone, observe=mode is not Mode.OURS) as port:
        asyncio.run(_offer(rows, port, told, seed))
    _idle(server)
    return counted(told, seed, span_s, mode)


def counted(told: Replay, seed: int, span_s: float, mode: Mode) -> Run:
    """Return the figures of a replay."""
    ends = list(told.ended.values())
    first = sorted(answer.ttft_ns for answer in told.answers.values() if answer.ttft_ns is not None)
    met = sum(end.met for end in ends)
    refused = Counter(
        answer.reason or str(answer.status)
        for answer in told.answers.values()
        if answer.status >= 400
    )
    return Run(
        mode=mode,
        seed=seed,
        span_s=span_s,
        offered=len(told.rows),
        refused=dict(refused),
        admitted=len(told.rows) - refused.total(),
        left=sum(answer.failure is Failure.TIMEOUT for answer in told.answers.values()),
        finished=sum(end.outcome is Outcome.SUCCESS for end in ends),
        met=met,
        met_per_s=met / span_s,
        ttft_p50_ms=to_ms(first[len(first) // 2]) if first else None,
    )


async def _offer(rows: list[TraceRow], port: int, told: Replay, seed: int) -> None:
    target = Target(
        place=Place(host=HOST, port=port),
        model=plan.SIZE,
        keys={},
        gap_ns=lambda _: ms(0),
        trusted=True,
        salt=str(seed),
        patience_s=plan.PATIENCE_S,
    )

    def answered(index: int, answer: Answer) -> None:
        told.answered(index, answer)

    await offer(rows, target, answered)


def _class(alone: Alone) -> ClassSpec:
    """Return what is promised: first token and mean time per token, and no gap below a whole step."""
    return ClassSpec(
        name=CLASS,
        ttft_ms=alone.ttft_bound_ms,
        itl_ms=max(alone.tpot_bound_ms, step_ms(alone)),
        tpot_ms=alone.tpot_bound_ms,
    )


def config(base: str, alone: Alone) -> dict[str, object]:
    """Return the gateway's configuration: what was measured, and else what it comes with."""
    return {
        "deployment": {
            "models": [{"name": plan.SIZE, "context_limit": plan.CONTEXT}],
            "pools": [
                {
                    "name": "cpu",
                    "model": plan.SIZE,
                    "profile": msgspec.to_builtins(alone.profile),
                }
            ],
            "classes": [msgspec.to_builtins(_class(alone))],
            "tenants": [{"name": TENANT}],
            "window": {"prefill_ms": step_ms(alone)},
        },
        "upstreams": [{"url": base, "pool": "cpu", "kind": "vllm", "scheduler": "priority"}],
        "server": {"trusted_replay": True, "drain_s": 0},
    }


def step_ms(alone: Alone) -> float:
    """Return the time of a step of the whole budget; so much prefill is in flight, as is asked for."""
    fit = alone.profile.mixed
    assert fit is not None, "measured as two fits"
    return math.ceil(fit.a_ms + fit.b_ms * plan.BUDGET + fit.c_ms * plan.SLOTS)


@contextmanager
def _gateway(server: VllmServer, alone: Alone, *, observe: bool) -> Iterator[int]:
    """Run `headrace serve`; yield its port once its engine is up."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "headrace.json"
        file.write_text(json.dumps(config(server.base, alone)), encoding="utf-8")
        port = free_port()
        command = serve_command(file, port) + (["--observe"] if observe else [])
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603 - our own command
        try:
            _until(lambda: _status(f"http://{HOST}:{port}/ready") == 200)
            yield port
        finally:
            process.terminate()
            process.wait(_STOP_S)


def _idle(server: VllmServer) -> None:
    """Wait until vLLM has nothing left of those who have gone."""
    _until(lambda: not _BUSY.search(server.get("/metrics")))


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=_STOP_S) as reply:  # noqa: S310 - http, our own
            status: int = reply.status
            return status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + _WAIT_S
    while not holds():
        if time.monotonic() > until:
            raise TimeoutError("neither ready nor idle within two minutes")
        time.sleep(_PAUSE_S)
