"""How fast is this vLLM alone? And the hardware profile which that comes to."""

import asyncio
import re
import statistics
from collections.abc import Sequence
from itertools import count, cycle
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from benchmarks.vllm import plan
from headrace.load.caller import Answer, Place, ask
from headrace.load.openloop import Target, encoded
from headrace.model.profile import DecodeFit, MixedFit, Profile
from headrace.units import DurationNs, Tokens, to_ms
from tests.services.vllm import VllmServer

_LENGTHS = (32, 64, 112, 192)
_BATCHES = (1, 8, 16, 32)
_TTFT_TIMES, _TPOT_TIMES = 5.0, 3.0
_STREAM_TOKENS = 48
_FEW = 8
"""Tokens asked for where the first is waited for: some are a part of a letter, which nobody sees."""
_KV_BYTES = 23_040
"""Of a token: 30 layers, keys and values, 3 heads of 64 numbers of 2 bytes."""
_NUMBERS = count()
_MADE = re.compile(rb"^vllm:generation_tokens_total\{.*\} (\S+)$", re.MULTILINE)


class Alone(Struct, frozen=True, kw_only=True):
    """What was measured, all of it by callers over loopback, medians."""

    ttft_ms: dict[int, float]
    """By tokens of the prompt, as the gateway estimates them, nobody else there."""
    tpot_ms: dict[int, float]
    """By streams at once, with prompts of the middle length."""
    ttft_bound_ms: float
    tpot_bound_ms: float
    capacity_rps: float
    """Answers per second with every slot always busy."""
    profile: Profile


def measured(server: VllmServer, *, quick: bool) -> Alone:
    """Measure an idle vLLM: some two minutes, or half of one."""
    return asyncio.run(_measured(server, quick))


def place_of(server: VllmServer) -> Place:
    """Return where a server's API is."""
    at = urlsplit(server.base)
    assert at.hostname is not None
    assert at.port is not None
    return Place(host=at.hostname, port=at.port)


async def _measured(server: VllmServer, quick: bool) -> Alone:
    place = place_of(server)
    times = 5 if quick else 15
    await _one(place, plan.middle(plan.PROMPTS), 8)  # whatever is made on first use is made
    ttft = await _first(place, times)
    tpot = {batch: await _per_token(place, batch) for batch in _BATCHES}
    capacity = await _capacity(server, place, *((6.0, 8.0) if quick else (10.0, 30.0)))
    usual = ttft[plan.middle(plan.PROMPTS)]
    tpot_bound = _TPOT_TIMES * tpot[1]
    return Alone(
        ttft_ms=ttft,
        tpot_ms=tpot,
        ttft_bound_ms=_TTFT_TIMES * usual,
        tpot_bound_ms=tpot_bound,
        capacity_rps=capacity,
        profile=profile(ttft, tpot, tpot_bound),
    )


async def _one(place: Place, prompt: int, output: int) -> Answer:
    """Ask vLLM itself for exactly so many tokens."""
    row = plan.row(0, prompt, output)
    target = Target(
        place=place, model=plan.SIZE, keys={}, gap_ns=lambda _: DurationNs(0), salt="alone"
    )
    body = msgspec.json.decode(encoded(row, target, next(_NUMBERS)))
    exact = msgspec.json.encode(body | {"ignore_eos": True, "min_tokens": output})
    answer = await ask(place, exact, {}, gap_bound_ns=DurationNs(0), patience_s=120.0)
    assert answer.complete, answer
    return answer


async def _first(place: Place, times: int) -> dict[int, float]:
    """Return the usual time to the first token in ms, by length of the prompt.

    Lengths take turns, so that what disturbs this machine for a while disturbs them alike.
    """
    took: dict[int, list[float]] = {length: [] for length in _LENGTHS}
    for _ in range(times):
        for length, seen in took.items():
            first = (await _one(place, length, _FEW)).ttft_ns
            assert first is not None, f"{_FEW} tokens without a letter"
            seen.append(to_ms(first))
    return {length: statistics.median(seen) for length, seen in took.items()}


