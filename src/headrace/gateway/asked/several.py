"""One prompt or several, each as text or as token ids."""

from typing import Annotated

from msgspec import Meta, Struct

from headrace.gateway.asked.prompt import Counted, Prompt
from headrace.gateway.asked.result import InvalidError
from headrace.gateway.asked.scripts import scripts
from headrace.model.request import TextBytes

Id = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Prompts = str | Annotated[list[str | Id | list[Id]], Meta(min_length=1)]

PROMPTS_MAX = 2_048
"""Prompts in one request: OpenAI's limit."""


class Gathered(Struct, frozen=True, gc=False):
    """All prompts of a request."""

    prompt: bytes
    count: int
    tokens: int
    margin: int
    """Both of all prompts together."""
    longest: int
    is_text: bool

    def text(self) -> TextBytes | None:
        """Return the bytes of prompts that are text and nothing else."""
        return scripts(self.prompt) if self.is_text and self.prompt else None


def gather(prompts: Prompts, field: str) -> Gathered:
    """Return what there is of prompts; `field` is to blame if they are of mixed kinds."""
    try:
        found = _each(prompts, field)
    except TypeError:
        raise InvalidError("Expected one kind of prompt", field) from None
    return Gathered(
        prompt=b"\x1e".join([one.prompt for one in found]),
        count=len(found),
        tokens=sum(one.tokens for one in found),
        margin=sum(one.margin for one in found),
        longest=max(one.tokens for one in found),
        is_text=all(one.is_text for one in found),
    )


def _each(prompts: Prompts, field: str) -> list[Counted]:
    """Return each prompt; a list of bare numbers is a single one. Raises `TypeError` for a mixture."""
    if isinstance(prompts, str):
        return [_counted(prompts)]
    if isinstance(prompts[0], int):
        return [_counted(prompts)]
    if len(prompts) > PROMPTS_MAX:
        raise InvalidError(f"More than {PROMPTS_MAX} prompts", field)
    return [_counted(one) for one in prompts]


def _counted(one: object) -> Counted:
    prompt = Prompt()
    if isinstance(one, str):
        prompt.text(one)
    elif isinstance(one, list):
        prompt.ids(one)
    else:
        raise TypeError
    return prompt.counted()
