"""Who sends what, how long, and when? The settings of generated traces.

Settings only: `generate` draws from them. All are tagged by `kind`, so that a scenario file can
hold them; bounds hold for what is read from files.
"""

from itertools import pairwise
from typing import Annotated

from msgspec import Meta, Struct

from headrace.model.ids import ClassName, ModelName, TenantId
from headrace.model.ladder import LEVEL_MAX, OPTIONAL_MAX

Rate = Annotated[float, Meta(gt=0, le=1_000_000)]
"""Requests a second."""
Seconds = Annotated[float, Meta(ge=0, le=31_536_000)]
"""Seconds, at most a year."""
Phase = Annotated[float, Meta(gt=0, le=31_536_000)]
"""Seconds above none, at most a year."""
Length = Annotated[int, Meta(ge=1, le=10_000_000)]
"""Tokens of one side of one request."""
PERCENT = 100


class Poisson(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="poisson"):
    """Independent arrivals: many callers who do not know each other."""

    rate: Rate
    """Mean, in requests a second."""


class Gamma(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="gamma"):
    """Gamma-distributed gaps: bursty above a cv of 1, regular below."""

    rate: Rate
    """Mean, in requests a second."""
    cv: Annotated[float, Meta(gt=0, le=100)]
    """Standard deviation of the gaps over their mean; 1 is Poisson."""


class Even(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="even"):
    """Equal gaps, the first arrival at once: the VTC experiments."""

    rate: Rate
    """Requests a second."""


class OnOff(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="on_off"):
    """Arrivals in phases of fixed length with silence between; starts on."""

    rate: Rate
    """Mean while on, in requests a second."""
    on_s: Phase
    """Length of each phase with arrivals, in s."""
    off_s: Seconds
    """Length of each silence, in s."""
    even: bool = False
    """Equal gaps while on; else Poisson."""


class Segment(Struct, frozen=True, forbid_unknown_fields=True):
    """A stretch of constant rate that ends at `until_s`."""

    until_s: Phase
    """End, in s from the start of the source."""
    rate: Annotated[float, Meta(ge=0, le=1_000_000)]
    """Mean, in requests a second; 0: silence."""


class Ramp(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="ramp"):
    """Poisson arrivals whose rate changes by steps, and which end with the last segment."""

    segments: Annotated[tuple[Segment, ...], Meta(min_length=1, max_length=10_000)]

    def __post_init__(self) -> None:
        """Refuse segments that do not follow each other."""
        ends = [segment.until_s for segment in self.segments]
        if any(later <= earlier for earlier, later in pairwise(ends)):
            raise ValueError(f"expected rising until_s, not {ends}")


Arrivals = Poisson | Gamma | Even | OnOff | Ramp


class Fixed(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="fixed"):
    """Every request alike."""

    input: Length
    output: Length


class Uniform(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="uniform"):
    """Both sides even over a range, ends included, independent of each other."""

    input_min: Length
    input_max: Length
    output_min: Length
    output_max: Length

    def __post_init__(self) -> None:
        """Refuse an empty range."""
        if self.input_min > self.input_max or self.output_min > self.output_max:
            raise ValueError("expected each minimum at most its maximum")


class Lognormal(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="lognormal"):
    """Both sides lognormal, independent of each other, cut to a range."""

    input_median: Length
    output_median: Length
    input_sigma: Annotated[float, Meta(ge=0, le=10)] = 1.0
    """Standard deviation of the logarithm."""
    output_sigma: Annotated[float, Meta(ge=0, le=10)] = 1.0
    """Standard deviation of the logarithm."""
    input_min: Length = 1
    input_max: Length = 131_072
    output_min: Length = 1
    output_max: Length = 16_384

    def __post_init__(self) -> None:
        """Refuse an empty range."""
        if self.input_min > self.input_max or self.output_min > self.output_max:
            raise ValueError("expected each minimum at most its maximum")


Table = tuple[tuple[Annotated[float, Meta(ge=0, le=PERCENT)], Length], ...]
"""A distribution as (percent, value at that quantile), both rising, from 0 to 100 %."""


class Quantiles(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="quantiles"):
    """Each side by a table of quantiles, straight between them, independent of each other."""

    input: Table
    output: Table

    def __post_init__(self) -> None:
        """Refuse a table that is not a distribution."""
        for side in (self.input, self.output):
            percents, values = [point[0] for point in side], [point[1] for point in side]
            if not side or percents[0] != 0 or percents[-1] != PERCENT:
                raise ValueError("expected quantiles from 0 to 100 percent")
            if any(b <= a for a, b in pairwise(percents)):
                raise ValueError(f"expected rising percents, not {percents}")
            if values != sorted(values):
                raise ValueError(f"expected values that do not fall, not {values}")


