"""What is asked of a real vLLM to see whom it serves, and what that comes to by its step log and its usage."""

import asyncio
from collections import Counter

from msgspec import Struct

from headrace.model.ids import TenantId
from headrace.report.steps import (
    Victim,
    prefill_between_tokens,
    share_while_backlogged,
    victims,
)
from tests.services.vllm_ours import CONTEXT, SLOTS, Engine, Played, Sent, ask, holding

HOG_PROMPT = 1_800


async def latest_first(engine: Engine, count: int = 16) -> list[int]:
    """Send the latest deadline first, and with the most urgent priority; return how they were started.

    By deadline: 0, 1, ... is earliest first.
    """
    asked = [
        Sent(tenant="line", left_ms=60_000 * (count - nth), priority=nth, output=4)
        for nth in range(count)
    ]
    played = await engine.together(asked)
    return [(one.left_ms or 0) // 60_000 - 1 for one in played.started]


class Shares(Struct, frozen=True, kw_only=True):
    """What a tenant had to what another had that asked for three times as much, while both waited."""

    by_log: float
    by_usage: float
    """Of the answers that were whole before one of them had nothing left to wait for."""


async def shares(engine: Engine, *, of: int = 120, weight: int = 1, name: str = "") -> Shares:
    """Offer three times as many requests for one tenant as for another."""
    light, heavy = f"light{name}", f"heavy{name}"
    one = Sent(tenant=light, prompt=64, output=16, weight=weight)
    other = Sent(tenant=heavy, prompt=64, output=16)
    asked = [one if nth % 4 == 3 else other for nth in range(4 * of)]
    played = await engine.together(asked)
    by_log = share_while_backlogged(played.steps)
    ratio = by_log[TenantId(light)] / by_log[TenantId(heavy)]
    return Shares(by_log=ratio, by_usage=_used(played, light, of))


def _used(played: Played, light: str, of: int) -> float:
    """Return its tokens to the other's in whole answers, of all that ended while both had more waiting."""
    left = {light: of, None: 3 * of}
    tokens: Counter[bool] = Counter()
    for one in played.ended:
        mine = one.sent.tenant == light
        left[light if mine else None] -= 1
        if min(left.values()) < SLOTS:
            break
        tokens[mine] += one.prompt_tokens + one.output_tokens
    return tokens[True] / tokens[False]


async def interference(engine: Engine, *, hogs: int = 6) -> int:
    """Let a tenant with long prompts come beside one that chats; return the most prefill between its tokens."""
    mark = len(engine.steps())
    chat = Sent(tenant="chatty", output=CONTEXT - 32)
    hog = Sent(tenant="hog", prompt=HOG_PROMPT, output=2)
    async with engine.caller() as sdk, holding(engine, sdk, mark, chat, 3):
        await asyncio.gather(*(ask(sdk, hog) for _ in range(hogs)))
    return max(prefill_between_tokens(await engine.settled(mark))[TenantId("chatty")])


async def squeezed(engine: Engine, *, rounds: int = 5, prompt: int = 2_500) -> list[Victim]:
    """Let chats that keep to their share run beside more batch work than the KV cache holds; return who gave way."""
    mark = len(engine.steps())
    # It asks for far less than its part, so that it never is the one above it.
    chat = Sent(tenant="keeps", prompt=400, output=200, gap_ms=80, weight=20)
    batch = Sent(tenant="fills", prompt=prompt, output=100, gap_ms=5_000, slo_class="batch")
    gone = Sent(tenant="late", prompt=prompt, output=100, gap_ms=80, relegated=True)

    async def caller(sent: Sent) -> None:
        async with engine.caller() as sdk:
            for _ in range(rounds):
                await ask(sdk, sent)

    async def chats() -> None:
        async with engine.caller() as sdk:
            while not rest.done():
                await ask(sdk, chat)

    rest = asyncio.gather(*[caller(one) for one in (batch, gone) for _ in range(4)])
    await asyncio.gather(rest, chats(), chats())
    return victims(await engine.settled(mark))
