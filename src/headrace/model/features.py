"""What may a request ask of a model beside tokens, and what can a model do?"""

from enum import StrEnum


class Feature(StrEnum):
    """One thing that not every model, or engine, does."""

    STREAMING = "streaming"
    TOOLS = "tools"
    JSON = "json"
    """An answer that is JSON of any kind."""
    SCHEMA = "schema"
    """An answer held to a schema, or to a grammar."""
    LOGPROBS = "logprobs"
    BEST_OF = "best_of"
    """More answers made than are given."""
    PRIORITY = "priority"
    """A rank of its own, as vLLM's callers tell."""


EVERY = tuple(Feature)
