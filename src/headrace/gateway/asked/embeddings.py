"""Embeddings: prompts without answers."""

import msgspec
from msgspec import Struct

from headrace.gateway.asked.fields import Model, Priority
from headrace.gateway.asked.result import Asked
from headrace.gateway.asked.several import Prompts, gather
from headrace.ports.engine import Route
from headrace.units import Tokens


class Embedding(Struct):
    """A request for embeddings, as far as it matters here."""

    model: Model
    input: Prompts
    priority: Priority | None = None
    cache_salt: str | None = None


_DECODE = msgspec.json.Decoder(Embedding).decode


def read(content: bytes) -> Asked:
    """Return what is asked for: all inputs as one prompt, and the step that ends each as a token."""
    body = _DECODE(content)
    gathered = gather(body.input, "input")
    return Asked(
        route=Route.EMBEDDINGS,
        model=body.model,
        stream=False,
        usage_shown=True,
        output_cap=Tokens(1),
        fan_out=1,
        cache_salt=body.cache_salt or "",
        prompt=gathered.prompt,
        input_tokens=Tokens(gathered.tokens),
        input_margin=Tokens(gathered.margin),
        text=gathered.text(),
        longest=Tokens(gathered.longest),
        priority=body.priority,
    )
