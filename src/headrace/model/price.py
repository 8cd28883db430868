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


class GpuPrices(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an hour of one GPU costs, in US dollars, by kind."""

    usd_gpu_hour: Annotated[dict[str, _Usd], Meta(max_length=1_000)] = {}
    """By how its name begins: `h100`, or `h100 sxm 80 gb`. No price ships: they differ by contract."""

    def of(self, gpu: str) -> float | None:
        """Return the price of a kind of GPU by the longest name that it begins with; None: not known."""
        found = [name for name in self.usd_gpu_hour if begins(gpu, name)]
        return self.usd_gpu_hour[max(found, key=len)] if found else None


def begins(gpu: str, name: str) -> bool:
    """Return whether a kind of GPU is of a name: whole words, in any case."""
    return f"{gpu.lower()} ".startswith(f"{name.lower().strip()} ")