class Empirical(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="empirical"):
    """Pairs drawn with replacement from observed ones, which keeps how the sides belong together."""

    pairs: Annotated[tuple[tuple[Length, Length], ...], Meta(min_length=1)]
    """Observed (input, output); `reshape.lengths_of` and `tables.read_lengths` give them."""
    total_below: Length | None = None
    """Leave out pairs whose sum is not below this; None: use all."""
    input_below: Length | None = None
    """Leave out pairs whose input is not below this; None: use all."""

    def __post_init__(self) -> None:
        """Refuse bounds that leave nothing."""
        if not self.kept():
            raise ValueError("expected bounds that leave at least one pair")

    def kept(self) -> list[tuple[int, int]]:
        """Return the pairs inside the bounds."""
        return [
            (given, made)
            for given, made in self.pairs
            if (self.total_below is None or given + made < self.total_below)
            and (self.input_below is None or given < self.input_below)
        ]


class Blend(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="blend"):
    """Each request from one of several distributions, drawn by weight: a bimodal load."""

    parts: Annotated[tuple["Part", ...], Meta(min_length=1, max_length=100)]


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    """One distribution of a blend."""

    weight: Annotated[float, Meta(gt=0)]
    lengths: "Plain"


Plain = Fixed | Uniform | Lognormal | Quantiles | Empirical
Lengths = Plain | Blend


class Undeclared(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="undeclared"
):
    """The caller gives no max_tokens."""


class Exact(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="exact"):
    """The caller declares the true length: published experiments that ignore end of text.

    It tells policies what no caller knows; use it only to repeat those.
    """


class Always(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="always"):
    """The caller declares the same bound each time; longer outputs are cut to it."""

    tokens: Length


class Headroom(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="headroom"):
    """The caller declares the true length times an even draw from a range, rounded up."""

    low: Annotated[float, Meta(ge=1, le=1_000)] = 1.0
    high: Annotated[float, Meta(ge=1, le=1_000)] = 4.0

    def __post_init__(self) -> None:
        """Refuse an empty range."""
        if self.low > self.high:
            raise ValueError("expected low at most high")


MaxTokens = Undeclared | Exact | Always | Headroom


class SharedPrefix(Struct, frozen=True, forbid_unknown_fields=True):
    """System prompts: each request opens with one of a few, drawn evenly.

    Their tokens come on top of the drawn input. Sources share none with each other.
    """

    tokens: Length
    """Length of each, in tokens; whole chunks."""
    groups: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    """How many different ones."""
    chunk_tokens: Length = 512
    """Tokens a chunk id stands for."""

    def __post_init__(self) -> None:
        """Refuse a length that is not whole chunks: a partial chunk is shared with nobody."""
        if self.tokens % self.chunk_tokens:
            raise ValueError(f"expected tokens to be a multiple of {self.chunk_tokens}")


class OptionalParts(Struct, frozen=True, forbid_unknown_fields=True):
    """What callers mark as optional of each prompt: equal parts at its end, ranked."""

    share: Annotated[float, Meta(gt=0, lt=1)] = 0.4
    """Of the drawn input, rounded down to whole tokens of each part."""
    parts: Annotated[int, Meta(ge=1, le=OPTIONAL_MAX)] = 4
    """How many; a prompt too short for a token in each has none."""


class TenantSource(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stream of alike requests of one tenant."""

    tenant: TenantId
    arrivals: Arrivals
    lengths: Lengths
    slo_class: ClassName | None = None
    model: ModelName | None = None
    max_tokens: MaxTokens = Undeclared()
    prefix: SharedPrefix | None = None
    """None: no two requests share a beginning."""
    optional: OptionalParts | None = None
    """None: nothing may be left out."""
    lowest: Annotated[int, Meta(ge=0, le=LEVEL_MAX)] = LEVEL_MAX
    """How far down a ladder of lesser forms its callers agree to go; 3: as far as their tenant."""
    start_s: Seconds = 0.0
    """When the source begins, in s of the trace."""
    stop_s: Seconds | None = None
    """When it ends, itself excluded, in s of the trace; None: with the trace."""
    name: str = ""
    """Tells sources of one tenant and class apart; part of the names of their random streams."""


class Mix(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A generated trace: its sources and where it ends, at whichever bound comes first."""

    sources: Annotated[tuple[TenantSource, ...], Meta(min_length=1, max_length=100_000)]
    duration_s: Phase | None = None
    """Arrivals are before this, in s; None: `rows` alone bounds the trace."""
    rows: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    """Most rows; None: `duration_s` alone bounds the trace."""

    def __post_init__(self) -> None:
        """Refuse an endless trace, and sources that would draw the same numbers."""
        if self.duration_s is None and self.rows is None:
            raise ValueError("expected duration_s, rows or both")
        seen = set()
        for source in self.sources:
            key = (source.tenant, source.slo_class, source.name)
            if key in seen:
                raise ValueError(f"two sources {key}: give them different names")
            seen.add(key)
