"""What is served and asked: vLLM's flags, the lengths of requests, and how long each part takes."""

import random
from collections.abc import Sequence

from headrace.trace.row import TraceRow
from headrace.units import InstantNs, Tokens, seconds

SIZE = "small"
SLOTS = 32
CONTEXT = 2_048
BUDGET = 256
"""Tokens of a step."""
BLOCKS, BLOCK_TOKENS = 640, 32
"""Of its KV cache: twice what its slots need at the longest, so that compute is the limit."""
SERVER_FLAGS = (
    *("--max-model-len", str(CONTEXT)),
    *("--max-num-seqs", str(SLOTS)),
    *("--max-num-batched-tokens", str(BUDGET)),
    *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(BLOCKS)),
    *("--scheduling-policy", "priority"),
    "--enable-prompt-tokens-details",
)
PROMPTS, OUTPUTS = (32, 192), (16, 48)
"""Tokens of a request, from and to, equally likely."""
OVERLOAD = 3.0
"""Times the capacity that is offered."""
PATIENCE_S = 10.0
"""How long a caller waits before it leaves: many times the bound, so that none leaves early."""


def trace(rate: float, duration_s: float, seed: int) -> list[TraceRow]:
    """Return Poisson arrivals at `rate` a second."""
    rng = random.Random(seed)
    rows, at = [], rng.expovariate(rate)
    while at < duration_s:
        rows.append(row(at, rng.randint(*PROMPTS), rng.randint(*OUTPUTS)))
        at += rng.expovariate(rate)
    return rows


def row(at_s: float, prompt: int, output: int) -> TraceRow:
    """Return one request, which tells its bound as callers do who know what they want."""
    return TraceRow(
        at=InstantNs(seconds(at_s)),
        input_tokens=Tokens(prompt),
        output_tokens=Tokens(output),
        max_tokens=Tokens(output),
    )


def middle(span: Sequence[int]) -> int:
    """Return the middle of a range."""
    return (span[0] + span[-1]) // 2
