"""How many tokens is a prompt of so many bytes?

Learns the tokens that a byte comes to, from the engines' own counts, for each (model, mix of scripts,
prompt size, tenant) as quantiles of a sliding window, and falls back to coarser groups. Size is told
apart because a chat template adds the same to a short prompt and a long one; tenants, because one's
odd prompts must not raise what another's are taken for. Until a group has seen enough the request
keeps the estimate that it came with.
"""

from functools import lru_cache
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from headrace.model.ids import ModelName
from headrace.model.request import BY_BYTES, Request, TextBytes
from headrace.policy.predict.windows import Windows
from headrace.units import MICRO, Tokens, ceil_div

REVISION = "script-1"
_BYTES_PER_TOKEN = 4  # as BY_BYTES says: what a request's `prefix_tokens` is counted in
_PARTS = 8
"""Into how many parts a mix of scripts is told. 8: scripts differ by a factor of two or three in
tokens a byte, so what one part leaves open is less than the prompts of one script differ."""
_RATIO_MAX = 1_000 * MICRO
"""Tokens a byte, in millionths, beyond which a count is not believed to be of this text alone."""


class InputPrediction(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sliding-window quantiles of tokens a byte, with fallback to coarser groups."""

    window: Annotated[int, Meta(ge=8, le=4_096)] = 64
    """Ended requests a group remembers. 64: a p90 with half a dozen samples above it; tokens a byte
    spread far less than lengths of answers."""
    enough: Annotated[int, Meta(ge=1, le=4_096)] = 16
    """Samples before a group is believed; below it the next coarser one answers."""
    groups: Annotated[int, Meta(ge=16, le=1_000_000)] = 5_000
    """Groups kept; beyond, the one longest without a sample is forgotten. 5,000: a thousand tenants
    with a few sizes each, and at most 3 MB of a checkpoint."""

    def __post_init__(self) -> None:
        """Refuse a belief that no window could earn."""
        if self.enough > self.window:
            raise ValueError(f"enough {self.enough} is more than the window of {self.window}")

    def fit(self, state: Windows, model: ModelName, request: Request) -> Request:
        """Return a request of text with what its bytes came to so far: p50, and p90 as its margin.

        The count of a tokenizer stands. Prefix chunks are as many tokens as the prompt's bytes are.
        """
        text = request.text
        if text is None or not (total := text.total):
            return request
        tokens, margin, revision = (
            request.input_tokens,
            request.input_margin,
            request.input_revision,
        )
        if revision == BY_BYTES:
            if not state.windows:
                return request
            ratios = state.quantiles(_groups(model, request.tenant, text, total), self.enough)
            if ratios is None:
                return request
            p50, p90 = (max(1, ceil_div(total * ratio, MICRO)) for ratio in ratios)
            tokens, margin, revision = Tokens(p50), Tokens(p90 - p50), REVISION
        chunk = request.prefix_tokens * tokens * _BYTES_PER_TOKEN // total
        return replace(
            request,
            input_tokens=tokens,
            input_margin=margin,
            input_revision=revision,
            prefix_tokens=Tokens(max(chunk, 1) if request.prefix_tokens else 0),
            optional=_scaled(request, tokens) if request.optional else (),
        )

    def learn(self, state: Windows, model: ModelName, request: Request, tokens: int) -> None:
        """Add what the engine counted of a prompt; one that is not text alone teaches nothing."""
        text = request.text
        if text is None or not (total := text.total) or tokens < 1:
            return
        ratio = tokens * MICRO // total
        if ratio <= _RATIO_MAX:
            groups = _groups(model, request.tenant, text, total)
            state.teach(groups, ratio, size=self.window, most=self.groups)


def _scaled(request: Request, tokens: int) -> tuple[Tokens, ...]:
    """Return what may be left out of a prompt that has so many tokens."""
    before = max(1, request.input_tokens)
    if before == tokens:
        return request.optional
    return tuple(Tokens(one * tokens // before) for one in request.optional)


def _groups(model: ModelName, tenant: str, text: TextBytes, total: int) -> tuple[str, ...]:
    """Return a prompt's groups, finest first; sizes are told apart by powers of two."""
    mix: tuple[int, ...] = (0, 0, 0)
    if total != text.ascii:
        half = total // 2
        two, cjk, other = text.two, text.cjk, text.other
        mix = tuple((count * _PARTS + half) // total for count in (two, cjk, other))
    return _named(model, mix, total.bit_length(), tenant)


@lru_cache(maxsize=4_096)  # each request asks twice, and most are like one before
def _named(model: ModelName, parts: tuple[int, ...], bits: int, tenant: str) -> tuple[str, ...]:
    mix = f"{model}|{''.join(map(str, parts))}"
    size = f"{mix}|{bits}"
    return f"{size}|{tenant}", size, mix
