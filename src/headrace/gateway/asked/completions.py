"""Completions of bare text."""

import msgspec

from headrace.gateway.asked.fields import (
    Choices,
    Choosing,
    Count,
    cap,
    features,
    shows_each_usage,
    shows_usage,
)
from headrace.gateway.asked.result import Asked
from headrace.gateway.asked.several import Prompts, gather
from headrace.ports.engine import Route
from headrace.units import Tokens, ceil_div

_CAP = 16
"""The cap where none is told; an explicit null is none."""


class Completion(Choosing, kw_only=True):
    """A completion request, as far as it matters here."""

    prompt: Prompts
    max_tokens: Count | None = _CAP
    best_of: Choices | None = None


_DECODE = msgspec.json.Decoder(Completion).decode


def read(content: bytes, _marked: bool) -> Asked:
    """Return what is asked for: for each prompt, as many answers as are made to choose from."""
    body = _DECODE(content)
    gathered = gather(body.prompt, "prompt")
    return Asked(
        route=Route.COMPLETIONS,
        model=body.model,
        stream=bool(body.stream),
        usage_shown=shows_usage(body.stream_options),
        each_usage_shown=shows_each_usage(body.stream_options),
        output_cap=cap(body.max_tokens),
        fan_out=gathered.count * max(body.n or 1, body.best_of or 1),
        cache_salt=body.cache_salt or "",
        user=body.end_user(),
        prompt=gathered.prompt,
        input_tokens=Tokens(ceil_div(gathered.tokens, gathered.count)),
        input_margin=Tokens(ceil_div(gathered.margin, gathered.count)),
        text=gathered.text() if gathered.count == 1 else None,
        longest=Tokens(gathered.longest),
        priority=body.priority or 0,
        features=features(
            body,
            form=body.response_format,
            logprobs=body.logprobs,
            best_of=(body.best_of or 1) > (body.n or 1),
        ),
    )