async def _per_token(place: Place, batch: int) -> float:
    """Return the usual time per token with so many streams at once, in ms.

    The streams start together; the prefills of the last run beside the decodes of the first, so what
    a larger batch costs is rather over- than understated.
    """
    prompt = plan.middle(plan.PROMPTS)
    answers = await asyncio.gather(*[_one(place, prompt, _STREAM_TOKENS) for _ in range(batch)])
    return statistics.median(tpot_ms(answer) for answer in answers)


def tpot_ms(answer: Answer) -> float:
    """Return the mean time per token after the first, in ms."""
    first, last = answer.timing.first_at, answer.timing.last_at
    assert first is not None
    assert last is not None
    return to_ms(last - first) / max(1, (answer.output_tokens or 1) - 1)


async def _capacity(server: VllmServer, place: Place, warm_s: float, duration_s: float) -> float:
    """Return answers per second while each of as many callers as there are slots asks again at once.

    By vLLM's own count of tokens, over the mean length, from when the callers are out of step.
    """
    rows = cycle(plan.trace(10.0, 100.0, seed=0))

    async def caller() -> None:
        while True:
            row = next(rows)
            await _one(place, row.input_tokens, row.output_tokens)

    callers = [asyncio.create_task(caller()) for _ in range(plan.SLOTS)]
    await asyncio.sleep(warm_s)
    loop = asyncio.get_running_loop()
    began, before = loop.time(), await _made(server)
    await asyncio.sleep(duration_s)
    made, took = await _made(server) - before, loop.time() - began
    for one in callers:
        one.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    return made / took / plan.middle(plan.OUTPUTS)


async def _made(server: VllmServer) -> float:
    """Return the tokens that vLLM made since its start."""
    page = await asyncio.to_thread(server.get, "/metrics")
    found = _MADE.search(page)
    assert found, "vLLM does not tell its tokens"
    return float(found[1])


def profile(ttft_ms: dict[int, float], tpot_ms: dict[int, float], bound_ms: float) -> Profile:
    """Return the hardware profile that the measured times come to.

    Decode: least squares a + c*D over batches. Mixed: least squares a + b*T over prompts that are a
    step each, HTTP and tokenizing included, which callers wait for as well; decodes beside them cost
    what they cost alone. Costs by context are within c and b: contexts here are short and alike.
    """
    a, c = line(list(tpot_ms), list(tpot_ms.values()))
    mixed_a, b = line(list(ttft_ms), list(ttft_ms.values()))
    streams = holding(a, b, c, bound_ms)
    return Profile(
        name="measured",
        source="Measured by benchmarks/vllm on the machine it ran on, just before use.",
        hardware="CPU",
        model=plan.SIZE,
        kv_bytes_per_token=_KV_BYTES,
        kv_capacity_tokens=Tokens(plan.BLOCKS * plan.BLOCK_TOKENS),
        max_running=streams,
        token_budget=plan.BUDGET,
        reference_batch=streams,
        reference_context=Tokens(plan.middle(plan.PROMPTS) + plan.middle(plan.OUTPUTS) // 2),
        decode=DecodeFit(a_ms=a, c_ms=c, d_ms=0),
        mixed=MixedFit(a_ms=mixed_a, knee=0, b_ms=b, c_ms=c, d_ms=0, e_ms=0),
    )


def holding(a: float, b: float, c: float, bound_ms: float) -> int:
    """Return how many streams at once hold a time per token, each replaced by a newcomer as it ends.

    D streams see D prompts prefilled in the time of one answer: per token a + c*D + b*prompt*D/output.
    vLLM itself takes as many as it has slots; that the gateway sends no more is what holds the bound.
    """
    prompt, output = plan.middle(plan.PROMPTS), plan.middle(plan.OUTPUTS)
    most = int((bound_ms - a) / (c + b * prompt / output))
    return min(plan.SLOTS, max(1, most))


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return intercept and slope of the least-squares line, neither below a thousandth of a ms."""
    slope, intercept = statistics.linear_regression(xs, ys)
    return max(1e-3, intercept), max(1e-3, slope)
