"""What an emulated engine says of an answer, in vLLM's words: one JSON object, or events.

Bytes only: when they are sent, to whom, and what becomes of them on the way is for others to know.
A writer is made for one answer; what stays the same in its events is encoded once.
"""

from collections.abc import Callable

from headrace.adapters.engines.words.choices import Chat, Completion
from headrace.adapters.engines.words.embeddings import Embeddings, Vectors
from headrace.adapters.engines.words.frame import Head, Writer
from headrace.adapters.engines.words.messages import Messages
from headrace.adapters.engines.words.responses import Responses

_KINDS: dict[str, Callable[[Head], Writer]] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completion,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
}
_EMBEDDINGS = "/v1/embeddings"

PATHS = (*_KINDS, _EMBEDDINGS)
"""Every path that a writer can be had for."""


def writer(  # noqa: PLR0913 - what an answer's envelope says
    kind: str,
    name: str,
    created: int,
    model: str,
    prompt_tokens: int,
    *,
    usage_at_end: bool = False,
    usage_always: bool = False,
    usage: bool = True,
    vectors: Vectors | None = None,
) -> Writer:
    """Return what writes one answer to a request of a path, under an id.

    `usage_at_end` and `usage_always` are for chats and completions; the others tell their usage
    without being asked. `usage=False`: never tell it, whoever asks. `vectors`: of an embedding.
    """
    head = Head(
        name=name,
        created=created,
        model=model,
        prompt_tokens=prompt_tokens,
        usage=usage,
        usage_at_end=usage_at_end and usage,
        usage_always=usage_always and usage,
    )
    if kind == _EMBEDDINGS:
        return Embeddings(head, vectors or Vectors())
    return _KINDS[kind](head)
