"""What less may a caller be given, and what was it given?

The ladder of DEG-1: 0 as asked; 1 the same model, less output and effort; 2 less optional context too; 3 a
smaller model that the operator approved; 4 later, or not at all. Class, tenant and caller must all agree.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from headrace.model.ids import ModelName

OPTIONAL_MAX = 256
"""Optional parts of one prompt that are told apart; those of lower rank count as one more."""
LEVEL_MAX = 3
"""The lowest form that is still an answer now."""
Level = Annotated[int, Meta(ge=0, le=LEVEL_MAX)]


class Effort(StrEnum):
    """How much a model is to reason, least first: the words of OpenAI's API."""

    MINIMAL = "minimal"
    LOW = "low"
    MEDIUM = "medium"


class LadderSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far down a class may go when there is not enough capacity, and what each step gives up."""

    level: Annotated[int, Meta(ge=1, le=LEVEL_MAX)] = 2
    """Lowest step. 2: the model stays what was asked for."""
    output_part: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """From level 1 on, the share of the output that its caller allows. 0.5: half."""
    effort: Effort | None = Effort.LOW
    """From level 1 on, the most reasoning effort. None: as asked."""
    keep: Annotated[int, Meta(ge=0, le=OPTIONAL_MAX)] = 0
    """From level 2 on, how many optional parts stay, by rank. 0: none."""
    model: (
        Annotated[
            str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$(?!\n)")
        ]
        | None
    ) = None
    """At level 3, the smaller model. Needed where `level` is 3."""
    defer: bool = False
    """Whether a request that no step can save goes to the durable queue, where there is one, instead of
    being refused."""


class Lesser(Struct, frozen=True, kw_only=True, gc=False):
    """In what form a request is served that cannot be served as asked."""

    level: Level
    model: ModelName
    """Which one answers, canonical."""
    kept: int | None = None
    """Optional parts that stay, by rank; None: all."""
    effort: Effort | None = None
    """The most reasoning effort; None: as asked. The output's limit is the dispatch's own."""
