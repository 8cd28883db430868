"""Stand-in."""

import msgspec
from msgspec import Struct

from headrace.gateway import prompt
from headrace.ports.engine import Route
from headrace.units import Tokens


class InvalidError(Exception):
    def __init__(self, message, param=None):
        self.message, self.param = message, param


class Asked(Struct, frozen=True, kw_only=True):
    route: Route
    model: str
    stream: bool
    usage_shown: bool
    output_cap: Tokens | None
    fan_out: int
    cache_salt: str
    prompt: bytes
    input_tokens: Tokens
    input_margin: Tokens


def read(route, content):
    try:
        chat = prompt.decode(content)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        raise InvalidError(message, place.rstrip("`") or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidError("The body is not JSON.", None) from None
    except RecursionError:
        raise InvalidError("The body is nested too deeply.", None) from None
    text = prompt.canonical(chat)
    tokens, margin = prompt.estimate(text)
    return Asked(
        route=route,
        model=chat.model,
        stream=bool(chat.stream),
        usage_shown=chat.wants_usage,
        output_cap=chat.output_cap,
        fan_out=chat.n or 1,
        cache_salt=chat.cache_salt or "",
        prompt=text,
        input_tokens=tokens,
        input_margin=margin,
    )
