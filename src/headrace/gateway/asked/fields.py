"""Fields that bodies have in common."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from headrace.model.features import Feature
from headrace.units import REQUEST_TOKENS_MAX, Tokens

Model = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=1, le=REQUEST_TOKENS_MAX)]
Choices = Annotated[int, Meta(ge=1, le=128)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


class StreamOptions(Struct, gc=False):
    """How the answer is streamed."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Format(Struct, gc=False):
    """What form an answer must have."""

    type: str | None = None

    def feature(self) -> Feature | None:
        """Return what a model must do to keep it; plain text is no form."""
        if self.type in (None, "text"):
            return None
        return Feature.JSON if self.type == "json_object" else Feature.SCHEMA


class Body(Struct, kw_only=True):
    """A request, as far as it matters here."""

    model: Model
    cache_salt: str | None = None
    user: Any = None
    safety_identifier: Any = None
    """What `user` is called now. Neither is ours to judge: engines take what they take."""

    def end_user(self) -> str:
        """Return for whom of the caller's users it is, if that is told; else nothing."""
        told = self.safety_identifier or self.user
        return told if isinstance(told, str) else ""


class Answered(Body, kw_only=True):
    """One whose answer may come as a stream."""

    stream: bool | None = None


class Ranked(Answered, kw_only=True):
    """One that may say how soon it is wanted."""

    priority: Priority | None = None


class Choosing(Ranked, kw_only=True):
    """One for a number of answers to choose from."""

    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Choices | None = None
    response_format: Format | None = None
    logprobs: Any = None
    """Yes or no in a chat, a number in completions: the engine's to judge."""


def shows_usage(options: StreamOptions | None) -> bool:
    """Return whether a stream is to end with its usage."""
    return options is not None and bool(options.include_usage)


def shows_each_usage(options: StreamOptions | None) -> bool:
    """Return whether each frame of a stream is to tell the usage so far."""
    return shows_usage(options) and options is not None and bool(options.continuous_usage_stats)


def features(
    body: Answered,
    *,
    tools: bool = False,
    form: Format | None = None,
    logprobs: object = None,
    best_of: bool = False,
) -> tuple[Feature, ...]:
    """Return what a body asks for beside tokens; `logprobs` is as it was told, whatever that is."""
    ranked = isinstance(body, Ranked) and body.priority is not None
    asked = (
        Feature.STREAMING if body.stream else None,
        Feature.TOOLS if tools else None,
        None if form is None else form.feature(),
        None if logprobs is None or logprobs is False else Feature.LOGPROBS,
        Feature.BEST_OF if best_of else None,
        Feature.PRIORITY if ranked else None,
    )
    return tuple(one for one in asked if one is not None)


def cap(*counts: int | None) -> Tokens | None:
    """Return the first cap that is told."""
    for count in counts:
        if count is not None:
            return Tokens(count)
    return None
