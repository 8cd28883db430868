"""Embeddings: prompts without answers."""

import msgspec

from headrace.gateway.asked.fields import Body, Priority
from headrace.gateway.asked.result import Asked
from headrace.gateway.asked.several import Prompts, gather
from headrace.model.features import Feature
from headrace.ports.engine import Route
from headrace.units import Tokens


class Embedding(Body, kw_only=True):
    """A request for embeddings, as far as it matters here."""

    input: Prompts
    priority: Priority | None = None


_DECODE = msgspec.json.Decoder(Embedding).decode


def read(content: bytes, _marked: bool) -> Asked:
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
        user=body.end_user(),
        prompt=gathered.prompt,
        input_tokens=Tokens(gathered.tokens),
        input_margin=Tokens(gathered.margin),
        text=gathered.text(),
        longest=Tokens(gathered.longest),
        priority=body.priority or 0,
        features=() if body.priority is None else (Feature.PRIORITY,),
    )
