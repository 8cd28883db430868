"""What less may a caller be given, and what was it given?

The ladder of DEG-1: 0 as asked; 1 the same model, less output and effort; 2 less optional context too; 3 a
smaller model that the operator approved; 4 later, or not at all. Class, tenant and caller must all agree.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from headrace.model.ids import ModelName
from headrace.units import DurationNs, Tokens

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
    being refused; where its tenant and its caller agreed to all of the ladder."""

    def __post_init__(self) -> None:
        """Refuse a smaller model that is never reached, and a level 3 without one."""
        if self.level == LEVEL_MAX and self.model is None:
            raise ValueError("level 3 needs `model`, the smaller one that answers")
        if self.level < LEVEL_MAX and self.model is not None:
            raise ValueError(f"`model` is for level 3, and the ladder ends at level {self.level}")


class LadderFacts(Struct, frozen=True, kw_only=True, gc=False):
    """What the steps of one request are made from."""

    tenant: Level
    """How far down its tenant agreed to go."""
    caller: int
    """How far down its caller agreed to go."""
    model: ModelName
    """What was asked for, canonical."""
    smaller: bool
    """Whether the smaller model is served for its class, and may be used by its tenant."""
    input_tokens: Tokens
    optional: tuple[Tokens, ...] = ()
    max_output: Tokens | None = None
    output_p90: Tokens
    """Predicted: what an answer without a limit is taken to be allowed."""
    smaller_cap: Tokens | None = None
    """What the smaller model gives at most where no limit was named; None: no more than at other steps."""


class Pressure(Struct, frozen=True, kw_only=True, gc=False):
    """What a class's level is decided by: the work that comes in, against what can be done."""

    level: int
    """Where the class is."""
    lowest: Level
    """Where its ladder ends."""
    offered: tuple[int, ...]
    """Work that came in lately for its pools, if everybody were served at each level from 0 on as far as
    they agreed: work-seconds per second, in millionths."""
    rate_micro: int
    """What the ready replicas of its pools do, in the same unit: measured, and no less than half of what
    they were declared to do."""
    wait_ns: DurationNs
    """How long what is queued takes them."""
    refused: int
    """Of the last three who were refused at this level, those within the last ten seconds."""
    calm_ns: DurationNs
    """For how long the level above would have done."""
    quiet_ns: DurationNs
    """For how long there was no sign that this one does not do."""
    failed: int
    """Steps up in a row that were tried against the forecast, and taken back."""


class Lesser(Struct, frozen=True, kw_only=True, gc=False):
    """In what form a request is served that cannot be served as asked."""

    level: Level
    model: ModelName
    """Which one answers, canonical."""
    kept: int | None = None
    """Optional parts that stay, by rank; None: all."""
    effort: Effort | None = None
    """The most reasoning effort; None: as asked. The output's limit is the dispatch's own."""
