"""What do tokens cost in money? A provider's price list, in the words of providers."""

from math import ceil
from typing import Annotated

from msgspec import Meta, Struct

from headrace.model.engine import Usage

_Usd = Annotated[float, Meta(ge=0, le=1_000_000)]


class PriceSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What tokens cost, in US dollars for a million of them."""

    input: _Usd
    """Of input tokens."""
    output: _Usd
    """Of output tokens."""
    cached: _Usd | None = None
    """Of input tokens found in a cache. None: as any others."""

    @property
    def found(self) -> float:
        """The price of a cached input token."""
        return self.input if self.cached is None else self.cached

    def micro_usd(self, usage: Usage) -> int:
        """Return what an answer costs, rounded up: dollars a million are micro-dollars each."""
        fresh = usage.input_tokens - usage.cached_tokens
        return ceil(
            fresh * self.input
            + usage.cached_tokens * self.found
            + usage.output_tokens * self.output
        )
