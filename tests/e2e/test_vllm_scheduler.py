"""Our scheduler in a real vLLM, behind HTTP: whom it serves, by usage and by its step log.

Beside it vLLM's own, which our class only looks on. Counts and order alone; every wait has an end.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from headrace.adapters.vllm_plugin.settings import Settings
from tests.services import vllm
from tests.services.vllm_live import (
    interference,
    latest_first,
    shares,
    squeezed,
)
from tests.services.vllm_ours import Engine, Sent, Whole, ask, serving
from tests.services.vllm_twin import agreement, mixed

pytestmark = [pytest.mark.asyncio, pytest.mark.service, pytest.mark.vllm]

CHUNKED: dict[str, Any] = {"batching": {"kind": "chunked_prefill", "token_budget": 512}}
FAILING = "tests.adapters.vllm_plugin.odd.Failing"
_PATIENCE_S = 120.0


@contextmanager
def _served(folder: Path, settings: dict[str, Any], **more: str) -> Iterator[Engine]:
    # Where prompts start by their first chunk, blocks run out the more often.
    flags = ("--no-scheduler-reserve-full-isl",)
    with serving(vllm.needed(), folder / "steps.jsonl", settings, *flags, **more) as engine:
        yield engine


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Yield vLLM with our scheduler."""
    with _served(tmp_path_factory.mktemp("ours"), CHUNKED) as engine:
        yield engine


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Yield vLLM with its own, and our step log."""
    with _served(tmp_path_factory.mktemp("stock"), {"mode": "passive"}) as engine:
        yield engine


async def test_the_earliest_deadline_starts_first_whatever_came_first(ours: Engine) -> None:
    order = await latest_first(ours)
    assert order == sorted(order)


async def test_vllms_own_goes_by_the_priority_that_callers_give(stock: Engine) -> None:
    order = await latest_first(stock)
    assert order == sorted(order, reverse=True)


@pytest.mark.parametrize("weight", [1, 3])
async def test_tenants_get_their_shares_however_much_they_ask(ours: Engine, weight: int) -> None:
    """One asks for three times as much as the other: while both wait, that does not count."""
    found = await shares(ours, weight=weight, name=f"-{weight}")
    assert found.by_log == pytest.approx(weight, rel=0.1)
    assert found.by_usage == pytest.approx(weight, rel=0.1)


async def test_under_vllms_own_who_asks_more_gets_more(stock: Engine) -> None:
    found = await shares(stock)
    assert found.by_log < 0.5
    assert found.by_usage < 0.5


async def test_long_prompts_hardly_hold_up_who_chats(ours: Engine) -> None:
    assert 0 < await interference(ours) <= 512


async def test_under_vllms_own_they_do(stock: Engine) -> None:
    assert await interference(stock) >= 1_500


async def test_who_keeps_to_its_share_hardly_ever_gives_way(ours: Engine) -> None:
    gave_way = await squeezed(ours)
    assert len(gave_way) >= 50
    # Where it had nothing that waited it begins level with the others, and a prompt above them.
    assert sum(one.tenant == "keeps" for one in gave_way) <= len(gave_way) / 20


async def test_it_does_as_the_emulated_engine_foretells(ours: Engine) -> None:
    settings = msgspec.convert(CHUNKED, Settings)
    found = await agreement(ours, settings, mixed())
    assert found.positions >= 0.95
    assert found.steps >= 0.95


async def _asked(engine: Engine) -> list[Whole | BaseException]:
    """Return what becomes of more requests than there are slots, each of as many steps as it takes to fail."""
    sent = [Sent(tenant=f"{nth % 3}", output=100) for nth in range(24)]
    async with asyncio.timeout(_PATIENCE_S), engine.caller() as sdk:
        return await asyncio.gather(*(ask(sdk, one) for one in sent), return_exceptions=True)


async def test_where_it_fails_vllm_goes_on_and_all_answers_are_whole(tmp_path: Path) -> None:
    with _served(tmp_path, CHUNKED, scheduler=FAILING) as engine:
        answers = await _asked(engine)
        assert [one for one in answers if not isinstance(one, Whole)] == []
        assert {one.output_tokens for one in answers if isinstance(one, Whole)} == {100}
        engine.steps()
        assert [note.text for note in engine.notes] == [
            "RuntimeError: planted; vLLM's own scheduling goes on"
        ]


async def test_set_up_to_stop_it_ends_vllm_and_no_caller_hangs(tmp_path: Path) -> None:
    with _served(tmp_path, CHUNKED | {"on_fault": "stop"}, scheduler=FAILING) as engine:
        answers = await _asked(engine)
        assert any(isinstance(one, openai.APIError) for one in answers)
        assert all(isinstance(one, Whole | openai.APIError) for one in answers)
        await engine.until(lambda: engine.server.process.poll() is not None)
        said = engine.server.said(200_000)
        assert "headrace: the scheduler failed; the engine stops, as it is set up" in said
