"""How far off are prompt tokens before and after the plane has learned, and what does its p90 cover?

Made-up prompts of seven kinds, each with a tenant of its own, go through the edge's reader and the
plane's predictor as chats do. The tokenizer is made up as well: it cuts each word into pieces of so
many letters, which depends on the script and on chance, and its chat template adds 25 tokens.
"""

import statistics
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

import msgspec

from benchmarks.harness import CLAIM_SEEDS, Result, at_least, at_most
from headrace.gateway.asked import read
from headrace.model.ids import ModelName, RequestId, TenantId
from headrace.model.request import BY_BYTES, Request
from headrace.policy.predict.input import InputPrediction
from headrace.policy.predict.windows import Windows
from headrace.ports.engine import Route

MODEL = ModelName("m")
TEMPLATE_TOKENS = 25
WORDS_MIN, WORDS_MAX = 5, 2_000
LEARNED = 2_000
"""Prompts before the figures of "after" begin."""


class Script(NamedTuple):
    """The letters of a script, how long its words are, and into what pieces they are cut."""

    letters: str
    word: tuple[int, int]
    piece: tuple[int, int]


ENGLISH = Script("etaoinshrdlu", (2, 9), (3, 6))
CODE = Script("(){}[]=.,:;_xyi", (1, 6), (1, 3))
RUSSIAN = Script("оеаинтсрвлкм", (2, 10), (2, 4))
CHINESE = Script("的一是不了人我在有他这", (8, 30), (1, 2))
JAPANESE = Script("のにはをたがでてと日本", (8, 30), (1, 3))
HINDI = Script("कखगचजतदनपबमरलसह", (2, 8), (1, 2))
KINDS: dict[str, tuple[tuple[Script, int], ...]] = {
    "English": ((ENGLISH, 1),),
    "code": ((CODE, 3), (ENGLISH, 1)),
    "Russian": ((RUSSIAN, 1),),
    "Chinese": ((CHINESE, 1),),
    "Japanese": ((JAPANESE, 1),),
    "Hindi": ((HINDI, 1),),
    "English and Chinese": ((ENGLISH, 5), (CHINESE, 1)),
}
"""Kinds of prompts, by the weights of the scripts of their words."""


class Seen(NamedTuple):
    """One prompt: its kind, its tokens, and (estimate, margin) before and after learning."""

    kind: str
    tokens: int
    before: tuple[int, int]
    after: tuple[int, int]


def drawn(rng: Random, kind: str) -> tuple[str, int]:
    """Return a prompt and the tokens that it has as a chat."""
    scripts = [script for script, weight in KINDS[kind] for _ in range(weight)]
    count = round(WORDS_MIN * (WORDS_MAX / WORDS_MIN) ** rng.random())
    words: list[str] = []
    tokens = TEMPLATE_TOKENS
    for _ in range(count):
        script = rng.choice(scripts)
        left = rng.randint(*script.word)
        words.append("".join(rng.choices(script.letters, k=left)))
        while left > 0:
            left -= rng.randint(*script.piece)
            tokens += 1
    return " ".join(words), tokens


def requests(seed: int, count: int, *, mixed: bool) -> Iterator[tuple[str, Request, int]]:
    """Yield the kind, the request as the edge makes it, and the tokens of so many prompts.

    `mixed`: one tenant sends all kinds.
    """
    rng = Random(f"{seed}/prompts")
    for nth in range(count):
        kind = rng.choice(list(KINDS))
        text, tokens = drawn(rng, kind)
        messages = [{"role": "user", "content": text}]
        asked = read(Route.CHAT, msgspec.json.encode({"model": MODEL, "messages": messages}))
        yield (
            kind,
            Request(
                id=RequestId(nth),
                tenant=TenantId("all" if mixed else kind),
                model=MODEL,
                input_tokens=asked.input_tokens,
                input_margin=asked.input_margin,
                input_revision=BY_BYTES,
                text=asked.text,
            ),
            tokens,
        )


def learned(seed: int, count: int, *, mixed: bool = False) -> list[Seen]:
    """Return prompts as they were estimated, each before its own count was learned."""
    prediction, state = InputPrediction(), Windows()
    seen = []
    for nth, (kind, request, tokens) in enumerate(requests(seed, LEARNED + count, mixed=mixed)):
        fit = prediction.fit(state, MODEL, request)
        if nth >= LEARNED:
            before = request.input_tokens, request.input_margin
            seen.append(Seen(kind, tokens, before, (fit.input_tokens, fit.input_margin)))
        prediction.learn(state, MODEL, request, tokens)
    return seen


def error(seen: list[Seen], which: str) -> float:
    """Return the median of the absolute errors, in percent of the true tokens."""
    errors = [100.0 * abs(getattr(one, which)[0] - one.tokens) / one.tokens for one in seen]
    return float(statistics.median(errors))


def covered(seen: list[Seen], which: str) -> float:
    """Return the share, in percent, whose tokens are no more than estimate and margin."""
    within = [one.tokens <= sum(getattr(one, which)) for one in seen]
    return 100 * statistics.fmean(within)


def figures(seen: list[Seen]) -> dict[str, float]:
    """Return median error and coverage, before and after."""
    return {
        f"{name} {which}": round(figure(seen, which), 1)
        for name, figure in (("median error %", error), ("covered %", covered))
        for which in ("before", "after")
    }


def run(quick: bool) -> Result:
    """Measure over all kinds, and each of them."""
    seeds, count = (CLAIM_SEEDS[:1], 2_000) if quick else (CLAIM_SEEDS, 4_000)
    seen = [one for seed in seeds for one in learned(seed, count)]
    mixed = [one for seed in seeds for one in learned(seed, count, mixed=True)]
    kinds = {kind: figures([one for one in seen if one.kind == kind]) for kind in KINDS}
    return Result(
        name="prompt_tokens",
        seeds=list(seeds),
        claims=[
            at_most("median error after learning, %", error(seen, "after"), 5.0),
            at_least("tokens within estimate and margin, %", covered(seen, "after"), 87.0),
            at_most("tokens within estimate and margin, %", covered(seen, "after"), 95.0),
        ],
        detail={"all": figures(seen), **kinds, "all, of one tenant": figures(mixed)},
    )
