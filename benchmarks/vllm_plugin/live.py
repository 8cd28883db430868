"""Whom a real vLLM serves under our scheduler, and under its own with ours looking on."""

import asyncio
import statistics
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness import Claim, at_least, at_most
from benchmarks.vllm.alone import line
from headrace.adapters.vllm_plugin.settings import Settings
from headrace.model.profile import DecodeFit, MixedFit, Profile
from headrace.units import NS_PER_MS, Tokens
from tests.services import vllm
from tests.services.vllm_live import Shares, interference, latest_first, shares, squeezed
from tests.services.vllm_ours import BLOCKS, SLOTS, Engine, Sent, serving
from tests.services.vllm_twin import agreement, mixed

REPEATS = 3
CHUNK = 512
CHUNKED: dict[str, Any] = {"batching": {"kind": "chunked_prefill", "token_budget": CHUNK}}
STOCK = {"mode": "passive"}
_TIGHT = (
    *("--num-gpu-blocks-override", "96", "--max-model-len", "2048"),
    *("--max-num-batched-tokens", str(CHUNK)),
    "--no-scheduler-reserve-full-isl",
)
"""Blocks that a few long requests fill, and prompts that start by their first chunk, alike under both."""
_ROUNDS, _PROMPT = 16, 900
_VICTIMS = 50
_DEPTHS = (1, 2, 4, 8)
_LENGTHS = (128, 512, 1_024, 2_000)
KEEPS = "keeps"


def measured(home: Path) -> tuple[list[Claim], dict[str, Any]]:
    """Return the claims and figures of a server with each."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        theirs = _on(home, here / "stock", STOCK, _stock)
        profile = here / "profile.json"
        profile.write_bytes(msgspec.json.encode(theirs.pop("profile")))
        mine = _on(home, here / "ours", CHUNKED, _ours)
        paced = {
            "profile": str(profile),
            "batching": {"kind": "paced_prefill", "token_budget_max": CHUNK},
        }
        mine["paced"] = _on(home, here / "paced", paced, _between)
        tight = {
            name: _on(home, here / name, settings, _squeezed, *_TIGHT)
            for name, settings in (("tight ours", CHUNKED), ("tight stock", STOCK))
        }
    detail = {"stock": theirs, "ours": mine} | tight
    for name, found in detail.items():
        print(f"  {name}: {found}", flush=True)
    return _claims(theirs, mine, tight), detail


def _claims(theirs: Any, mine: Any, tight: dict[str, Counter[str]]) -> list[Claim]:
    gave_way = tight["tight ours"]
    part, other = (one[KEEPS] / one.total() for one in tight.values())
    off = [abs(one - 1) for one in _ratios(mine["shares 1:1"])]
    off += [abs(one / 3 - 1) for one in _ratios(mine["shares 3:1"])]
    return [
        at_least("pairs started earliest deadline first, least", min(mine["in order"]), 1),
        at_most("the same under vLLM's own with contrary priorities", max(theirs["in order"]), 0),
        at_most("how far off its share a tenant is, most", max(off), 0.1),
        at_most("what it gets of it under vLLM's own, most", max(_ratios(theirs["shares"])), 0.5),
        at_most("prefill between two tokens beside a hog, most", max(mine["between"]), CHUNK),
        at_most("the same paced", max(mine["paced"]), CHUNK),
        at_least("the same under vLLM's own, least", min(theirs["between"]), 1_500),
        at_least("preemptions", gave_way.total(), _VICTIMS),
        at_least("preemptions under vLLM's own", tight["tight stock"].total(), _VICTIMS),
        at_most("part of them of who keeps to its share", part, 0.05),
        at_least("the same under vLLM's own, to that", other / max(part, 0.01), 1.5),
        at_least("places in the order of starts that an emulated engine foretells, least",
                 min(one.positions for one in mine["twin"]), 0.95),
        at_least("steps likewise, least", min(one.steps for one in mine["twin"]), 0.95),
    ]  # fmt: skip


def _ratios(found: Sequence[Shares]) -> list[float]:
    return [ratio for one in found for ratio in (one.by_log, one.by_usage)]


def _on(
    home: Path,
    folder: Path,
    settings: dict[str, Any],
    work: Callable[[Engine], Awaitable[Any]],
    *flags: str,
) -> Any:
    """Return what comes of work with a server of its own."""
    folder.mkdir()
    with serving(home, folder / "steps.jsonl", settings, *flags) as engine:
        return asyncio.run(work(engine))  # type: ignore[arg-type]


async def _stock(engine: Engine) -> dict[str, Any]:
    return {
        "profile": await profiled(engine),
        "in order": [_in_order(await latest_first(engine)) for _ in range(REPEATS)],
        "shares": [await shares(engine, name=f"-{nth}") for nth in range(REPEATS)],
        "between": await _between(engine),
    }


async def _ours(engine: Engine) -> dict[str, Any]:
    settings = msgspec.convert(CHUNKED, Settings)
    return {
        "in order": [_in_order(await latest_first(engine)) for _ in range(REPEATS)],
        "shares 1:1": [await shares(engine, name=f"-{nth}") for nth in range(REPEATS)],
        "shares 3:1": [await shares(engine, weight=3, name=f"=3-{nth}") for nth in range(REPEATS)],
        "between": await _between(engine),
        "twin": [await agreement(engine, settings, mixed(seed=nth)) for nth in range(REPEATS)],
    }


async def _between(engine: Engine) -> list[int]:
    return [await interference(engine) for _ in range(REPEATS)]


async def _squeezed(engine: Engine) -> Counter[str]:
    found = await squeezed(engine, rounds=_ROUNDS, prompt=_PROMPT)
    return Counter(str(one.tenant) for one in found)


def _in_order(order: Sequence[int]) -> float:
    pairs = [a < b for nth, a in enumerate(order) for b in order[nth + 1 :]]
    return sum(pairs) / len(pairs)


async def profiled(engine: Engine) -> Profile:
    """Return a hardware profile of what its steps take by its own log: least squares over medians."""
    decodes = {
        depth: await _step_ms(engine, [Sent(tenant="p", output=40)] * depth) for depth in _DEPTHS
    }
    prompts = {
        length: await _step_ms(engine, [Sent(tenant="p", prompt=length, output=1)])
        for length in _LENGTHS
        for _ in range(REPEATS)
    }
    a, c = line(list(decodes), list(decodes.values()))
    mixed_a, b = line(list(prompts), list(prompts.values()))
    return Profile(
        name="measured",
        source="Measured by benchmarks/vllm_plugin on the machine it ran on, just before use.",
        hardware="CPU",
        model=vllm.MODEL,
        kv_bytes_per_token=2_048,
        kv_capacity_tokens=Tokens(BLOCKS * vllm.BLOCK_TOKENS),
        max_running=SLOTS,
        token_budget=CHUNK,
        reference_batch=SLOTS,
        reference_context=Tokens(CHUNK),
        decode=DecodeFit(a_ms=a, c_ms=c, d_ms=0),
        mixed=MixedFit(a_ms=mixed_a, knee=0, b_ms=b, c_ms=c, d_ms=0, e_ms=0),
    )


async def _step_ms(engine: Engine, asked: Sequence[Sent]) -> float:
    """Return the usual time of a step that has all of these in it."""
    played = await engine.together(asked)
    ours = set(played.arrived)
    took = [
        step.took_ns / NS_PER_MS
        for step in played.steps
        if step.took_ns is not None
        and len(ours & {*step.decodes, *(n for n, _, _ in step.prefills)}) == len(asked)
        and (asked[0].output == 1 or not step.prefills)
    ]
    return statistics.median(took)
