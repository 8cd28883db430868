"""Traps that others fell into, where engines and time are needed to see them."""

from typing import Any

import pytest

from headrace.model.ids import ClassName, TenantId
from headrace.policy.admission.gates import GateMode, Gates
from headrace.policy.catalog import Window
from headrace.policy.ordering.orders import Fifo
from headrace.trace.row import TraceRow
from headrace.units import NS_PER_MS, NS_PER_S, InstantNs, Tokens
from tests.sim.scenes import deployment, run, scenario

TURNS = 100


def turn(nth: int) -> TraceRow:
    """Return a turn of a conversation, of which little is new to an engine that has it cached."""
    return TraceRow(
        at=InstantNs(nth * 200 * NS_PER_MS),
        input_tokens=Tokens(2_048),
        output_tokens=Tokens(20),
        tenant=TenantId("a"),
        slo_class=ClassName("chat"),
        prefix=tuple(range(1, 8)),
        prefix_tokens=256,
    )


def cold(tokens: int) -> TraceRow:
    return TraceRow(
        at=InstantNs(5 * NS_PER_S + 1),
        input_tokens=Tokens(tokens),
        output_tokens=Tokens(20),
        tenant=TenantId("b"),
        slo_class=ClassName("batch"),
    )


def longest_ms(tokens: int, **settings: Any) -> float:
    """Return the longest first token of warm turns on two replicas, with cold prompts among them."""
    rows = [*map(turn, range(TURNS)), *[cold(tokens)] * 3]
    done = run(
        scenario(config=deployment(replicas=2, **settings)), rows=sorted(rows, key=lambda x: x.at)
    )
    assert all(row.outcome is not None for row in done.rows(tenant=TenantId("b"))), (
        "they are served"
    )
    turns = [row.indicators for row in done.rows(tenant=TenantId("a"))]
    assert len(turns) == TURNS
    return max(seen.ttft_ns for seen in turns if seen is not None) / NS_PER_MS


@pytest.mark.parametrize("tokens", [50_000, 100_000])
def test_slack_and_chunking_bound_the_warm_turns_beside_cold_prompts(tokens: int) -> None:
    """A prompt that takes seconds shuts one replica and waits for the others to be free (trap 24)."""
    assert longest_ms(tokens) < 200
    everything = {"ordering": Fifo(), "window": Window(unbounded=True)}
    alone = longest_ms(tokens, admission=Gates(mode=GateMode.AUDIT), **everything)
    assert alone > 2_000, "sent at once to whoever has least, they shut both"
