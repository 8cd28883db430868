"""What `schedule` costs beside vLLM's own, and whether an emulated engine foretells its steps exactly."""

import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from benchmarks.harness import Claim, at_least, at_most
from headrace.policy.batching import PacedPrefill
from headrace.units import PS_PER_NS
from tests.adapters.vllm_plugin import test_emulated
from tests.adapters.vllm_plugin.scenes import engine
from tests.adapters.vllm_plugin.test_ours_emulated import (
    CASES,
    Case,
    drawn,
    emulate,
    marked,
    ours,
    unordered,
)
from tests.replica.scenes import small
from tests.services import vllm_steps
from tests.services.vllm_scene import ASYNC, OURS, Asked, Run, Scene
from tests.services.vllm_steps import quantile

REPEATS, QUICK_REPEATS = 5, 3
RUNNING, REQUESTS = 32, 160
_BOUND = 1.5
"""Times the time of vLLM's own, median of all steps with every slot taken."""
PARTS = ("all", "decode only", "with prompts")


def measured(*, quick: bool) -> tuple[list[Claim], dict[str, Any]]:
    """Return the claims and figures."""
    with tempfile.TemporaryDirectory() as folder:
        claims, detail = _costs(Path(folder), QUICK_REPEATS if quick else REPEATS)
        alike = _alike(Path(folder), CASES[:2] if quick else CASES)
    least = min(alike.values())
    claims.append(at_least("steps that an emulated engine foretells exactly, least part", least, 1))
    return claims, detail | {"foretold": alike}


def _costs(folder: Path, repeats: int) -> tuple[list[Claim], dict[str, Any]]:
    file = folder / "profile.json"
    file.write_bytes(msgspec.json.encode(small(8_000, budget=512, running=RUNNING)))
    paced = {"profile": str(file), "batching": msgspec.to_builtins(PacedPrefill())}
    claims: list[Claim] = []
    detail: dict[str, Any] = {}
    for name, settings in (("as it comes", {}), ("paced", paced)):
        ratios: dict[str, list[float]] = {part: [] for part in PARTS}
        medians: dict[str, list[tuple[int, int]]] = {part: [] for part in PARTS}
        for seed in range(repeats):
            mine, theirs = vllm_steps.shared().play_beside(_scene(settings, seed))
            assert mine.is_clean, mine.error
            assert theirs.is_clean, theirs.error
            for part in PARTS:
                pair = _p50(mine, part), _p50(theirs, part)
                medians[part].append(pair)
                ratios[part].append(pair[0] / pair[1])
        found = {part: statistics.median(values) for part, values in ratios.items()}
        detail[f"schedule, {name}"] = {"ratio": found, "p50_ns": medians}
        for part in PARTS:
            us = [statistics.median(pair) / 1_000 for pair in zip(*medians[part], strict=True)]
            print(
                f"  schedule {name}, {part}: {us[0]:.1f} us beside {us[1]:.1f}, {found[part]:.2f}"
            )
        claims.append(
            at_most(f"schedule, {name}, p50 over vLLM's, median repeat", found["all"], _BOUND)
        )
    return claims, detail


def _scene(settings: dict[str, Any], seed: int) -> Scene:
    """Return a run in which every slot is taken most of the time, and more wait."""
    draw = random.Random(seed)
    asked = [
        marked(
            Asked(
                id=f"{nth}",
                at_ns=nth,
                length=draw.randint(50, 600),
                max_tokens=draw.randint(60, 240),
            ),
            tenant=draw.choice("abcd"),
            left_ms=draw.randint(500, 9_000),
            gap_ms=draw.choice((80, 500)),
        ).asked
        for nth in range(REQUESTS)
    ]
    own = engine(ASYNC, max_num_seqs=RUNNING, num_gpu_blocks=8_000)
    return Scene(
        engine=replace(own, scheduler=OURS, additional_config={"headrace": settings}),
        beside=own,
        profile=small(8_000, budget=512, running=RUNNING),
        requests=tuple(asked),
    )


def _p50(run: Run, part: str) -> int:
    kinds = {"all": (False, True), "decode only": (False,), "with prompts": (True,)}[part]
    took = [
        ns
        for prefill in kinds
        for ns in vllm_steps.schedule_ns(run, running=RUNNING, prefill=prefill)
    ]
    return quantile(took, 0.5)


def _alike(folder: Path, cases: list[Case]) -> dict[str, float]:
    """Return by case the part of vLLM's steps under our scheduler that an emulated engine has taken as well."""
    found = {}
    for nth, case in enumerate(cases):
        profile = small(case.blocks, budget=case.budget, running=case.running)
        requests = drawn(case)
        run = ours(profile, case, requests, folder)
        real = unordered(test_emulated.steps(run))
        made = unordered(emulate(profile, case, requests, run.steps[0].end_ps // PS_PER_NS))
        same = sum(a == b for a, b in zip(real, made, strict=False))
        name = f"{nth}: {type(case.batching).__name__}, {case.blocks} blocks, {case.running} slots"
        found[name] = same / max(len(real), len(made))
    return found
