"""Fields that bodies have in common."""

from typing import Annotated, Any

from msgspec import Meta, Struct

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


def shows_usage(options: StreamOptions | None) -> bool:
    """Return whether a stream is to end with its usage."""
    return options is not None and bool(options.include_usage)


def shows_each_usage(options: StreamOptions | None) -> bool:
    """Return whether each frame of a stream is to tell the usage so far."""
    return shows_usage(options) and options is not None and bool(options.continuous_usage_stats)


def is_structured(form: Format | None) -> bool:
    """Return whether an answer is held to a form; plain text is none."""
    return form is not None and form.type not in (None, "text")


def cap(*counts: int | None) -> Tokens | None:
    """Return the first cap that is told."""
    for count in counts:
        if count is not None:
            return Tokens(count)
    return None
