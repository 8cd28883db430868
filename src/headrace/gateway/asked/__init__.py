"""What does the body of a request ask for?

Decodes the fields that decisions need and skips the rest. The prompt is looked at here and goes no
further than its hashes.
"""

from collections.abc import Callable

import msgspec

from headrace.gateway.asked import chat, completions, embeddings, messages, responses
from headrace.gateway.asked.result import Asked, InvalidError
from headrace.gateway.asked.size import PARTS_MAX, is_bounded
from headrace.gateway.asked.stripped import stripped
from headrace.ports.engine import Route

__all__ = ["Asked", "InvalidError", "blame", "read", "taken"]

_READERS: dict[Route, Callable[[bytes, bool], Asked]] = {
    Route.CHAT: chat.read,
    Route.COMPLETIONS: completions.read,
    Route.RESPONSES: responses.read,
    Route.MESSAGES: messages.read,
    Route.EMBEDDINGS: embeddings.read,
}
_KEY = "`key` in `$"
"""How a key is blamed: here its object is."""
_MISSING = "Object missing required field `"
_REPEATING = ("Invalid enum value", "Object contains unknown field")
"""Words after which something of the caller's own follows, as long as it likes."""


def read(route: Route, content: bytes) -> Asked:
    """Return what a body asks for; as `taken`."""
    return taken(route, content)[0]


def taken(route: Route, content: bytes) -> tuple[Asked, bytes]:
    """Return what a body asks for, null taken for absent as OpenAI does, and it without what is ours.

    Raises `InvalidError`, which blames the field that is wrong.
    """
    if not is_bounded(content):
        raise InvalidError(f"The body has more than {PARTS_MAX} strings, objects and lists.")
    try:
        plain = stripped(content)
        return _READERS[route](content, plain is not content), plain
    except msgspec.ValidationError as error:
        raise blame(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidError("The body is not JSON.") from None
    except RecursionError:
        raise InvalidError("The body is nested too deeply.") from None


def blame(text: str) -> InvalidError:
    """Return the error of a body by msgspec's words: types and places, and nothing of what was in it."""
    message, _, place = text.replace(_KEY, "`$").partition(" - at `$")
    place = place.rstrip("`").removeprefix(".")
    message = next((words for words in _REPEATING if message.startswith(words)), message)
    if message.startswith(_MISSING):
        field = message.removeprefix(_MISSING).rstrip("`")
        place = f"{place}.{field}" if place else field
    return InvalidError(message, place or None)
